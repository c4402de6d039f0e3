"""Graders that ask a language model: `llm_judge`, and OpenAI's `score_model` and `label_model`.
Endpoint and key are the service's settings (`grading/judging.py`).

The completion is marked as data, but it may still influence the judge: prefer rewards that can be
checked, and look at what the judge rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from services.reward.grading import templates
from services.reward.grading.judging import (
    JudgeField,
    JudgeGrader,
    JudgeParams,
    JudgeSampling,
    NoVerdict,
    number,
)
from services.reward.grading.registry import Params, grader, right_or_wrong
from shared.wire import Part, ScoreItem

SYSTEM = "You grade a text by a rubric."


class LlmJudgeParams(JudgeParams):
    """A rubric for a language model, which answers with a number from `low` to `high`. The reward
    is the position of the number between the two, 0 to 1."""

    rubric: str = Field(min_length=1)
    """The question to the judge, a template: `{{ item.question }}` is a column, `{{
    sample.output_text }}` the completion. Hone itself adds how the judge has to reply."""

    low: float = 0.0
    """The lowest number that the judge may give; it earns 0."""

    high: float = 10.0
    """The highest number that the judge may give; it earns 1."""

    system: str | None = None
    """The first message to the judge. None: that it grades a text by a rubric."""

    sampling: JudgeSampling = JudgeSampling(temperature=0.0)
    """How the judge samples. Without it the temperature is 0."""

    @model_validator(mode="after")
    def _range(self) -> LlmJudgeParams:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}; expected low < high")
        return self


@grader("llm_judge")
class LlmJudge(JudgeGrader[LlmJudgeParams]):
    """What a language model thinks of the completion by your rubric, 0 to 1.

    Any text that makes the judge say so earns it: the completion is marked as data, but may
    influence the judge. Prefer rewards that can be checked, and read what it rewards.
    """

    @property
    def sampling(self) -> JudgeSampling:
        return self.params.sampling

    def texts(self) -> list[str]:
        return [self.params.rubric]

    def messages(self, item: ScoreItem) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": self.params.system or SYSTEM},
            {"role": "user", "content": templates.render(self.params.rubric, item)},
        ]

    def form(self) -> dict[str, JudgeField]:
        low, high = self.params.low, self.params.high
        return {
            "reason": JudgeField('"<one sentence>"', {"type": "string"}),
            "score": JudgeField(f"<number from {low:g} to {high:g}>", {"type": "number"}),
        }

    def part(self, found: Mapping[str, Any]) -> Part:
        low, high = self.params.low, self.params.high
        score = number(found, "score", low, high)
        return Part(
            value=(score - low) / (high - low),
            detail=f"{score:g} of {high:g}: {found.get('reason', '')!s:.300}",
        )


class Content(Params):
    type: Literal["input_text", "output_text"] = "input_text"
    """OpenAI's name of what this is."""

    text: str
    """What is said, a template."""


class InputMessage(Params):
    """A message to the judge, a template."""

    role: Literal["user", "assistant", "system", "developer"]
    """Who says it."""

    content: str | Content | tuple[Content, ...]
    """What is said, a template, or several."""

    type: Literal["message"] = "message"
    """OpenAI's name of what this is."""

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, tuple) else (self.content,)
        return "\n".join(part if isinstance(part, str) else part.text for part in parts)


class MessagesParams(JudgeParams):
    """Messages to the judge."""

    name: str = ""
    """What OpenAI's grader objects call it. What metrics call it is the reward's own `name`."""

    input: tuple[InputMessage, ...] = Field(min_length=1)
    """The messages to the judge. Their texts are templates: `{{ item.question }}` is a column, `{{
    sample.output_text }}` the completion."""

    sampling_params: JudgeSampling = JudgeSampling()
    """What OpenAI's grader objects call it."""


M = TypeVar("M", bound=MessagesParams)


class MessagesGrader(JudgeGrader[M]):
    """A grader whose question is the job's own messages."""

    @property
    def sampling(self) -> JudgeSampling:
        return self.params.sampling_params

    def texts(self) -> list[str]:
        return [message.text for message in self.params.input]

    def messages(self, item: ScoreItem) -> list[dict[str, str]]:
        return [
            {"role": message.role, "content": templates.render(message.text, item)}
            for message in self.params.input
        ]


class ScoreModelParams(MessagesParams):
    """A question to a language model, and the numbers that it may answer with."""

    type: Literal["score_model"] = "score_model"
    """The grader's name, as OpenAI's grader objects have it."""

    range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest number that the judge may give."""

    pass_threshold: float | None = None
    """A score of at least this earns 1, and a lower one 0. None: the score itself is the reward."""


@grader("score_model")
class ScoreModel(MessagesGrader[ScoreModelParams]):
    """The number that a language model gives the completion, in `range`. As OpenAI's grader of that
    name.

    Any text that makes the judge say so earns it: the completion is marked as data, but may
    influence the judge. Prefer rewards that can be checked, and read what it rewards.
    """

    def form(self) -> dict[str, JudgeField]:
        low, high = self.params.range
        return {"result": JudgeField(f"<number from {low:g} to {high:g}>", {"type": "number"})}

    def part(self, found: Mapping[str, Any]) -> Part:
        score = number(found, "result", *self.params.range)
        threshold = self.params.pass_threshold
        return Part(
            value=score if threshold is None else float(score >= threshold),
            detail=f"scored {score:g}",
        )


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
    OpenAI's grader of that name.

    Any text that makes the judge say so earns it: the completion is marked as data, but may
    influence the judge. Prefer rewards that can be checked, and read what it rewards.
    """

    def form(self) -> dict[str, JudgeField]:
        labels = self.params.labels
        schema = {"type": "string", "enum": list(labels)}
        return {"result": JudgeField(f'"<one of: {", ".join(labels)}>"', schema)}

    def part(self, found: Mapping[str, Any]) -> Part:
        given, labels = found.get("result"), self.params.labels
        if given not in labels:
            raise NoVerdict(f"the judge gave {given!r:.80}; expected one of {', '.join(labels)}")
        return right_or_wrong(given in self.params.passing_labels, f"labelled {given!r}")
