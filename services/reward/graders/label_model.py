"""OpenAI's `label_model`: a language model gives the completion one of some labels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.reward.grading.judge import replies
from services.reward.grading.judge.messages import MessagesGrader, MessagesParams
from services.reward.grading.registry import grader
from shared.wire import Part


class LabelModelParams(MessagesParams):
    """`input`: messages, templates. `labels` that the judge chooses among; `passing_labels` earn
    1."""

    type: Literal["label_model"] = "label_model"
    labels: tuple[str, ...] = Field(min_length=1)
    passing_labels: tuple[str, ...]

    @model_validator(mode="after")
    def _known(self) -> LabelModelParams:
        unknown = set(self.passing_labels) - set(self.labels)
        if unknown:
            raise ValueError(f"passing_labels has {sorted(unknown)[0]!r}, which is not in labels")
        return self


@grader("label_model")
class LabelModel(MessagesGrader[LabelModelParams]):
    """1 if the label that a language model gives the completion is a passing one, else 0. As
    OpenAI's grader of that name."""

    def form(self) -> str:
        labels = ", ".join(self.params.labels)
        return f'{{"result": "<one of: {labels}>"}}'

    def part(self, reply: str) -> Part:
        label = replies.label(reply, "result", self.params.labels)
        passes = label in self.params.passing_labels
        return Part(
            value=float(passes), verdict="ok" if passes else "wrong", detail=f"labelled {label!r}"
        )
