"""What OpenAI's `score_model` and `label_model` share: the job's messages to the judge."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field

from services.reward.grading import templates
from services.reward.grading.judge import JudgeGrader, JudgeParams, JudgeSampling
from services.reward.grading.registry import Params
from shared.wire import ScoreItem


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

    model: str
    """Which model judges, as the endpoint at HONE_JUDGE_URL calls it."""

    input: tuple[InputMessage, ...] = Field(min_length=1)
    """The messages to the judge. Their texts are templates: `{{ item.question }}` is a column, `{{
    sample.output_text }}` the completion."""

    sampling_params: JudgeSampling = JudgeSampling()
    """What OpenAI's grader objects call it."""


M = TypeVar("M", bound=MessagesParams)


class MessagesGrader(JudgeGrader[M]):
    """A grader whose question is the job's own messages."""

    @property
    def model(self) -> str:
        return self.params.model

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
