"""The trainer's HTTP routes. Each hands its body to the ranks and answers what they answer.

No natural keys are given to the table of operations: it would still answer for step 3 of a job that was replaced since. The
ranks know what was applied to the weights they hold (`trainer.py`), take one command at a time, and answer a repeated one again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from pydantic import BaseModel

from shared.config import Settings
from shared.service import Check, Service
from shared.wire import (
    Checkpoint,
    CheckpointList,
    CheckpointRequest,
    PublishRequest,
    StepResult,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    WeightsRef,
    Wire,
)

Run = Callable[[str, Wire], Awaitable[BaseModel]]
"""Runs the command of that name (a method of `Trainer`) on all ranks."""


class Readable(Protocol):
    """What can be read of the trainer while a command runs."""

    def state(self) -> TrainerState: ...

    def list_checkpoints(self) -> CheckpointList: ...


async def _up() -> str | None:
    return None  # HTTP starts once the ranks have met, and ends with any of them


def make_service(settings: Settings, trainer: Readable, run: Run, versions: dict[str, Any]) -> Service:
    """Returns the service. `run` reaches the ranks; `trainer` is rank 0's."""
    readiness: dict[str, Check] = {"ranks": _up}
    service = Service("trainer", settings, readiness=readiness, version_info=lambda: versions)
    step = service.gauge("step", "The last applied step of the loaded job")
    step_seconds = service.gauge("step_seconds", "How long the last step took")

    async def load_job(request: TrainerJob) -> TrainerState:
        """Loads the job's model at its start; another job's is freed. The same job again changes nothing."""
        state = cast(TrainerState, await run("load_job", request))
        step.set(state.step)
        return state

    async def train_step(request: TrainStepRequest) -> StepResult:
        """Applies one optimizer step. The same step again, with the same body, gives the same answer and moves nothing."""
        result = cast(StepResult, await run("train_step", request))
        step.set(result.step)
        step_seconds.set(result.train_s)
        return result

    async def publish_weights(request: PublishRequest) -> WeightsRef:
        """Writes the weights of the last applied step where samplers can load them."""
        return cast(WeightsRef, await run("publish_weights", request))

    async def write_checkpoint(request: CheckpointRequest) -> Checkpoint:
        """Writes a Hugging Face checkpoint of the last applied step."""
        return cast(Checkpoint, await run("write_checkpoint", request))

    async def state() -> TrainerState:
        """The job that is loaded and its last applied step."""
        return trainer.state()

    async def list_checkpoints() -> CheckpointList:
        """The loaded job's complete checkpoints."""
        return trainer.list_checkpoints()

    service.operation("PUT", "/job", load_job)
    service.operation("POST", "/train_step", train_step)
    service.operation("POST", "/publish_weights", publish_weights)
    service.operation("POST", "/checkpoints", write_checkpoint)
    service.query("/state", state)
    service.query("/checkpoints", list_checkpoints)
    return service
