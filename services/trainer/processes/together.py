"""How ranks act together and agree on one outcome. `Ranks` is the interface, and the case of a
single rank; `Channel` is several ranks, over torch.distributed.

An error on one rank is an error of all. A rank that fails while others wait for it inside one of
the engine's collectives cannot tell them by another collective. So it first reports the failure
in a store that rank 0 watches (`commands.watch`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from services.trainer.engine import OutOfMemory
from shared.errors import Failed, HoneError, Unavailable, from_problem

T = TypeVar("T")
SaveAll = Callable[[Path], Any]
"""Saves into a folder on all ranks and returns the results of the last phase, by rank: see
`Ranks.write`."""


class Ranks:
    """One rank alone. `Channel` is this for several."""

    rank = 0
    num_ranks = 1

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, by rank."""
        return [value]

    def report_failure(self, error: HoneError) -> None:
        """Reports why this rank will not join the collective in which others may wait."""

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
        every phase with that folder, each when all have done the one before; `save_all` returns
        what the last one returned, by rank. No rank returns before `lead` has.
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
        if error.micro_batch_tokens:
            return Unavailable(sentence)
        return Failed(sentence, code="out_of_memory")
    return Failed(f"{what} failed on rank {rank}: {type(error).__name__}: {error}")
