"""The job's own reward function, as TRL has it: `def reward(completions, **kwargs) -> list[float]`, plain or async.

Arguments: `prompts`, `completions`, and each column of the dataset as a list with one entry a completion (None where a row lacks
it). A text prompt gives text; a prompt of chat messages gives messages, and its completion is `[{"role": "assistant", ...}]`.
Left out of TRL's arguments: `completion_ids`, `trainer_state` and the logging callbacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from services.reward.registry import Grader, Params, grader, no_column
from shared.errors import BadRequest
from shared.wire import Part, ScoreItem

GIVEN = ("prompts", "completions")


class FunctionParams(Params):
    """`timeout_s`: how long one call for a whole request may take, in seconds."""

    timeout_s: float = Field(default=30.0, gt=0, le=600)


@grader("function")
class Function(Grader[FunctionParams]):
    """Your own Python function (`file` and `function`), called with lists of prompts, completions and dataset columns.

    It returns one number a completion, or None where it does not apply.
    """

    async def check(self, columns: Sequence[str]) -> None:
        if not self.tools.settings.allow_job_code:
            raise BadRequest(
                f"reward {self.spec.label!r} is the job's own code, which this service does not run (HONE_ALLOW_JOB_CODE=false)"
            )
        if self.spec.source is None:
            raise BadRequest(f"reward {self.spec.label!r}: the text of {self.spec.file!r} must be sent along as 'source'")
        required, _ = await self.tools.functions.parameters(self.spec)
        for name, needed in required.items():
            if needed and name not in (*GIVEN, *columns):
                raise BadRequest(f"reward function {self.spec.function!r} takes {name!r}: {no_column(name, columns)}")

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        arguments = _arguments(items)
        values = await self.tools.functions.call(self.spec, arguments, len(items), self.params.timeout_s)
        return [Part(value=None, verdict="skipped") if value is None else Part(value=value) for value in values]


def _arguments(items: Sequence[ScoreItem]) -> dict[str, Any]:
    columns = {column for item in items for column in item.row}
    arguments: dict[str, Any] = {column: [item.row.get(column) for item in items] for column in sorted(columns)}
    arguments["prompts"] = [item.prompt if isinstance(item.prompt, str) else list(item.prompt) for item in items]
    arguments["completions"] = [
        item.completion if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.completion}] for item in items
    ]
    return arguments
