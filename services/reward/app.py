"""The reward service: grading, and all untrusted code.

    POST /score               every item graded by every reward
    POST /execute             one program in the sandbox
    GET  /graders             what can be named in a job, with the schema of its params
    POST /graders/validate    would these rewards work on rows with these columns,
                              and on these prompts?
    POST /graders/try         what an empty completion and the row's reference answer would get
    POST /graders/run         one completion by one grader, in OpenAI's shape
    POST /episodes/open       an environment of the job's own, made and reset for a row
    POST /episodes/step       its tools, called by the model
    POST /episodes/close      its own reward
    POST /episodes/validate   would this environment work on this row?

State: warm sandbox slots, the workers of jobs' own functions and of graders. All of it can be lost:
any replica can answer any request. Only open episodes are in the replica that opened them; lost,
they are played again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from prometheus_client import Counter

from services.reward import graders
from services.reward.grading import registry
from services.reward.grading.limited.pool import LimitedPool
from services.reward.grading.registry import GraderTools
from services.reward.grading.scoring import QueueLimit, Scorer, run_answer, run_request
from services.reward.job_code.episodes import Episodes
from services.reward.job_code.functions import FunctionWorkers
from services.reward.job_code.workers import JobWorkers
from services.reward.sandbox import host
from services.reward.sandbox.base import Sandbox
from services.reward.sandbox.local import LocalSandbox
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    ExecuteRequest,
    Execution,
    GraderList,
    GraderRun,
    GraderRunRequest,
    ScoreRequest,
    ScoreResult,
    TriedRewards,
    TryRequest,
    Validated,
    ValidateRequest,
)

MAX_QUEUED_PROGRAMS = 4096
"""Programs of `/execute` that may wait or run. Beyond it the answer is 429."""


def create_service(settings: Settings, sandbox: Sandbox | None = None) -> Service:
    """Returns the service, not yet started. `sandbox` takes the place of the sandbox that the
    settings name."""
    graders.load()
    sandbox = sandbox or sandbox_of(settings)
    tools = GraderTools(settings, sandbox, FunctionWorkers(sandbox), LimitedPool())
    scorer = Scorer(tools)
    episodes = Episodes(JobWorkers(sandbox), allowed=settings.allow_job_code)

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        await sandbox.start()
        try:
            yield
        finally:
            await scorer.close()
            await episodes.close()
            await tools.functions.close()
            await tools.limited.close()
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
    _add_routes(service, tools, scorer)
    _add_episodes(service, episodes)
    return service


def sandbox_of(settings: Settings) -> Sandbox:
    """Returns the sandbox that the settings name, not yet started. "auto" is "local", which refuses
    to run programs on a host that cannot isolate them: it never chooses a weaker sandbox.
    Raises BadRequest for packages that are not installed."""
    if settings.sandbox == "modal":
        # Imports the Modal client, which only this sandbox needs.
        from services.reward.sandbox.on_modal import ModalSandbox

        return ModalSandbox(num_slots=settings.sandbox_slots, packages=settings.sandbox_packages)
    return LocalSandbox(
        isolated=settings.sandbox != "unsafe",
        num_slots=settings.sandbox_slots,
        packages=host.find(settings.sandbox_packages),
    )


def _add_routes(service: Service, tools: GraderTools, scorer: Scorer) -> None:
    executions = service.gauge("executions", "Programs run by /execute since the start")
    completions = service.gauge("completions", "Completions graded since the start")
    missing = service.gauge(
        "missing_rewards", "Completions whose reward is missing since the start"
    )
    parts = Counter(
        "hone_reward_parts",
        "What graders said of completions",
        ["verdict", "cached"],
        registry=service.registry,
    )
    programs = QueueLimit("programs", MAX_QUEUED_PROGRAMS)

    async def score(request: ScoreRequest) -> ScoreResult:
        """Grades every item by every reward."""
        result = await scorer.score(request)
        completions.inc(len(result.scores))
        missing.inc(sum(one.value is None for one in result.scores))
        for part in (part for one in result.scores for part in one.parts.values()):
            parts.labels(part.verdict, str(part.cached).lower()).inc()
        return result

    async def execute(request: ExecuteRequest) -> Execution:
        """Runs one program in the sandbox."""
        executions.inc()
        with programs.of(1):
            return await tools.sandbox.execute(request)

    async def validate(request: ValidateRequest) -> Validated:
        """Says whether these rewards would work on rows with these columns, and on the rows of the
        prompts given; 422 with sentences if not."""
        await scorer.check(request.rewards, request.columns, request.prompts)
        return Validated(rewards=tuple(spec.label for spec in request.rewards))

    async def try_rewards(request: TryRequest) -> TriedRewards:
        """Grades an empty completion of each prompt, and the row's own reference answer."""
        return TriedRewards(rewards=await scorer.tried(request.rewards, request.prompts))

    async def run(request: GraderRunRequest) -> GraderRun:
        """Grades one completion by one grader, in the shape of OpenAI's grader runs."""
        result = await scorer.score(run_request(request))
        return run_answer(request, result.scores[0])

    async def list_graders() -> GraderList:
        """Lists the graders that a job can name."""
        return GraderList(graders=registry.infos())

    service.operation("POST", "/score", score, cancellable=True)
    service.operation("POST", "/execute", execute, cancellable=True)
    service.operation("POST", "/graders/validate", validate)
    service.operation("POST", "/graders/try", try_rewards, cancellable=True)
    service.operation("POST", "/graders/run", run, cancellable=True)
    service.query("/graders", list_graders)


def _add_episodes(service: Service, episodes: Episodes) -> None:
    service.gauge("open_episodes", "Episodes of jobs' own environments that are open").set_function(
        episodes.num_open
    )

    service.operation("POST", "/episodes/open", episodes.open_episode)
    service.operation("POST", "/episodes/step", episodes.step_episode)
    service.operation("POST", "/episodes/close", episodes.close_episode)
    service.operation("POST", "/episodes/validate", episodes.validate_environment)
