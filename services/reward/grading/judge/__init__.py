"""What the graders that ask a language model share: `llm_judge`, and OpenAI's `score_model` and
`label_model`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field

from services.reward.grading import templates
from services.reward.grading.judge.client import Judge, JudgeLimits, Question
from services.reward.grading.registry import Grader, GraderTools, Params
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem


class JudgeSampling(Params):
    """How the judge samples. What is None is left to the endpoint. `max_completions_tokens` is what
    OpenAI's graders call the second of the three limits; which of them an endpoint knows
    differs."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_completions_tokens: int | None = Field(default=None, ge=1)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    response_format: dict[str, Any] | None = None

    def sent(self) -> dict[str, Any]:
        """Returns what goes into a request."""
        given = self.model_dump(exclude_none=True)
        if "max_completions_tokens" in given:
            given["max_completion_tokens"] = given.pop("max_completions_tokens")
        return given


class JudgeParams(Params):
    """`concurrency`: questions at once. `retries` of one question, which with them may take
    `deadline_s` seconds.

    `budget_calls`, `budget_tokens`: what this reward may cost in one job; beyond that its verdicts
    are missing.
    """

    concurrency: int = Field(default=8, ge=1, le=256)
    retries: int = Field(default=4, ge=0, le=20)
    deadline_s: float = Field(default=120.0, gt=0, le=3600)
    budget_calls: int | None = Field(default=None, ge=0)
    budget_tokens: int | None = Field(default=None, ge=0)


J = TypeVar("J", bound=JudgeParams)


class JudgeGrader(Grader[J]):
    """A grader whose verdict is a language model's. It says what to ask (`question`) and reads the
    reply (`part`)."""

    items_per_call = 1
    asks_models = True

    def __init__(self, spec: RewardSpec, params: J, tools: GraderTools) -> None:
        super().__init__(spec, params, tools)
        self.max_concurrency = params.concurrency
        self.deadline_s = params.deadline_s + 60.0
        limits = JudgeLimits(
            params.retries, params.deadline_s, params.budget_calls, params.budget_tokens
        )
        self._judge = Judge(tools, spec.label, limits)

    @abstractmethod
    def texts(self) -> list[str]:
        """Returns the templates that make up the question."""

    @abstractmethod
    def question(self, item: ScoreItem) -> Question: ...

    @abstractmethod
    def part(self, reply: str) -> Part:
        """Returns the verdict in a reply. Raises GradingFailed for a reply that has none."""

    async def check(self, columns: Sequence[str]) -> None:
        settings = self.tools.settings
        if settings.judge_url is None and settings.judge_api_key is None:
            raise BadRequest(
                f"reward {self.spec.label!r} asks a judge, and this service has none: set "
                "HONE_JUDGE_URL (an OpenAI-compatible "
                "endpoint; without it OpenAI's) and HONE_JUDGE_API_KEY"
            )
        for text in self.texts():
            templates.check(text, columns, self.spec.label)
        if not any("sample.output_text" in text for text in self.texts()):
            raise BadRequest(
                f"reward {self.spec.label!r}: the judge never sees the completion; use {{{{ "
                "sample.output_text }}"
            )

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [await self._grade(item) for item in items]

    async def close(self) -> None:
        await self._judge.close()

    async def _grade(self, item: ScoreItem) -> Part:
        question = self.question(item)
        part, tokens = await self._judge.ask(question, self.part)
        return part.model_copy(
            update={"cached": tokens is None, "tokens": {question.model: tokens or 0}}
        )
