"""The job's own code: `function`, a function as TRL has it or a class (`shared/rewards.py`), and
OpenAI's `python`. See docs/rewards.md.

A function gets `prompts`, `completions`, and each column of the dataset as a list with one entry
per completion (None where a row lacks it). A text prompt gives text; a prompt of chat messages
gives messages, and its completion is `[{"role": "assistant", ...}]`. It stays loaded.

`python` runs the job's source in the sandbox, in a new process for each completion. The source may
read the row's answer, because it is the job's code and not the model's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from services.reward.grading.failures import GradingFailed
from services.reward.grading.programs import KEEP_CHARS, fault
from services.reward.grading.registry import (
    Grader,
    GraderTools,
    ItemGrader,
    Params,
    grader,
    no_column,
    reference_text,
)
from services.reward.job_code.functions import function_file
from services.reward.job_code.inside_score import ENDED
from services.reward.job_code.workers import LOAD_DEADLINE_S, MAX_LATE_CALLS
from shared.errors import BadRequest
from shared.job import MAX_SOURCE_BYTES, RewardSpec
from shared.wire import ExecuteRequest, Part, ScoreItem

GIVEN = ("prompts", "completions")
GIVEN_ITEM = ("prompt", "completion")
ENVIRONMENTS = "environments"
NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes and Hone does not: the reward service has neither tokens nor the trainer."""


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
    whole_text = True
    max_concurrency = 1

    def __init__(self, spec: RewardSpec, params: FunctionParams, tools: GraderTools) -> None:
        super().__init__(spec, params, tools)
        self._file = function_file(spec, tools.job_id or f"request {secrets.token_hex(8)}")
        self.deadline_s = LOAD_DEADLINE_S + MAX_LATE_CALLS * params.timeout_s

    def reference(self, row: Mapping[str, Any]) -> str | None:
        return reference_text(row)

    async def check(self, columns: Sequence[str]) -> None:
        _check_allowed(self)
        if self.spec.source is None:
            raise BadRequest(
                f"reward {self.spec.label!r}: the text of {self.spec.file!r} must be sent along as "
                "'source'"
            )
        signature = await self.tools.functions.signature(self._file)
        given = GIVEN if signature.calls == "batch" else GIVEN_ITEM
        for name, needed in signature.parameters.items():
            if needed and name not in (*given, *columns):
                reason = _why_missing(name, columns, tuple(given))
                raise BadRequest(f"reward function {self.spec.function!r} takes {name!r}: {reason}")

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return await self.tools.functions.call(
            self._file, _arguments(items), len(items), self.params.timeout_s
        )

    async def close(self) -> None:
        if self.tools.job_id is None:
            await self.tools.functions.release(self._file)


def _check_allowed(reward: Grader[Any]) -> None:
    if not reward.tools.settings.allow_job_code:
        raise BadRequest(
            f"reward {reward.spec.label!r} is the job's own code, which this service does not run "
            "(HONE_ALLOW_JOB_CODE=false)"
        )


def _arguments(items: Sequence[ScoreItem]) -> dict[str, Any]:
    columns = {column for item in items for column in item.row}
    arguments: dict[str, Any] = {
        column: [item.row.get(column) for item in items] for column in sorted(columns)
    }
    arguments["prompts"] = [
        item.prompt if isinstance(item.prompt, str) else list(item.prompt) for item in items
    ]
    arguments["completions"] = [
        list(item.messages)
        or (
            item.completion
            if isinstance(item.prompt, str)
            else [{"role": "assistant", "content": item.completion}]
        )
        for item in items
    ]
    if any("environment" in item.info for item in items):
        ended = [item.info.get("environment") for item in items]
        arguments[ENVIRONMENTS] = [None if one is None else {ENDED: one} for one in ended]
    return arguments


def _why_missing(name: str, columns: Sequence[str], given: tuple[str, ...]) -> str:
    if name == ENVIRONMENTS:
        return 'only a job with an environment of kind "class" has them'
    if name in NOT_GIVEN:
        return f"TRL gives {name!r}, Hone does not"
    return no_column(name, columns, given)


@grader("environment")
class Environment(ItemGrader[Params]):
    """The reward that the job's own environment gave a conversation: what its `get_reward` says,
    else the sum of what the answers earned; none if it says None, or nothing was earned. Missing
    if an agent failed after its conversation had no room."""

    whole_text = True

    async def grade_item(self, item: ScoreItem) -> Part:
        return environment_part(item.info)


def environment_part(info: Mapping[str, Any]) -> Part:
    """Returns the part of a conversation by its `info`."""
    if (error := info.get("reward_error")) is not None:
        return Part(value=None, verdict="error", detail=str(error))
    if (value := info.get("reward")) is None:
        return Part(value=None, verdict="skipped", detail="the environment gave no reward")
    return Part(value=float(value))


class PythonParams(Params):
    """The job's own Python, and what one run of it may use."""

    type: Literal["python"] = "python"
    """The grader's name, as OpenAI's grader objects have it."""

    name: str = "python"
    """What OpenAI's grader objects call it. What metrics call it is the reward's own `name`."""

    source: str = Field(max_length=MAX_SOURCE_BYTES)
    """Python that defines `grade(sample, item)`, which returns a number."""

    image_tag: str | None = None
    """OpenAI's graders have it; here it has no effect."""

    cpu_s: float = Field(default=10.0, gt=0, le=120)
    """How many seconds of CPU time one program may take."""

    timeout_s: float = Field(default=60.0, gt=0, le=300)
    """How many seconds one program may take on the wall clock."""

    memory_mib: int = Field(default=512, ge=16, le=8192)
    """How many MiB of memory one program may use."""


@grader("python")
class Python(ItemGrader[PythonParams]):
    """What the job's own `grade(sample, item)` returns for the completion. As OpenAI's grader of
    that name."""

    max_concurrency = 64
    deadline_s = 900.0

    async def check(self, columns: Sequence[str]) -> None:
        _check_allowed(self)
        try:
            code = compile(self.params.source, "grader.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise BadRequest(
                f"reward {self.spec.label!r}: its source is not Python: {error}"
            ) from error
        if "grade" not in code.co_names:  # what the module's own code names
            raise BadRequest(
                f"reward {self.spec.label!r}: its source does not define grade; expected "
                "`def grade(sample, item)`"
            )

    async def grade_item(self, item: ScoreItem) -> Part:
        execution = await self.tools.sandbox.execute(self._request(item))
        verdict, detail = fault(execution)
        if verdict != "ok":
            raise GradingFailed(f"{verdict}: {detail}", "python_grader_runtime_error")
        value: Any = execution.value
        if type(value) not in (int, float, bool) or not -1e300 < value < 1e300:
            raise GradingFailed(
                f"grade() returned {value!r:.80}; expected a finite number",
                "python_grader_runtime_error",
            )
        return Part(value=float(value), stdout=execution.stdout[-KEEP_CHARS:])

    def _request(self, item: ScoreItem) -> ExecuteRequest:
        return ExecuteRequest(
            code=self.params.source,
            expression="grade(_sample, _item)",
            inputs={"_sample": {"output_text": item.completion}, "_item": item.row},
            cpu_s=self.params.cpu_s,
            timeout_s=self.params.timeout_s,
            memory_mib=self.params.memory_mib,
        )
