"""Graders of a completion's form: its length in characters (Unicode code points), its length in
tokens, and `<think>...</think>` before the answer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.reward.grading.failures import GradingFailed
from services.reward.grading.reasoning import THINK, opens_thought, prompt_end
from services.reward.grading.registry import ItemGrader, Params, grader, right_or_wrong
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
class Length(ItemGrader[LengthParams]):
    """1 for a completion whose length in characters is right; `shape` says what others get.

    A reward for form: any text of that length earns it, without `min` an empty one too. Use it
    beside a grader of the answer, with `shaping = true`.
    """

    whole_text = True

    async def grade_item(self, item: ScoreItem) -> Part:
        low, high = self.params.target or self.params.min, self.params.target or self.params.max
        count, value = len(item.completion), 1.0
        if low is not None and count < low:
            value = count / low
        elif high is not None and count > high:
            value = max(0.0, 2.0 - count / high)
        if self.params.shape == "step" and value < 1.0:
            value = 0.0
        return Part(value=value, verdict="ok" if value else "wrong", detail=f"{count} characters")


class OverlongParams(Params):
    """Which lengths in tokens cost something."""

    max_tokens: int = Field(ge=1)
    """The number of tokens at which the whole penalty applies, usually `sampling.max_tokens`."""

    buffer_tokens: int = Field(ge=0)
    """The number of tokens before `max_tokens` over which the penalty grows from 0."""

    penalty: float = Field(default=1.0, ge=0)
    """The reward that a completion of `max_tokens` loses."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongParams:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens is {self.buffer_tokens} and max_tokens {self.max_tokens}; expected "
                "no more than that"
            )
        return self


@grader("overlong")
class Overlong(ItemGrader[OverlongParams]):
    """0 for a completion of up to `max_tokens - buffer_tokens` tokens, falling to `-penalty` at
    `max_tokens` and beyond. An empty one loses nothing: use it beside a grader of the answer."""

    whole_text = True

    async def grade_item(self, item: ScoreItem) -> Part:
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


@grader("think_format")
class ThinkFormat(ItemGrader[Params]):
    """1 for a completion of exactly one <think>...</think> at its start and then a non-empty
    answer, else 0. Where the prompt or the chat template has opened the thought, the completion
    begins in it. The reward's key `reasoning` names other tags.

    A reward for form: `<think></think>a` earns it. Use it beside a grader of the answer, with
    `shaping = true`.
    """

    whole_text = True

    async def grade_item(self, item: ScoreItem) -> Part:
        named = self.spec.reasoning
        tags = THINK if isinstance(named, bool) else named
        opened = tags[0] if opens_thought(prompt_end(item), tags) else ""
        fault = _fault(opened + item.completion, *tags)
        return right_or_wrong(not fault, fault)


def _fault(text: str, begin: str, end: str) -> str:
    if not text.startswith(begin):
        return f"does not start with {begin}"
    if (text.count(begin), text.count(end)) != (1, 1):
        return f"{text.count(begin)} {begin} and {text.count(end)} {end}, expected one each"
    return "" if text.partition(end)[2].strip() else f"no answer after {end}"
