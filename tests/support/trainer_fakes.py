"""A stand-in for DeepSpeed at the seam, to reach order, repetition and faults in milliseconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.trainer.engine import PassBudget, Ranks, Update
from services.trainer.processes.launcher import RestartHistory
from services.trainer.trainer import Seams, Trainer
from shared.errors import BadRequest, Unavailable
from shared.job import Job
from shared.job.file import parse_job
from shared.settings import Settings
from shared.weights.folders import CONFIG, WEIGHTS, stored_tensors, tensor_digests
from shared.wire import (
    Canary,
    Example,
    Logprobs,
    Optimization,
    StepTotals,
    TokenLoss,
    TrainerJob,
    TrainStepRequest,
)
from tests.support.safetensors_files import safetensors

EXAMPLE = Example(
    prompt_token_ids=(1, 2), token_ids=(3, 4, 5), old_logprobs=(-1.0, -1.0, -1.0), advantage=1.0
)


class FakeEngine:
    """Its weights are the number of updates. `fault`, if set, is raised by the next update; `skip`
    makes it a skipped one."""

    dtype, device, num_parameters, num_trainable, weights_bytes = "float32", "cpu", 10, 4, 40
    without = ""
    gpu = None

    def __init__(self, job: Job, rank: int = 0) -> None:
        self.job = job
        self.rank = rank
        self.num_updates = 0
        self.num_canaries = 0
        self.learning_rates: list[float] = []
        self.totals: list[StepTotals | None] = []
        self.versions: list[int | None] = []
        self.supervised: list[bool] = []
        self.calls: list[tuple[Example, ...]] = []
        self.closed = False
        self.turns: list[str] = []
        self.loads: list[tuple[Path, bool]] = []
        self.fault: BaseException | None = None
        self.save_fault: BaseException | None = None
        self.turn_fault: BaseException | None = None
        self.aside_fault: BaseException | None = None
        self.skip = False

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def forward(self, examples: tuple[Example, ...]) -> tuple[Logprobs, Logprobs]:
        return Logprobs([-0.5] * sum(len(one.token_ids) for one in examples)), Logprobs()

    def forward_backward(
        self, examples: tuple[Example, ...], loss: TokenLoss
    ) -> tuple[float, Logprobs]:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.calls.append(examples)
        return 0.5, self.forward(examples)[0]

    def optim_step(self, how: Optimization) -> float:
        self.num_updates += 1
        self.calls = []
        return 1.0

    def update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
        version: int | None = None,
        *,
        supervised: bool = False,
    ) -> Update:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        if self.skip:
            self.skip = False
            return Update(loss=0.5, grad_norm=0.0, metrics={}, skipped=True)
        self.num_updates += 1
        self.versions.append(version)
        self.supervised.append(supervised)
        self.learning_rates.append(learning_rate)
        self.totals.append(totals)
        return Update(loss=0.5, grad_norm=2.0, metrics={"entropy": 1.0})

    def canary(self, noise: float | None = None) -> Canary:
        """Its noise is the number of updates when it was measured."""
        self.num_canaries += 1
        logprobs = Logprobs((-1.0, -0.1 * self.num_updates))
        noise = self.num_updates if noise is None else noise
        return Canary(token_ids=(1, 2, 3), logprobs=logprobs, noise=noise)

    def save_weights(self, folder: Path) -> dict[str, str]:
        if self.rank:
            return {}
        data = safetensors(w=b"weights %d" % self.num_updates)
        (folder / "model.safetensors").write_bytes(data)
        return tensor_digests(stored_tensors(folder))

    def live_weights(self) -> dict[str, Any]:
        return {}

    def save_adapter(self, folder: Path) -> None:
        if self.rank == 0:
            data = safetensors(a=b"adapter %d" % self.num_updates)
            (folder / WEIGHTS).write_bytes(data)
            (folder / CONFIG).write_text('{"r": 4}')

    def save_checkpoint(self, folder: Path) -> None:
        self.save_weights(folder)
        if self.rank == 0:
            (folder / "config.json").write_text("{}")

    def save_state(self, folder: Path) -> None:
        if self.save_fault is not None:
            raise self.save_fault
        (folder / f"rank-{self.rank}").write_text(str(self.num_updates))

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        self.loads.append((folder, optimizer))
        own = folder / f"rank-{self.rank}"
        self.num_updates = int((own if own.exists() else folder / "rank-0").read_text())

    def swap_out(self) -> tuple[int, list[tuple[Example, ...]]]:
        if self.aside_fault is not None:
            raise self.aside_fault
        return self.num_updates, self.calls

    def swap_in(self, job: Job, aside: tuple[int, list[tuple[Example, ...]]] | None) -> None:
        if self.turn_fault is not None:
            raise self.turn_fault
        self.job = job
        self.num_updates, self.calls = aside or (0, [])
        self.turns.append(job.name)

    def offload(self) -> None:
        self.turns.append("offload")

    def reload(self) -> None:
        self.turns.append("reload")

    def close(self) -> None:
        self.closed = True


@dataclass
class Engines(list[FakeEngine]):
    """Every engine that was started, in order; what the model's fingerprint is, which job would be
    loaded again with how many tokens in a micro-batch, what is wrong with the device, and whether
    this rank's node stops."""

    rank: int = 0
    model: str = "tiny's"
    remembered: TrainerJob | None = None
    budget: PassBudget | None = None
    fault: str | None = None
    stops: bool = False

    def start(self, job: Job) -> FakeEngine:
        self.append(FakeEngine(job, self.rank))
        return self[-1]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        if self.stops:
            raise Unavailable("the trainer is stopping, and begins no checkpoint")
        yield

    def remember(self, request: TrainerJob | None) -> None:
        self.remembered = request

    def remember_budget(self, _request: TrainerJob, budget: PassBudget) -> None:
        self.budget = budget

    def budget_of(self, request: TrainerJob) -> PassBudget:
        return self.budget or PassBudget(request.job.memory.micro_batch_tokens)


@dataclass
class Together:
    """What threads share that stand in for ranks."""

    num_ranks: int
    values: list[Any] = field(default_factory=list)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.values = [None] * self.num_ranks
        self.barrier = threading.Barrier(self.num_ranks, timeout=10)


class ThreadRanks(Ranks):
    """One of several ranks, each a thread; all have to call the same methods in the same order, as
    with torch.distributed."""

    def __init__(self, shared: Together, rank: int) -> None:
        self.rank = rank
        self.num_ranks = shared.num_ranks
        self._shared = shared

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values


def on_all(*acts: Any) -> list[Any]:
    """Runs one call per rank, each in its thread, and returns what they returned or raised."""
    outcomes: list[Any] = [None] * len(acts)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = acts[rank]()
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def make_trainer(
    tmp_path: Path, ranks: Ranks | None = None, past: RestartHistory | None = None, **settings: Any
) -> tuple[Trainer, Engines]:
    def check_job(job: Job) -> None:
        if job.model == "missing":
            raise BadRequest("there is no folder 'missing'")

    ranks = ranks or Ranks()
    engines = Engines(ranks.rank)
    folders = {"shm_dir": tmp_path / "shm", "runs_dir": tmp_path / "runs"}
    seams = Seams(
        check_job=check_job,
        start_engine=engines.start,
        fingerprint=lambda _job: engines.model,
        writing=engines.writing,
        remember_job=engines.remember,
        remember_budget=engines.remember_budget,
        budget=engines.budget_of,
        device_fault=lambda: engines.fault,
    )
    return Trainer(Settings(**folders, **settings), ranks, seams, past), engines


def loaded_trainer(tmp_path: Path) -> tuple[Trainer, Engines]:
    """Returns a trainer that has loaded `job_request()`."""
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    return trainer, engines


def job_request(
    job_id: str = "a",
    *,
    model: str = "tiny",
    checkpoints: dict[str, int] | None = None,
    **training: object,
) -> TrainerJob:
    document = {
        "name": "t",
        "model": model,
        "steps": 1,
        "data": {"train": "x"},
        "rewards": [{"grader": "x"}],
        "training": {"learning_rate": 0.1, **training},
        "checkpoints": checkpoints or {},
    }
    return TrainerJob(job_id=job_id, job=parse_job(document))


def step_request(
    step: int, *, job_id: str = "a", examples: tuple[Example, ...] = (EXAMPLE,)
) -> TrainStepRequest:
    return TrainStepRequest(job_id=job_id, step=step, examples=examples)
