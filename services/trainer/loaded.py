"""The loaded job: its engine, and its progress."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from services.trainer.disk.checkpoints import FORMAT, Manifest
from services.trainer.disk.resume import Found
from services.trainer.disk.weights import Publisher
from services.trainer.engine import Engine
from shared.weights.checkpoints import STATE, StoredFile
from shared.wire import Canary, StepResult, TrainerJob


@dataclass
class Loaded:
    """`model` is the fingerprint of the job's model, `last` the fingerprint of the last step's body
    with its result, `canary` the canary of a step. Rank 0 has a publisher."""

    request: TrainerJob
    model: str
    engine: Engine
    publisher: Publisher | None
    damaged: tuple[str, ...] = ()
    resumed_step: int | None = None
    step: int = 0
    skipped_steps: int = 0
    last: tuple[str, StepResult] | None = None
    canary: tuple[int, Canary | None] | None = None

    def resume(self, found: Found) -> None:
        """Resumes from the found checkpoint, if there is one."""
        self.damaged = found.damaged
        if found.path is None or found.manifest is None:
            return
        self.engine.load_state(found.path / STATE)
        manifest = found.manifest
        self.step = self.resumed_step = manifest.step
        self.skipped_steps = manifest.skipped_steps
        if manifest.last_body is not None and manifest.last_result is not None:
            self.last = manifest.last_body, manifest.last_result

    def manifest(self, num_ranks: int, files: dict[str, StoredFile]) -> Manifest:
        """Returns the manifest of a checkpoint written now, with these files."""
        last_body, last_result = self.last or (None, None)
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
        """Frees the job's memory, its shared memory included."""
        if self.publisher is not None:
            self.publisher.close()
        self.engine.close()
