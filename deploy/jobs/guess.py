class Game:
    """A number from 0 to 31 that has to be found."""

    def reset(self, secret: int, **row: object) -> str:
        self.secret, self.found = secret, False
        return " It is from 0 to 31."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        self.found = self.found or number == self.secret
        if number == self.secret:
            return "correct"
        return "higher" if number < self.secret else "lower"

    @property
    def done(self) -> bool:
        return self.found

    def get_reward(self) -> float:
        return float(self.found)
