"""OpenAI's `score_model` and `label_model`: a language model gives a number, or one of some
labels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from pydantic import Field, model_validator

from services.reward.graders import templates
from services.reward.graders.judge import J, JudgeGrader, JudgeParams, Sampling, replies
from services.reward.graders.judge.client import Question
from services.reward.registry import Params, grader
from shared.wire import Part, ScoreItem


class Content(Params):
    type: Literal["input_text"] = "input_text"
    text: str


class InputMessage(Params):
    """A message to the judge, a template."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Content | tuple[Content, ...]
    type: Literal["message"] = "message"

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, tuple) else (self.content,)
        return "\n".join(part if isinstance(part, str) else part.text for part in parts)


class ModelParams(JudgeParams):
    name: str = ""
    model: str
    input: tuple[InputMessage, ...] = Field(min_length=1)
    sampling_params: Sampling = Sampling()


class ScoreModelParams(ModelParams):
    """`input`: messages, templates. `range`: the least and the most that the judge may give.
    `pass_threshold`: a score from there on is 1 and below 0, instead of the score itself."""

    type: Literal["score_model"] = "score_model"
    range: tuple[float, float] = (0.0, 1.0)
    pass_threshold: float | None = None


class LabelModelParams(ModelParams):
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


class _Model(JudgeGrader[J]):
    """Both: the job's messages, and after them how to answer."""

    def texts(self) -> list[str]:
        return [message.text for message in self._own.input]

    def question(self, item: ScoreItem) -> Question:
        messages = [
            {"role": message.role, "content": templates.render(message.text, item)}
            for message in self._own.input
        ]
        messages.append(
            {
                "role": "system",
                "content": f"End with one JSON object and nothing after it: {self.form()}",
            }
        )
        return Question(self._own.model, tuple(messages), self._own.sampling_params.sent())

    @abstractmethod
    def form(self) -> str:
        """Returns the JSON object to answer with."""

    @property
    def _own(self) -> ModelParams:
        params: Any = self.params
        return params


@grader("score_model")
class ScoreModel(_Model[ScoreModelParams]):
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


@grader("label_model")
class LabelModel(_Model[LabelModelParams]):
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
