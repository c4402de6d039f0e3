"""OpenAI's `python` grader: the job's source, with a function `grade(sample, item)`, run in the
sandbox for each completion.

`sample` is `{"output_text": completion}` and `item` the row. It is the job's code, and may read the
answer: unlike the model's, it runs beside it. Isolated all the same, in a fresh process each time.
For many completions a reward function of your own (`function`) is faster: it stays loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from services.reward.grading.programs import KEEP_CHARS, fault
from services.reward.grading.registry import Grader, GradingFailed, Params, grader
from shared.errors import BadRequest
from shared.job import MAX_SOURCE_BYTES
from shared.wire import ExecuteRequest, Part, ScoreItem


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
class Python(Grader[PythonParams]):
    """What the job's own `grade(sample, item)` returns for the completion. As OpenAI's grader of
    that name."""

    items_per_call = 1
    max_concurrency = 64
    deadline_s = 900.0

    async def check(self, columns: Sequence[str]) -> None:
        if not self.tools.settings.allow_job_code:
            raise BadRequest(
                f"reward {self.spec.label!r} is the job's own code, which this service does not "
                "run (HONE_ALLOW_JOB_CODE=false)"
            )
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

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [await self._grade(item) for item in items]

    async def _grade(self, item: ScoreItem) -> Part:
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
