"""OpenAI's `score_model`: a language model gives the completion a number."""

from __future__ import annotations

from typing import Literal

from services.reward.grading.judge import replies
from services.reward.grading.judge.messages import MessagesGrader, MessagesParams
from services.reward.grading.registry import grader
from shared.wire import Part


class ScoreModelParams(MessagesParams):
    """`input`: messages, templates. `range`: the least and the most that the judge may give.
    `pass_threshold`: a score from there on is 1 and below 0, instead of the score itself."""

    type: Literal["score_model"] = "score_model"
    range: tuple[float, float] = (0.0, 1.0)
    pass_threshold: float | None = None


@grader("score_model")
class ScoreModel(MessagesGrader[ScoreModelParams]):
    """The number that a language model gives the completion, in `range`. As OpenAI's grader of that
    name."""

    def form(self) -> str:
        low, high = self.params.range
        return f'{{"result": <number from {low:g} to {high:g}>}}'

    def part(self, reply: str) -> Part:
        score = replies.number(reply, "result", *self.params.range)
        threshold = self.params.pass_threshold
        return Part(
            value=score if threshold is None else float(score >= threshold),
            detail=f"scored {score:g}",
        )
