"""Rewards completions by their length in characters (Unicode code points, of the completion as it
is)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from services.reward.grading.registry import Params, grader
from shared.wire import Part, ScoreItem


class LengthParams(Params):
    """Which length is right: a `target`, or a range from `min` to `max`, of which one may be left
    out."""

    min: int | None = Field(default=None, ge=1)
    """The fewest characters that earn 1. None: there is no such bound."""

    max: int | None = Field(default=None, ge=1)
    """The most characters that earn 1. None: there is no such bound."""

    target: int | None = Field(default=None, ge=1)
    """The number of characters that earns 1, in place of `min` and `max`."""

    shape: Literal["step", "linear"] = "step"
    """What other lengths earn. "step": 0. "linear": less and less with the distance, in a straight
    line down to 0 at no characters, and to 0 at twice `max` or the target."""

    @model_validator(mode="after")
    def _a_range_or_a_target(self) -> LengthParams:
        has_range = self.min is not None or self.max is not None
        if has_range == (self.target is not None):
            raise ValueError("set either target, or min and/or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}; expected min <= max")
        return self


@grader("length")
def length(items: Sequence[ScoreItem], params: LengthParams) -> list[Part]:
    """1 for a completion whose length in characters is right; `shape` says what others get."""
    low, high = params.target or params.min, params.target or params.max
    return [_part(len(item.completion), low, high, params.shape) for item in items]


def _part(count: int, low: int | None, high: int | None, shape: str) -> Part:
    value = 1.0
    if low is not None and count < low:
        value = count / low
    elif high is not None and count > high:
        value = max(0.0, 2.0 - count / high)
    if shape == "step" and value < 1.0:
        value = 0.0
    return Part(value=value, verdict="ok" if value else "wrong", detail=f"{count} characters")
