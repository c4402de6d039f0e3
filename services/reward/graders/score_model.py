"""OpenAI's `score_model`: a language model gives the completion a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from services.reward.grading.judge import Said, replies
from services.reward.grading.judge.messages import MessagesGrader, MessagesParams
from services.reward.grading.registry import grader
from shared.wire import Part


class ScoreModelParams(MessagesParams):
    """A question to a language model, and the numbers that it may answer with."""

    type: Literal["score_model"] = "score_model"
    """The grader's name, as OpenAI's grader objects have it."""

    range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest number that the judge may give."""

    pass_threshold: float | None = None
    """A score from here on earns 1 and a lower one 0. None: the score itself is the reward."""


@grader("score_model")
class ScoreModel(MessagesGrader[ScoreModelParams]):
    """The number that a language model gives the completion, in `range`. As OpenAI's grader of that
    name."""

    def form(self) -> dict[str, Said]:
        low, high = self.params.range
        return {"result": Said(f"<number from {low:g} to {high:g}>", {"type": "number"})}

    def part(self, found: Mapping[str, Any]) -> Part:
        score = replies.number(found, "result", *self.params.range)
        threshold = self.params.pass_threshold
        return Part(
            value=score if threshold is None else float(score >= threshold),
            detail=f"scored {score:g}",
        )
