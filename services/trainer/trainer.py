"""What the trainer service remembers: which job, which step is next, what the last one answered. Every rank runs one of these.

All ranks get the same commands in the same order and come to the same decisions, so only the engine's own collectives connect
them. Idempotency lives here, beside the weights it protects, and not in a table of requests: when a job is replaced or its
weights are lost, what was remembered about them goes too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.trainer import checkpoints
from services.trainer.weights import Publisher
from shared import codec
from shared.config import Settings
from shared.errors import Conflict, HoneError
from shared.job import Job
from shared.logs import get_logger
from shared.wire import (
    Checkpoint,
    CheckpointList,
    CheckpointRequest,
    Example,
    PublishRequest,
    StepResult,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    WeightsRef,
    Wire,
)


@dataclass(frozen=True)
class Update:
    """What the optimizer steps of one training step did. `grad_norm` is before clipping; `num_updates` counts them.

    `skipped`: some loss or gradient was not finite, and no weight changed.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    num_updates: int = 1
    skipped: bool = False


class Engine(Protocol):
    """The trained policy: `engine.py`, on DeepSpeed. Every method is called on all ranks, with the same arguments.

    The `save_` methods get a folder that all ranks see and that is there. `save_weights` and `save_checkpoint` gather what is
    spread over the ranks and write from rank 0; `save_state` writes a share of each rank, and `load_state`, on an engine that was
    just made, reads it (`state.py`).
    """

    dtype: str
    device: str
    num_parameters: int
    weights_bytes: int

    def update(self, examples: tuple[Example, ...], learning_rate: float) -> Update: ...

    def save_weights(self, folder: Path) -> None: ...

    def save_checkpoint(self, folder: Path) -> None: ...

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...

    def close(self) -> None: ...


@dataclass
class Loaded:
    """The job that is loaded, and how far it is."""

    request: TrainerJob
    engine: Engine
    publisher: Publisher | None
    step: int = 0
    last: tuple[str, StepResult] | None = None


class Trainer:
    """One rank's part of the service. `start_engine(job)` loads a model; it checks that it can before memory is freed for it."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        num_ranks: int,
        *,
        check_job: Callable[[Job], None],
        start_engine: Callable[[Job], Engine],
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._num_ranks = num_ranks
        self._check_job = check_job
        self._start_engine = start_engine
        self._loaded: Loaded | None = None

    def load_job(self, request: TrainerJob) -> TrainerState:
        """Loads the job's model at its start, in place of the job before. The same job again changes nothing."""
        loaded = self._loaded
        if loaded and loaded.request.job_id == request.job_id:
            if loaded.request != request:
                raise Conflict(f"job {request.job_id!r} is loaded with another body; the same job id must come with the same job")
            return self.state()
        self._check_job(request.job)
        self.unload()
        started = time.monotonic()
        engine = self._start_engine(request.job)
        publisher = Publisher(self._settings, request.job_id) if self._rank == 0 else None
        self._loaded = Loaded(request, engine, publisher)
        get_logger().info("job loaded", job=request.job_id, model=request.job.model, seconds=round(time.monotonic() - started, 2))
        return self.state()

    def train_step(self, request: TrainStepRequest) -> StepResult:
        """Applies the next step. The last one again, with the same body, gives its result again and moves nothing."""
        loaded = self._job(request.job_id)
        fingerprint = _fingerprint(request)
        if loaded.last and request.step == loaded.step:
            if loaded.last[0] != fingerprint:
                raise Conflict(f"step {request.step} was already applied, with another body; expected the same body again")
            return loaded.last[1]
        if request.step != loaded.step + 1:
            raise Conflict(f"got step {request.step}, expected {loaded.step + 1}")
        result = self._apply(loaded, request)
        loaded.step, loaded.last = request.step, (fingerprint, result)
        get_logger().info("step applied", job=request.job_id, **result.model_dump(exclude={"metrics"}))
        return result

    def publish_weights(self, request: PublishRequest) -> WeightsRef | None:
        """Returns the reference of the published weights on rank 0, None elsewhere."""
        loaded = self._job(request.job_id)
        if request.version != loaded.step:
            raise Conflict(f"got version {request.version}, expected {loaded.step}, the last applied step")
        if loaded.publisher is None:
            return None
        engine = loaded.engine
        return loaded.publisher.publish(request.version, request.method, engine.weights_bytes, engine.save_weights)

    def write_checkpoint(self, request: CheckpointRequest) -> Checkpoint | None:
        """Returns the checkpoint on rank 0, None elsewhere. One that is there already is not written again."""
        loaded = self._job(request.job_id)
        folder = checkpoints.checkpoints_dir(self._settings.runs_dir, request.job_id)
        known = next((checkpoint for checkpoint in checkpoints.listed(folder) if checkpoint.step == request.step), None)
        if known is None and request.step != loaded.step:
            raise Conflict(f"got step {request.step}, expected {loaded.step}, the last applied step")
        if known or self._rank != 0:
            return known
        engine = loaded.engine
        return checkpoints.write(folder, request.step, engine.weights_bytes, engine.save_checkpoint)

    def state(self) -> TrainerState:
        """Returns where this trainer is. Safe to call from another thread."""
        loaded = self._loaded
        return TrainerState(
            job_id=loaded.request.job_id if loaded else None,
            step=loaded.step if loaded else 0,
            num_ranks=self._num_ranks,
            dtype=loaded.engine.dtype if loaded else "",
            device=loaded.engine.device if loaded else "",
            num_parameters=loaded.engine.num_parameters if loaded else 0,
        )

    def list_checkpoints(self) -> CheckpointList:
        """Returns the loaded job's checkpoints; none without a job. Safe to call from another thread."""
        loaded = self._loaded
        if loaded is None:
            return CheckpointList(checkpoints=())
        folder = checkpoints.checkpoints_dir(self._settings.runs_dir, loaded.request.job_id)
        return CheckpointList(checkpoints=checkpoints.listed(folder))

    def unload(self) -> None:
        """Frees the job's memory, its shared memory included."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            if loaded.publisher is not None:
                loaded.publisher.close()
            loaded.engine.close()
            get_logger().info("job unloaded", job=loaded.request.job_id, step=loaded.step)

    def free_shared_memory(self) -> None:
        """Frees the job's shared memory, and only that. Safe to call from another thread, while the process ends."""
        if self._loaded is not None and self._loaded.publisher is not None:
            self._loaded.publisher.close()

    def _job(self, job_id: str) -> Loaded:
        if self._loaded is None:
            raise Conflict(f"got job {job_id!r}, but no job is loaded; PUT /job first")
        if self._loaded.request.job_id != job_id:
            raise Conflict(f"got job {job_id!r}, expected {self._loaded.request.job_id!r}, the one loaded")
        return self._loaded

    def _apply(self, loaded: Loaded, request: TrainStepRequest) -> StepResult:
        started = time.monotonic()
        rate = learning_rate(loaded.request.job, request.step)
        update = Update(0.0, 0.0, {}, num_updates=0)
        if request.examples:
            try:
                update = loaded.engine.update(request.examples, rate)
            except HoneError:
                raise
            except BaseException:
                # An update that died on the way leaves half-filled gradient buckets: nothing can be trained on top of them.
                self.unload()
                raise
        return StepResult(
            step=request.step,
            loss=update.loss,
            grad_norm=update.grad_norm,
            learning_rate=rate,
            num_examples=len(request.examples),
            num_tokens=sum(len(example.token_ids) for example in request.examples),
            train_s=time.monotonic() - started,
            metrics=update.metrics,
            num_updates=update.num_updates,
            skipped=update.skipped,
        )


def learning_rate(job: Job, step: int) -> float:
    """Returns the rate of `step`, from 1: linear up to `learning_rate` over `warmup_steps`, then constant."""
    warmup = job.training.warmup_steps
    return job.training.learning_rate * (min(1.0, step / warmup) if warmup else 1.0)


def _fingerprint(body: Wire) -> str:
    return hashlib.sha256(codec.encode(body, codec.MSGPACK)).hexdigest()
