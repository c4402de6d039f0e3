r"""DAPO's soft punishment of long completions (arXiv 2503.14476, equation 13).

    R(y) = 0                                        |y| <= max - buffer
           ((max - buffer) - |y|) / buffer          max - buffer < |y| <= max
           -1                                       |y| > max

with |y| in tokens, times `penalty`. Use it with `shaping = true`: it counts, but makes no group
informative.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from services.reward.grading.registry import Grader, GradingFailed, Params, grader
from shared.wire import Part, ScoreItem


class OverlongParams(Params):
    """Which lengths in tokens cost something."""

    max_tokens: int = Field(ge=1)
    """The number of tokens from which on the whole penalty applies, usually
    `sampling.max_tokens`."""

    buffer_tokens: int = Field(ge=0)
    """Over how many tokens before it the penalty grows from 0."""

    penalty: float = Field(default=1.0, ge=0)
    """What a completion of `max_tokens` loses."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongParams:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens is {self.buffer_tokens} and max_tokens {self.max_tokens}; expected "
                "no more than that"
            )
        return self


@grader("overlong")
class Overlong(Grader[OverlongParams]):
    """0 for a completion of up to `max_tokens - buffer_tokens` tokens, falling to `-penalty` at
    `max_tokens`, and that beyond."""

    items_per_call = 1

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [self._grade(item) for item in items]

    def _grade(self, item: ScoreItem) -> Part:
        if item.num_tokens is None:
            raise GradingFailed(
                "the item does not say how many tokens its completion has (num_tokens)",
                "sample_parse_error",
            )
        value = self.params.penalty * punishment(
            item.num_tokens, self.params.max_tokens, self.params.buffer_tokens
        )
        return Part(
            value=value, verdict="ok" if not value else "wrong", detail=f"{item.num_tokens} tokens"
        )


def punishment(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """Returns equation 13, -1 to 0."""
    free = max_tokens - buffer_tokens
    if num_tokens <= free:
        return 0.0
    return (free - num_tokens) / buffer_tokens if num_tokens <= max_tokens else -1.0
