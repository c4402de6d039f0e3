"""The interfaces under the trainer: a training engine, and the ranks that act together on it. The
only real engine is in `zero/deepspeed_engine.py`; several ranks are `processes/rendezvous.py`.

This seam exists so that the trainer's own rules (order, repetition, faults) can be tested without
DeepSpeed and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shared.errors import Failed, HoneError, Unavailable, from_problem
from shared.job import Job
from shared.wire import Canary, Example, Logprobs, Optimization, StepTotals, TokenLoss


@dataclass(frozen=True)
class Update:
    """The result of one training step's optimizer steps. `grad_norm` is before clipping;
    `num_updates` counts the optimizer steps. `logprobs` and `entropies` are as in `StepResult`.

    `skipped`: some loss or gradient was not finite, and no weight changed.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    num_updates: int = 1
    skipped: bool = False
    logprobs: Logprobs = field(default_factory=Logprobs)
    entropies: Logprobs = field(default_factory=Logprobs)


@dataclass(frozen=True)
class PassBudget:
    """Settings that might fit after memory ran out: the most `tokens` of a micro-batch, and whether
    a job whose gradient checkpointing is "auto" `recomputes` its layers."""

    tokens: int
    recomputes: bool = False

    def applied(self, job: Job) -> Job:
        """Returns the job with the budget."""
        memory = job.memory.recomputing(True) if self.recomputes else job.memory
        memory = memory.model_copy(update={"micro_batch_tokens": self.tokens})
        return job.model_copy(update={"memory": memory})


class OutOfMemory(RuntimeError):
    """This rank ran out of memory and cannot continue; the message says how to avoid that.
    `budget`: settings with which new ranks may fit; None if there are none to try."""

    def __init__(self, message: str, budget: PassBudget | None = None) -> None:
        super().__init__(message)
        self.budget = budget


class Engine(Protocol):
    """The trained policy: `zero/deepspeed_engine.py`. Every method is called on all ranks, with the
    same arguments.

    The `save_` methods get an existing folder that all ranks see. `save_weights`, `save_adapter`
    (of a job with LoRA) and `save_checkpoint` gather tensors from the ranks and write on rank 0;
    `save_state` writes each rank's share, and `load_state` reads it into a new engine
    (`zero/state.py`). `without` says which optimizations the model cannot use, and why ("": it uses
    all).
    """

    dtype: str
    device: str
    num_parameters: int
    num_trainable: int
    without: str
    weights_bytes: int

    def update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
        version: int | None = None,
        *,
        supervised: bool = False,
    ) -> Update:
        """Trains the weights of `version` on `examples` of a batch of `totals`: by the job's loss,
        or if `supervised` by the negative log-likelihood of their tokens."""
        ...

    def forward(self, examples: tuple[Example, ...]) -> tuple[Logprobs, Logprobs]:
        """Returns the log-probs of the examples' sampled tokens, and the reference's (empty without
        one), as in `ForwardResult`."""
        ...

    @property
    def num_calls(self) -> int:
        """The number of `forward_backward` calls in the gradient so far."""
        ...

    def forward_backward(
        self, examples: tuple[Example, ...], loss: TokenLoss
    ) -> tuple[float, Logprobs]:
        """Adds the gradient of the examples' loss to the next `optim_step`'s. Returns the loss and
        the log-probs of the sampled tokens."""
        ...

    def optim_step(self, how: Optimization) -> float:
        """Changes the weights by the gradient so far, and returns its norm before clipping."""
        ...

    def swap_out(self) -> object:
        """Ends the job's turn, and returns the job's own state in host memory: adapter, optimizer,
        random numbers, gradient. Only for a job that `shares_as` other ones."""
        ...

    def swap_in(self, job: Job, aside: Any) -> None:
        """Begins the turn of a job that shares the engine: from a result of `swap_out`, or at the
        job's start (None)."""
        ...

    def canary(self, noise: float | None = None) -> Canary | None:
        """Returns the weights' log-probs of a fixed sequence, which samplers compare with theirs,
        and their rounding `noise`, if it is known, else measured; None if they are not finite."""
        ...

    def save_weights(self, folder: Path) -> dict[str, str]:
        """Returns the digest of each tensor on rank 0, {} elsewhere."""
        ...

    def save_adapter(self, folder: Path) -> None: ...

    def live_weights(self) -> Mapping[str, Any]:
        """Returns the tensors that `save_weights` writes, whole, on the device where they are
        trained; valid until the next update. Raises BadRequest if no rank has whole tensors."""
        ...

    def save_checkpoint(self, folder: Path) -> None: ...

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        """Continues from the files of `save_state`; without `optimizer` from their weights only."""
        ...

    def offload(self) -> None:
        """Moves the states that only an update needs off the device, if possible."""
        ...

    def reload(self) -> None:
        """Moves the offloaded states back to the device."""
        ...

    def close(self) -> None: ...


# --- ranks ----------------------------------------------------------------------------------------


T = TypeVar("T")
SaveAll = Callable[[Path], Any]
"""Saves into a folder on all ranks and returns the results of the last phase, by rank: see
`Ranks.write`."""


class Ranks:
    """How ranks act together and agree on one outcome. This class is for a single rank; `Channel`
    is for several, over torch.distributed.

    An error on one rank is an error of all. A rank that fails while others wait for it inside one
    of the engine's collectives cannot tell them by another collective. So it first reports the
    failure in a store that rank 0 watches (`commands.watch`).
    """

    rank = 0
    num_ranks = 1

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, by rank."""
        return [value]

    def report_failure(self, error: HoneError) -> None:
        """Reports why this rank will not join the collective in which other ranks may wait."""

    def clear_failure(self) -> None:
        """Clears the report: the ranks are in step again."""

    def on_all_ranks(self, act: Callable[[], T]) -> list[T]:
        """Runs `act` on every rank and returns all results, by rank, once it is done everywhere.

        If it failed on any rank, raises on every rank: its own error where it failed, elsewhere an
        error with the first failed rank's sentence.
        """
        result, error = None, None
        try:
            result = act()
        except Exception as caught:  # raised below, once the other ranks know of it
            error = caught
        outcomes = self.settle(
            as_hone_error(error, "the trainer", self.rank) if error else None, result
        )
        if error is not None:
            raise error
        for problem, _ in outcomes:
            if problem:
                raise from_problem(problem["status"], problem, "a rank")
        return [result for _, result in outcomes]

    def from_rank_0(self, act: Callable[[], T]) -> T:
        """Runs `act` on rank 0 and returns its result on every rank, or raises its error on every
        rank."""
        return self.on_all_ranks(lambda: act() if self.rank == 0 else None)[0]  # pyright: ignore[reportReturnType]

    def write(self, lead: Callable[[SaveAll], T], *phases: Callable[[Path], Any]) -> T | None:
        """Runs `lead(save_all)` on rank 0, and returns its result there and None elsewhere.

        `lead` makes a folder and calls `save_all(folder)` once, or not at all. Then every rank runs
        the phases with that folder, each phase after all ranks have done the one before; `save_all`
        returns the results of the last phase, by rank. No rank returns before `lead` has.
        """
        if self.rank:
            folder: Path | None = self.broadcast(None)
            if folder is not None:
                try:
                    self._run_phases(folder, phases)
                finally:
                    self.broadcast(None)
            return None

        def save_all(folder: Path) -> list[Any]:
            self.broadcast(folder)
            return self._run_phases(folder, phases)

        try:
            return lead(save_all)
        finally:
            self.broadcast(None)  # no folder, or all phases are done

    def _run_phases(self, folder: Path, phases: tuple[Callable[[Path], Any], ...]) -> list[Any]:
        results: list[Any] = []
        for phase in phases:
            results = self.on_all_ranks(lambda phase=phase: phase(folder))
        return results

    def settle(
        self, error: HoneError | None, result: Any = None
    ) -> list[tuple[dict[str, Any] | None, Any]]:
        """Returns every rank's problem (or None) and result, by rank."""
        if error is None:
            return self.gather((None, result))
        self.report_failure(error)
        outcomes = self.gather((error.problem(), None))
        self.clear_failure()
        return outcomes


def as_hone_error(error: BaseException, what: str, rank: int) -> HoneError:
    """Returns `error` itself, or Failed naming the operation, the rank and the reason. A rank that
    ran out of memory is Unavailable if fewer tokens in a micro-batch might fit: the ranks are then
    restarted with fewer."""
    if isinstance(error, HoneError):
        return error
    if isinstance(error, OutOfMemory):
        sentence = f"{what} failed on rank {rank}: {error}"
        if error.budget:
            return Unavailable(sentence)
        return Failed(sentence, code="out_of_memory")
    return Failed(f"{what} failed on rank {rank}: {type(error).__name__}: {error}")
