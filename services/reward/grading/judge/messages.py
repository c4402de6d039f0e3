"""What OpenAI's `score_model` and `label_model` share: the job's messages to the judge, and after
them how to answer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, TypeVar

from pydantic import Field

from services.reward.grading import templates
from services.reward.grading.judge import JudgeGrader, JudgeParams, JudgeSampling
from services.reward.grading.judge.client import Question
from services.reward.grading.registry import Params
from shared.wire import ScoreItem


class Content(Params):
    type: Literal["input_text", "output_text"] = "input_text"
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


class MessagesParams(JudgeParams):
    """`input`: messages, templates."""

    name: str = ""
    model: str
    input: tuple[InputMessage, ...] = Field(min_length=1)
    sampling_params: JudgeSampling = JudgeSampling()


M = TypeVar("M", bound=MessagesParams)


class MessagesGrader(JudgeGrader[M]):
    """A grader whose question is the job's own messages."""

    def texts(self) -> list[str]:
        return [message.text for message in self.params.input]

    def question(self, item: ScoreItem) -> Question:
        messages = [
            {"role": message.role, "content": templates.render(message.text, item)}
            for message in self.params.input
        ]
        ending = f"End with one JSON object and nothing after it: {self.form()}"
        messages.append({"role": "system", "content": ending})
        return Question(self.params.model, tuple(messages), self.params.sampling_params.sent())

    @abstractmethod
    def form(self) -> str:
        """Returns the JSON object to answer with."""
