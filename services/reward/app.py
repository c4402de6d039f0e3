"""The reward service: grading, and all untrusted code.

    POST /score               every item graded by every reward
    POST /execute             one program in the sandbox
    GET  /graders             what can be named in a job, with the schema of its params
    POST /graders/validate    would these rewards work on rows with these columns?

State: warm sandbox slots and the workers of jobs' own functions. Nothing else is kept: any replica can answer any request.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from services.reward import graders, registry, scoring
from services.reward.functions import FunctionWorkers
from services.reward.registry import Tools
from services.reward.sandbox.base import Sandbox
from services.reward.sandbox.local import LocalSandbox
from shared.config import Settings
from shared.service import Service
from shared.wire import ExecuteRequest, Execution, GraderList, ScoreRequest, ScoreResult, Validated, ValidateRequest


def build(settings: Settings, sandbox: Sandbox | None = None) -> Service:
    """Returns the service, not yet started. `sandbox` stands in for the one that the settings name."""
    graders.load()
    sandbox = sandbox or LocalSandbox(isolated=settings.sandbox != "unsafe", num_slots=settings.sandbox_slots)
    tools = Tools(settings, sandbox, FunctionWorkers(sandbox))

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        await sandbox.start()
        try:
            yield
        finally:
            await tools.functions.close()
            await sandbox.close()

    async def sandbox_ready() -> str | None:
        return sandbox.problem()

    service = Service(
        "reward",
        settings,
        readiness={"sandbox": sandbox_ready},
        version_info=lambda: {"sandbox": sandbox.report()},
        lifespan=lifespan,
    )
    _add_routes(service, tools)
    return service


def _add_routes(service: Service, tools: Tools) -> None:
    executions = service.gauge("executions", "Programs run by /execute since the start")
    completions = service.gauge("completions", "Completions graded since the start")
    missing = service.gauge("missing_rewards", "Completions whose reward is missing since the start")

    async def score(request: ScoreRequest) -> ScoreResult:
        """Grades every item by every reward."""
        result = await scoring.score(request, tools)
        completions.inc(len(result.scores))
        missing.inc(sum(score.value is None for score in result.scores))
        return result

    async def execute(request: ExecuteRequest) -> Execution:
        """Runs one program in the sandbox."""
        executions.inc()
        return await tools.sandbox.execute(request)

    async def validate(request: ValidateRequest) -> Validated:
        """Says whether these rewards would work on rows with these columns; 422 with sentences if not."""
        checked = await scoring.checked(request.rewards, request.columns, tools)
        return Validated(rewards=tuple(grader.spec.label for grader in checked))

    async def list_graders() -> GraderList:
        """Lists the graders that a job can name."""
        return GraderList(graders=registry.infos())

    service.operation("POST", "/score", score)
    service.operation("POST", "/execute", execute)
    service.operation("POST", "/graders/validate", validate)
    service.query("/graders", list_graders)
