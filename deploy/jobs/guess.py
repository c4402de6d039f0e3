class Game:
    """A number from 0 to 31 that has to be found by at most eight guesses."""

    def reset(self, secret: int, **row: object) -> str:
        self.secret, self.left, self.found = secret, 8, False
        return " It is from 0 to 31."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        if self.done:
            return "the game is over"
        self.left -= 1
        self.found = number == self.secret
        if self.found:
            return "correct"
        return "higher" if number < self.secret else "lower"

    @property
    def done(self) -> bool:
        return self.found or self.left == 0

    def get_reward(self) -> float:
        return float(self.found)
