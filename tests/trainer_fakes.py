"""A stand-in for DeepSpeed at the seam, to reach order, repetition and faults in milliseconds."""

from __future__ import annotations

from pathlib import Path

from services.trainer.trainer import Trainer, Update
from shared.config import Settings
from shared.errors import BadRequest
from shared.job import Job
from shared.job_file import parse_job
from shared.wire import Example, TrainerJob, TrainStepRequest

EXAMPLE = Example(prompt_token_ids=(1, 2), token_ids=(3, 4, 5), old_logprobs=(-1.0, -1.0, -1.0), advantage=1.0)


class FakeEngine:
    """Its weights are the number of updates. `fault`, if set, is raised by the next update."""

    dtype, device, num_parameters, weights_bytes = "float32", "cpu", 10, 40

    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_updates = 0
        self.learning_rates: list[float] = []
        self.closed = False
        self.fault: BaseException | None = None

    def update(self, examples: tuple[Example, ...], learning_rate: float) -> Update:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.num_updates += 1
        self.learning_rates.append(learning_rate)
        return Update(loss=0.5, grad_norm=2.0, metrics={"entropy": 1.0})

    def save_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights %d" % self.num_updates)

    def save_checkpoint(self, folder: Path) -> None:
        self.save_weights(folder)
        (folder / "config.json").write_text("{}")

    def close(self) -> None:
        self.closed = True


class Engines(list[FakeEngine]):
    """Every engine that was started, in order."""

    def start(self, job: Job) -> FakeEngine:
        self.append(FakeEngine(job))
        return self[-1]


def make_trainer(tmp_path: Path, *, rank: int = 0, num_ranks: int = 1) -> tuple[Trainer, Engines]:
    def check_job(job: Job) -> None:
        if job.model == "missing":
            raise BadRequest("there is no folder 'missing'")

    engines = Engines()
    settings = Settings(shm_dir=tmp_path / "shm", runs_dir=tmp_path / "runs")
    return Trainer(settings, rank, num_ranks, check_job=check_job, start_engine=engines.start), engines


def job_request(job_id: str = "a", *, model: str = "tiny", **training: object) -> TrainerJob:
    document = {
        "name": "t",
        "model": model,
        "steps": 1,
        "data": {"train": "x"},
        "rewards": [{"grader": "x"}],
        "training": {"learning_rate": 0.1, **training},
    }
    return TrainerJob(job_id=job_id, job=parse_job(document))


def step_request(step: int, *, job_id: str = "a", examples: tuple[Example, ...] = (EXAMPLE,)) -> TrainStepRequest:
    return TrainStepRequest(job_id=job_id, step=step, examples=examples)
