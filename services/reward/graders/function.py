"""The job's own reward: a function as TRL has it, or a class (`shared/rewards.py`). See
docs/rewards.md.

A function gets `prompts`, `completions`, and each column of the dataset as a list with one entry
per completion (None where a row lacks it). A text prompt gives text; a prompt of chat messages
gives messages, and its completion is `[{"role": "assistant", ...}]`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from services.reward.grading.registry import (
    Grader,
    GraderTools,
    Params,
    grader,
    no_column,
    reference_text,
)
from services.reward.job_code.workers import LOAD_DEADLINE_S, Own
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem

GIVEN = ("prompts", "completions")
GIVEN_ITEM = ("prompt", "completion")
NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes and Hone does not: the reward service has neither tokens nor the trainer."""

MAX_LATE_CALLS = 10


class FunctionParams(Params):
    """How long the job's own code may take."""

    timeout_s: float = Field(default=30.0, gt=0, le=600)
    """How many seconds one call may take: for all completions of a request, or for one where the
    class has `score`."""


@grader("function")
class Function(Grader[FunctionParams]):
    """Your own Python function or class (`file` and `function`), called with prompts, completions
    and dataset columns.

    It returns one number per completion, None where it does not apply, or (number, why).
    """

    remembers = True
    max_concurrency = 1

    def __init__(self, spec: RewardSpec, params: FunctionParams, tools: GraderTools) -> None:
        super().__init__(spec, params, tools)
        self._own = Own(spec, tools.job_id or f"request {secrets.token_hex(8)}")
        self.deadline_s = LOAD_DEADLINE_S + MAX_LATE_CALLS * params.timeout_s

    def reference(self, row: Mapping[str, Any]) -> str | None:
        return reference_text(row)

    async def check(self, columns: Sequence[str]) -> None:
        if not self.tools.settings.allow_job_code:
            raise BadRequest(
                f"reward {self.spec.label!r} is the job's own code, which this service does not "
                "run (HONE_ALLOW_JOB_CODE=false)"
            )
        if self.spec.source is None:
            raise BadRequest(
                f"reward {self.spec.label!r}: the text of {self.spec.file!r} must be sent along as "
                "'source'"
            )
        signature = await self.tools.functions.signature(self._own)
        given = GIVEN if signature.calls == "batch" else GIVEN_ITEM
        for name, needed in signature.parameters.items():
            if needed and name not in (*given, *columns):
                reason = (
                    f"TRL gives {name!r}, Hone does not"
                    if name in NOT_GIVEN
                    else no_column(name, columns, tuple(given))
                )
                raise BadRequest(f"reward function {self.spec.function!r} takes {name!r}: {reason}")

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return await self.tools.functions.call(
            self._own, _arguments(items), len(items), self.params.timeout_s
        )

    async def close(self) -> None:
        if self.tools.job_id is None:
            await self.tools.functions.release(self._own)


def _arguments(items: Sequence[ScoreItem]) -> dict[str, Any]:
    columns = {column for item in items for column in item.row}
    arguments: dict[str, Any] = {
        column: [item.row.get(column) for item in items] for column in sorted(columns)
    }
    arguments["prompts"] = [
        item.prompt if isinstance(item.prompt, str) else list(item.prompt) for item in items
    ]
    arguments["completions"] = [
        item.completion
        if isinstance(item.prompt, str)
        else [{"role": "assistant", "content": item.completion}]
        for item in items
    ]
    return arguments
