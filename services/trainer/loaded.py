"""The loaded job: its engine, its progress, and how its checkpoints are written.

If the nodes share a volume that needs commands to show new files, each node commits its own files
and refreshes the others' before it uses them.
"""

from __future__ import annotations

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
from services.trainer.disk.weights import Publisher
from services.trainer.engine import Engine
from services.trainer.processes.together import Ranks, SaveAll
from shared.errors import BadRequest
from shared.host.disk import run_for_volume
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

    def resume(self, found: ResumePoint) -> None:
        """Resumes from the found checkpoint, if there is one, and else begins with the checkpoint
        that the job names. Raises Conflict for a checkpoint of another model."""
        self.damaged = found.damaged
        if found.path is None or found.manifest is None:
            training = self.request.job.training
            if training.start_from is not None:
                self._begin_with(Path(training.start_from), optimizer=training.start_optimizer)
            return
        self.engine.load_state(found.path / STATE)
        manifest = found.manifest
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
        """Commits this node's files, so that other nodes see them after `look`."""
        if self.is_shared:
            self.keep()

    def look(self) -> None:
        """Shows this node the files of the others."""
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
