"""OpenAI's `label_model`: a language model gives the completion one of some labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from services.reward.grading.judge import Said, replies
from services.reward.grading.judge.messages import MessagesGrader, MessagesParams
from services.reward.grading.registry import grader
from shared.wire import Part


class LabelModelParams(MessagesParams):
    """A question to a language model, and the labels that it may answer with."""

    type: Literal["label_model"] = "label_model"
    """The grader's name, as OpenAI's grader objects have it."""

    labels: tuple[str, ...] = Field(min_length=1)
    """The labels that the judge chooses among."""

    passing_labels: tuple[str, ...]
    """The labels that earn 1; any other earns 0."""

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

    def form(self) -> dict[str, Said]:
        labels = self.params.labels
        schema = {"type": "string", "enum": list(labels)}
        return {"result": Said(f'"<one of: {", ".join(labels)}>"', schema)}

    def part(self, found: Mapping[str, Any]) -> Part:
        label = replies.label(found, "result", self.params.labels)
        passes = label in self.params.passing_labels
        return Part(
            value=float(passes), verdict="ok" if passes else "wrong", detail=f"labelled {label!r}"
        )
