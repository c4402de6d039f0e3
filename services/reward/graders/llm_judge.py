"""A language model grades completions by a rubric. Endpoint and key are the service's settings
(`judge/client.py`).

The completion is marked as data, and a completion may talk to the judge all the same: prefer
rewards that can be checked, and look at what it rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from services.reward.grading import templates
from services.reward.grading.judge import JudgeGrader, JudgeParams, JudgeSampling, Said, replies
from services.reward.grading.registry import grader
from shared.wire import Part, ScoreItem

SYSTEM = "You grade a text by a rubric."


class LlmJudgeParams(JudgeParams):
    """A rubric for a language model, which answers with a number from `low` to `high`. The reward
    is how far between the two it is, 0 to 1."""

    model: str
    """Which model judges, as the endpoint at HONE_JUDGE_URL calls it."""

    rubric: str = Field(min_length=1)
    """What the judge is asked, a template: `{{ item.question }}` is a column, `{{
    sample.output_text }}` the completion. How to answer is said at its end by itself."""

    low: float = 0.0
    """The lowest number that the judge may give; it earns 0."""

    high: float = 10.0
    """The highest number that the judge may give; it earns 1."""

    system: str | None = None
    """The first message to the judge. None: that it grades a text by a rubric."""

    sampling: JudgeSampling = JudgeSampling(temperature=0.0)
    """Where nothing of it is set, the temperature is 0."""

    @model_validator(mode="after")
    def _range(self) -> LlmJudgeParams:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}; expected low < high")
        return self


@grader("llm_judge")
class LlmJudge(JudgeGrader[LlmJudgeParams]):
    """What a language model thinks of the completion by your rubric, 0 to 1."""

    @property
    def model(self) -> str:
        return self.params.model

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

    def form(self) -> dict[str, Said]:
        low, high = self.params.low, self.params.high
        return {
            "reason": Said('"<one sentence>"', {"type": "string"}),
            "score": Said(f"<number from {low:g} to {high:g}>", {"type": "number"}),
        }

    def part(self, found: Mapping[str, Any]) -> Part:
        low, high = self.params.low, self.params.high
        score = replies.number(found, "score", low, high)
        return Part(
            value=(score - low) / (high - low),
            detail=f"{score:g} of {high:g}: {found.get('reason', '')!s:.300}",
        )
