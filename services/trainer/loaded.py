"""The loaded jobs: the engine, progress and learning rate of each, its checkpoints, and the turns
of several jobs on one engine.

If the nodes share a volume that needs commands to show new files, each node commits its own files
and refreshes the others' before it uses them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from services.trainer.disk import checkpoints
from services.trainer.disk.checkpoints import (
    FORMAT,
    DamagedCheckpoint,
    Manifest,
    ResumePoint,
    read_manifest,
)
from services.trainer.disk.folders import write_atomically
from services.trainer.engine import Engine, Ranks, SaveAll
from services.trainer.publishing import Publisher
from shared.errors import BadRequest
from shared.host.disk import run_for_volume
from shared.host.logs import get_logger
from shared.job import Job
from shared.settings import Settings
from shared.weights.folders import STATE, StoredFile
from shared.wire import (
    Canary,
    Checkpoint,
    CheckpointRequest,
    ForwardBackwardResult,
    Logprobs,
    OptimStepResult,
    StepResult,
    TrainerJob,
)


@dataclass
class LoadedJob:
    """`model` is the fingerprint of the job's model, `job` the job as the engine has it, `last` the
    fingerprint of the last step's body with its result, `canary` the canary of a step. Rank 0 has a
    publisher. `aside` is the job's own part of an engine that has another job's turn."""

    request: TrainerJob
    model: str
    job: Job
    engine: Engine
    publisher: Publisher | None
    aside: object = None
    damaged: tuple[str, ...] = ()
    resumed_step: int | None = None
    step: int = 0
    skipped_steps: int = 0
    last: tuple[str, StepResult | ForwardBackwardResult | OptimStepResult] | None = None
    canary: tuple[int, Canary | None] | None = None
    noise_at: int = 0
    """The step for which the canary's rounding noise was measured."""

    def resume(self, point: ResumePoint) -> None:
        """Resumes from the checkpoint of `point`, if there is one; otherwise begins with the
        checkpoint that the job names. Raises Conflict for a checkpoint of another model."""
        self.damaged = point.damaged
        if point.path is None or point.manifest is None:
            training = self.request.job.training
            if training.start_from is not None:
                self._begin_with(Path(training.start_from), optimizer=training.start_optimizer)
            return
        self.engine.load_state(point.path / STATE)
        manifest = point.manifest
        self.step = self.resumed_step = manifest.step
        self.skipped_steps = manifest.skipped_steps
        if manifest.last_body is not None and manifest.last_result is not None:
            self.last = manifest.last_body, manifest.last_result

    def _begin_with(self, folder: Path, *, optimizer: bool) -> None:
        """Begins with another job's checkpoint. Raises BadRequest if that job began with another
        model."""
        try:
            model = read_manifest(folder).model
        except DamagedCheckpoint as error:
            raise BadRequest(f"training.start_from {str(folder)!r}: {error}") from error
        if model != self.model:
            raise BadRequest(
                f"training.start_from {str(folder)!r} is of a job that began with another model: "
                f"it had the fingerprint {model!r}, and {self.request.job.model!r} has "
                f"{self.model!r}; submit a job with that model"
            )
        self.engine.load_state(folder / STATE, optimizer=optimizer)

    def manifest(self, num_ranks: int, files: dict[str, StoredFile]) -> Manifest:
        """Returns the manifest of a checkpoint written now, with these files."""
        last_body, last_result = self.last or (None, None)
        if isinstance(last_result, ForwardBackwardResult):
            raise ValueError("a checkpoint has no gradient; expected an optimizer step before it")
        if isinstance(
            last_result, StepResult
        ):  # the run folder has its log-probs and entropies of single tokens
            without_tokens = {"logprobs": Logprobs(), "entropies": Logprobs()}
            last_result = last_result.model_copy(update=without_tokens)
        return Manifest(
            format=FORMAT,
            job_id=self.request.job_id,
            job=self.request.job,
            step=self.step,
            model=self.model,
            num_ranks=num_ranks,
            versions={name: version(name) for name in ("torch", "deepspeed", "transformers")},
            skipped_steps=self.skipped_steps,
            last_body=last_body,
            last_result=last_result,
            files=files,
        )

    def close(self) -> None:
        """Frees the job's shared memory."""
        if self.publisher is not None:
            self.publisher.close()


@dataclass(frozen=True)
class RunsVolume:
    """The volume of the run folders, as one rank sees it, and the commands that commit and refresh
    it, if it needs any. One rank of each node runs them."""

    commit: str | None
    refresh: str | None
    is_shared: bool
    speaks: bool

    @classmethod
    def of(cls, settings: Settings, rank: int) -> RunsVolume:
        return cls(
            settings.runs_commit,
            settings.runs_refresh,
            is_shared=settings.trainer_nodes > 1,
            speaks=rank % settings.trainer_ranks == 0,
        )

    def keep(self) -> None:
        """Commits this node's files. Raises Failed if that fails."""
        if self.speaks:
            run_for_volume(self.commit, "the checkpoint cannot be committed")

    def show(self) -> None:
        """Commits this node's files, so that other nodes see these after `look`."""
        if self.is_shared:
            self.keep()

    def look(self) -> None:
        """Makes the files of the other nodes visible on this one."""
        if self.is_shared and self.speaks:
            run_for_volume(self.refresh, "the other nodes' part of a checkpoint cannot be seen")


def save_checkpoint(
    ranks: Ranks, loaded: LoadedJob, path: Path, request: CheckpointRequest, runs: RunsVolume
) -> Checkpoint | None:
    """Writes a checkpoint of the loaded job to `path`, and removes old ones. Returns it on rank 0,
    None elsewhere."""
    engine = loaded.engine

    def lead(save_all: SaveAll) -> Checkpoint:
        with write_atomically(path, checkpoint_bytes(engine), durable=True) as aside:
            runs.show()
            shares: list[dict[str, StoredFile]] = save_all(aside)
            files = {name: file for share in shares for name, file in share.items()}
            checkpoints.write_manifest(aside, loaded.manifest(ranks.num_ranks, files))
        runs.keep()
        checkpoints.remove_old(path.parent, loaded.request.job.checkpoints, request.keep)
        return checkpoints.describe_checkpoint(path, request.step)

    def save_state(aside: Path) -> None:
        (aside / STATE).mkdir(exist_ok=True)
        engine.save_state(aside / STATE)

    return ranks.write(
        lead,
        lambda _: runs.look(),
        lambda aside: checkpoints.check_seen(aside, ranks.rank),
        engine.save_checkpoint,
        save_state,
        lambda _: runs.show(),
        lambda _: runs.look(),
        lambda aside: checkpoints.measure_files(aside, slice(ranks.rank, None, ranks.num_ranks)),
    )


def checkpoint_bytes(engine: Engine) -> int:
    """Returns the approximate bytes of a checkpoint: the export, and for each trained parameter the
    float32 master and Adam's two moments."""
    return engine.weights_bytes + 12 * engine.num_trainable


# --- turns ----------------------------------------------------------------------------------------


class Turns:
    """The loaded jobs of one rank, which take turns on one engine: LoRA adapters of one base model,
    each with its own optimizer, random numbers and step.

    The adapter of the job whose turn it is (`current`) is in the engine, the adapters of the others
    are in host memory. A turn begins with a request of the job; `turn_s` is how long the last
    change took. A lost engine is started again with the next turn, without loss for the other jobs.
    Every rank calls the same methods in the same order.
    """

    def __init__(self, ranks: Ranks, start_engine: Callable[[Job], Engine]) -> None:
        self._ranks = ranks
        self._start_engine = start_engine
        self._engine: Engine | None = None
        self._away: dict[str, LoadedJob] = {}
        self._took_turn = False
        self.current: LoadedJob | None = None
        self.turn_s: float | None = None

    @property
    def num_jobs(self) -> int:
        return len(self._away) + (self.current is not None)

    def job_ids(self) -> tuple[str, ...]:
        """Returns the ids of the loaded jobs, beginning with the job whose turn it is. Safe to call
        from another thread."""
        current = self.current
        ids = [current.request.job_id] if current else []
        return (*ids, *(job_id for job_id in [*self._away] if job_id not in ids))

    def find(self, job_id: str) -> LoadedJob | None:
        """Returns the loaded job of this id, whether or not it is its turn."""
        current = self.current
        if current and current.request.job_id == job_id:
            return current
        return self._away.get(job_id)

    def metrics(self) -> dict[str, float]:
        """Returns the seconds of the present command's change of turns, if there was one."""
        return {"time/turn": self.turn_s or 0.0} if self._took_turn else {}

    def new_command(self) -> None:
        """Notes that a new command begins, without a change of turns so far."""
        self._took_turn = False

    def begin(self, loaded: LoadedJob) -> None:
        """Begins the turn of a loaded job, unless it is its turn already."""
        if loaded is self.current:
            return
        started = time.monotonic()
        try:
            loaded.engine = self._turn_to(loaded.job, loaded.aside)
        except Exception:  # undone and raised again; its newest checkpoint is loaded later
            self.free(loaded.request.job_id)
            raise
        loaded.aside = None
        self.current = self._away.pop(loaded.request.job_id)
        self.turn_s = time.monotonic() - started
        get_logger().info(
            "turn begun", job=loaded.request.job_id, step=loaded.step, seconds=round(self.turn_s, 4)
        )

    def engine_for(self, job: Job) -> Engine:
        """Returns the engine with a job at its start, for a job that will be `current`: a new
        engine, unless other jobs share the present one."""
        return self._turn_to(job, None)

    def _turn_to(self, job: Job, aside: object) -> Engine:
        """Returns the engine with the job in it. If that fails on any rank it fails on all: the
        engine is then closed, and it is no job's turn."""
        self._took_turn = True
        try:
            if (before := self.current) and (engine := self._engine):
                swapped_out: list[object] = []
                self._ranks.on_all_ranks(lambda: swapped_out.append(engine.swap_out()))
                before.aside = swapped_out[0]
                self.current, self._away[before.request.job_id] = None, before
            self._ranks.on_all_ranks(lambda: self._exchange(job, aside))
        except BaseException:  # undone and raised again: the engine may contain half of it
            self.close_engine()
            raise
        assert self._engine is not None, "the exchange sets it on every rank"
        return self._engine

    def _exchange(self, job: Job, aside: object) -> None:
        is_new = self._engine is None
        engine = self._engine = self._engine or self._start_engine(job)
        if aside is not None or not is_new:
            engine.swap_in(job, aside)

    def free(self, job_id: str) -> None:
        """Frees a job, if it is loaded. The engine stays for the others."""
        loaded = self.find(job_id)
        if loaded is None:
            return
        self._away.pop(job_id, None)
        if loaded is self.current:
            self.current = None
        loaded.close()
        get_logger().info("job unloaded", job=job_id, step=loaded.step)

    def keep(self, stays: Callable[[LoadedJob], bool]) -> int:
        """Frees the jobs that do not stay, and returns how many do."""
        for loaded in filter(None, [self.current, *self._away.values()]):
            if not stays(loaded):
                self.free(loaded.request.job_id)
        return self.num_jobs

    def close_engine(self) -> None:
        """Frees the engine, and with it the job whose turn it is."""
        engine, self._engine = self._engine, None
        if self.current:
            self.free(self.current.request.job_id)
        if engine is not None:
            engine.close()

    def free_all(self) -> None:
        """Frees all jobs and the engine."""
        self.keep(lambda _: False)
        self.close_engine()

    def free_shared_memory(self) -> None:
        """Frees only the jobs' shared memory. Safe to call from another thread."""
        for loaded in filter(None, [self.current, *self._away.values()]):
            loaded.close()


# --- learning rate --------------------------------------------------------------------------------


DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}


def learning_rate(job: Job, step: int) -> float:
    """Returns the rate of `step`, from 1: a pure function, so no state is saved or restored.

    The steps of `[warmup]` have that section's rate. Not counting these, with s the step, S the
    job's steps and w its `warmup_steps`,

        s <= w    peak * s / w
        s > w     min + (peak - min) * f(p),  p = (s - max(w, 1)) / (S - max(w, 1))

        constant  the peak
        linear    f(p) = 1 - p
        cosine    f(p) = (1 + cos(pi p)) / 2      (arXiv 1608.03983)

    so step w (without warm-up, the first step) has the peak, and the last step has
    `min_learning_rate`.
    """
    training = job.training
    if step <= job.warmup.steps:
        return job.warmup_learning_rate
    step, steps = step - job.warmup.steps, job.steps - job.warmup.steps
    peak, warmup = job.learning_rate, training.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if training.schedule == "constant":
        return peak
    start = max(warmup, 1)
    progress = min(1.0, (step - start) / (steps - start)) if steps > start else 0.0
    return training.min_learning_rate + (peak - training.min_learning_rate) * DECAYS[
        training.schedule
    ](progress)
