"""Scores of the package reasoning-gym for answers to problems that it generated.

Its tasks parse the model's text, so they do it in a worker of their own, without network, as a
job's own function does (`job_code/inside_reasoning_gym.py`).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from services.reward.grading.failures import wrong_row
from services.reward.grading.registry import Column, Grader, GraderTools, Params, grader
from services.reward.job_code import inside_reasoning_gym
from services.reward.job_code.workers import LOAD_DEADLINE_S, MAX_LATE_CALLS, JobFile
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem

EXAMPLES = ("example_answer", "possible_answer", "example_correct_answer")
"""Where tasks that have no single answer keep one."""


def reference_of(entry: Mapping[str, Any]) -> str | None:
    """Returns a completion with the right answer; None if the problem has none."""
    known = [entry["answer"], *(entry["metadata"].get(name) for name in EXAMPLES)]
    answer = next((one for one in known if one is not None), None)
    if answer is None:
        return None
    return f"<answer>{answer if isinstance(answer, str) else json.dumps(answer)}</answer>"


class ReasoningGymParams(Params):
    """Where the problem is, and how long its scoring may take."""

    entry: Column = "entry"
    """The column of the problem as `data.train = "reasoning_gym:TASK"` writes it."""

    timeout_s: float = Field(default=30.0, gt=0, le=600)
    """How many seconds scoring may take: all completions of a request together, or each alone if
    they take longer."""


@grader("reasoning_gym")
class ReasoningGym(Grader[ReasoningGymParams]):
    """What the problem's task in the package reasoning-gym gives the answer, 0 to 1. The answer is
    the text of the last `<answer>`, or the whole completion if it has none."""

    remembers = True
    has_full_mark = True
    max_concurrency = 1

    def __init__(self, spec: RewardSpec, params: ReasoningGymParams, tools: GraderTools) -> None:
        super().__init__(spec, params, tools)
        self._file = JobFile(
            owner=tools.job_id or f"request {secrets.token_hex(8)}",
            file="reasoning_gym.py",
            source=Path(inside_reasoning_gym.__file__).read_text(),
            named="grader 'reasoning_gym'",
            serve="services.reward.job_code.inside_score",
            options={"function": "score"},
        )
        self.deadline_s = LOAD_DEADLINE_S + MAX_LATE_CALLS * params.timeout_s

    async def check(self, columns: Sequence[str]) -> None:
        await super().check(columns)
        if importlib.util.find_spec("reasoning_gym") is None:
            raise BadRequest(
                f"reward {self.spec.label!r} needs the package reasoning-gym, which is not "
                "installed where the reward service runs: pip install 'hone-rl[reasoning-gym]'"
            )

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._entry(row)

    def reference(self, row: Mapping[str, Any]) -> str | None:
        return reference_of(self._entry(row))

    def _entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            entry = ast.literal_eval(row[self.params.entry])
            if {"task", "config", "question", "answer", "metadata"} <= {*entry}:
                return entry
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass  # raised below
        shown = f"{row[self.params.entry]!r:.80}"
        raise wrong_row(
            f"column {self.params.entry!r} is {shown}; expected a problem as data.train = "
            '"reasoning_gym:TASK" writes it'
        )

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        arguments = {
            "completions": [item.completion for item in await self.subjects(items)],
            "entry": [item.row[self.params.entry] for item in items],
        }
        return await self.tools.functions.call(
            self._file, arguments, len(items), self.params.timeout_s
        )

    async def close(self) -> None:
        if self.tools.job_id is None:
            await self.tools.functions.release(self._file)
