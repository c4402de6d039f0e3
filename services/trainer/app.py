"""The trainer's HTTP routes. Each passes its body to the ranks and returns their answer.

The table of operations gets no natural keys: it would still answer step 3 of a job that was
replaced meanwhile. The ranks know which steps were applied to their weights (`trainer.py`), take
one command at a time, and answer a repeated command again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from pydantic import BaseModel

from services.trainer.publishing import published_file
from services.trainer.trainer import Trainer
from shared.http.operations import DOWNLOADED, DownloadedFile
from shared.http.ownership import asking
from shared.http.service import Check, Service
from shared.settings import Settings
from shared.wire import (
    AnyWeights,
    Checkpoint,
    CheckpointList,
    CheckpointRequest,
    Fenced,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardRequest,
    ForwardResult,
    OptimStepRequest,
    OptimStepResult,
    PublishRequest,
    Released,
    ReleaseRequest,
    StepResult,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    WeightsRef,
)

Run = Callable[[str, Fenced], Awaitable[BaseModel]]
"""Runs a command (a method of `Trainer`) by name on all ranks."""

Problem = Callable[[str | None], str | None]
"""Takes the loaded job, and returns why the trainer is not ready; None if it is."""

GAUGES: tuple[tuple[str, str, Callable[[TrainerState], float]], ...] = (
    ("step", "The last applied step of the loaded job", lambda state: state.step),
    (
        "skipped_steps",
        "Steps of the loaded job that changed no weight: a loss or gradient was not finite",
        lambda s: s.skipped_steps,
    ),
    (
        "restarts",
        "Restarts of the ranks after a failure",
        lambda state: state.restarts,
    ),
)


async def _always_ready() -> str | None:
    return None  # HTTP starts once the ranks have met, and ends with any of them


def create_service(
    settings: Settings,
    trainer: Trainer,
    run: Run,
    versions: dict[str, Any],
    problem: Problem = lambda _job: None,
) -> Service:
    """Returns the service. `run` reaches the ranks; `trainer` is rank 0's."""

    async def of_use() -> str | None:
        return problem(trainer.state().job_id)

    readiness: dict[str, Check] = {"ranks": _always_ready, "job": of_use}
    service = Service("trainer", settings, readiness=readiness, version_info=lambda: versions)
    for name, description, read in GAUGES:
        service.gauge(name, description).set_function(lambda read=read: read(trainer.state()))

    async def run_for_owner(name: str, body: Fenced) -> BaseModel:
        service.ownership.check()
        return await run(name, body)

    _add_job(service, trainer, run)
    _add_training(service, run_for_owner)
    _add_checkpoints(service, trainer, run_for_owner)
    _serve_published_files(service, settings)
    return service


def _add_job(service: Service, trainer: Trainer, run: Run) -> None:
    ownership = service.ownership

    async def load_job(request: TrainerJob) -> TrainerState:
        """Loads the job, from its newest checkpoint if it has one; another job is freed. The same
        job again changes nothing."""
        ownership.take(request)
        who = asking.get()
        own = request.model_copy(update={"orchestrator": who and who.orchestrator})
        return cast(TrainerState, await run("load_job", own))

    async def state() -> TrainerState:
        """The job that is loaded and its last applied step."""
        return trainer.state().model_copy(update={"taken": ownership.taken()})

    async def release(request: ReleaseRequest) -> Released:
        """Frees the trainer from the job, so that other orchestrators may take it."""
        ownership.leave(request)
        return Released(job_id=request.job_id)

    service.operation("PUT", "/job", load_job)
    service.operation("POST", "/release", release)
    service.query("/state", state)


def _add_training(service: Service, run: Run) -> None:
    step_seconds = service.gauge("step_seconds", "Duration of the last step")

    async def train_step(request: TrainStepRequest) -> StepResult:
        """Applies one training step. A repetition with the same body gives the same answer and
        changes no weight."""
        result = cast(StepResult, await run("train_step", request))
        step_seconds.set(result.train_s)
        return result

    async def forward(request: ForwardRequest) -> ForwardResult:
        """Returns the log-probs that the weights of the last applied step give examples."""
        return cast(ForwardResult, await run("forward", request))

    async def forward_backward(request: ForwardBackwardRequest) -> ForwardBackwardResult:
        """Adds the gradient of examples to the next optimizer step's. A repetition with the same
        body gives the same answer and adds nothing."""
        return cast(ForwardBackwardResult, await run("forward_backward", request))

    async def optim_step(request: OptimStepRequest) -> OptimStepResult:
        """Changes the weights by the gradient since the last optimizer step. A repetition with the
        same body gives the same answer and changes no weight."""
        return cast(OptimStepResult, await run("optim_step", request))

    async def publish_weights(request: PublishRequest) -> WeightsRef:
        """Writes the weights of the last applied step where samplers can load them."""
        weights = cast(AnyWeights, await run("publish_weights", request))
        return WeightsRef(weights)

    service.operation("POST", "/train_step", train_step)
    service.operation("POST", "/forward", forward)
    service.operation("POST", "/forward_backward", forward_backward)
    service.operation("POST", "/optim_step", optim_step)
    service.operation("POST", "/publish_weights", publish_weights)


def _add_checkpoints(service: Service, trainer: Trainer, run: Run) -> None:
    async def write_checkpoint(request: CheckpointRequest) -> Checkpoint:
        """Writes a Hugging Face checkpoint of the last applied step, from which training can
        resume. Old checkpoints are removed."""
        return cast(Checkpoint, await run("write_checkpoint", request))

    async def list_checkpoints() -> CheckpointList:
        """The loaded job's complete checkpoints."""
        return trainer.list_checkpoints()

    service.operation("POST", "/checkpoints", write_checkpoint)
    service.query("/checkpoints", list_checkpoints)


def _serve_published_files(service: Service, settings: Settings) -> None:
    async def published(job_id: str, version: str, name: str) -> DownloadedFile:
        """A file of a published version, for `weight_sync = "http"`. Takes `Range`."""
        return DownloadedFile(published_file(settings, job_id, version, name))

    service.app.add_api_route(
        "/weights/{job_id}/{version}/{name}",
        published,
        methods=["GET"],
        response_class=DownloadedFile,
        responses=DOWNLOADED,
        description=published.__doc__ or "",
    )
