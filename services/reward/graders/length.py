"""Rewards completions by their length in characters (Unicode code points, of the completion as it
is)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from services.reward.grading.registry import Params, grader
from shared.wire import Part, ScoreItem


class LengthParams(Params):
    """Either `target`, or `min` and `max` (inclusive; either may be left out). Characters.

    `shape` "step": 1 inside (or exactly at the target), else 0. "linear": 1 inside, falling in a
    straight line with the distance outside: to 0 at no characters below `min` or the target, and to
    0 at twice `max` or the target.
    """

    min: int | None = Field(default=None, ge=1)
    max: int | None = Field(default=None, ge=1)
    target: int | None = Field(default=None, ge=1)
    shape: Literal["step", "linear"] = "step"

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
