"""Jobs that take turns on one engine: LoRA adapters of one base model, each with its own optimizer,
random numbers and step.

The job whose turn it is has its adapter in the engine, the others have theirs in host memory. A
turn begins with a request of the job. An engine that was lost is started again with the next turn,
and no other job loses anything by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from services.trainer.engine import Engine
from services.trainer.loaded import LoadedJob
from services.trainer.processes.together import Ranks
from shared.host.logs import get_logger
from shared.job import Job


class Turns:
    """The loaded jobs of one rank. `current` is the job whose turn it is; `turn_s` is how long the
    last change took. Every rank calls the same methods in the same order."""

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
        """Returns the ids of the loaded jobs, first that whose turn it is. Safe to call from
        another thread."""
        current = self.current
        ids = [current.request.job_id] if current else []
        return (*ids, *(job_id for job_id in [*self._away] if job_id not in ids))

    def find(self, job_id: str) -> LoadedJob | None:
        """Returns the loaded job of this id, whether it is its turn or not."""
        current = self.current
        if current and current.request.job_id == job_id:
            return current
        return self._away.get(job_id)

    def metrics(self) -> dict[str, float]:
        """Returns what the present command's change of turns took, if it was one."""
        return {"time/turn": self.turn_s or 0.0} if self._took_turn else {}

    def new_command(self) -> None:
        """A command begins, which has had no turn yet."""
        self._took_turn = False

    def begin(self, loaded: LoadedJob) -> None:
        """Begins the turn of a loaded job, if it is another's."""
        if loaded is self.current:
            return
        started = time.monotonic()
        try:
            loaded.engine = self._turn_to(loaded.job, loaded.aside)
        except Exception:  # undone and raised again: its newest checkpoint is loaded in its place
            self.free(loaded.request.job_id)
            raise
        loaded.aside = None
        self.current = self._away.pop(loaded.request.job_id)
        self.turn_s = time.monotonic() - started
        get_logger().info(
            "turn begun", job=loaded.request.job_id, step=loaded.step, seconds=round(self.turn_s, 4)
        )

    def engine_for(self, job: Job) -> Engine:
        """Returns the engine with a job at its start, which is about to become `current`: a new
        one, unless other jobs share the engine."""
        return self._turn_to(job, None)

    def _turn_to(self, job: Job, aside: object) -> Engine:
        """Returns the engine with the job in it. If that fails on any rank it fails on all, no one
        has the turn, and the engine is closed."""
        self._took_turn = True
        try:
            if (before := self.current) and (engine := self._engine):
                found: list[object] = []
                self._ranks.on_all_ranks(lambda: found.append(engine.swap_out()))
                before.aside = found[0]
                self.current, self._away[before.request.job_id] = None, before
            self._ranks.on_all_ranks(lambda: self._exchange(job, aside))
        except BaseException:  # undone and raised again: half of it may be in the engine
            self.close_engine()
            raise
        assert self._engine is not None, "the exchange has made it"
        return self._engine

    def _exchange(self, job: Job, aside: object) -> None:
        is_new = self._engine is None
        engine = self._engine = self._engine or self._start_engine(job)
        if aside is not None or not is_new:
            engine.swap_in(job, aside)

    def free(self, job_id: str) -> None:
        """Frees a job, if it is loaded. The engine stays for the others."""
        found = self.find(job_id)
        if found is None:
            return
        self._away.pop(job_id, None)
        if found is self.current:
            self.current = None
        found.close()
        get_logger().info("job unloaded", job=job_id, step=found.step)

    def keep(self, stays: Callable[[LoadedJob], bool]) -> int:
        """Frees the jobs that do not stay, and returns how many do."""
        for loaded in filter(None, [self.current, *self._away.values()]):
            if not stays(loaded):
                self.free(loaded.request.job_id)
        return self.num_jobs

    def close_engine(self) -> None:
        """Frees the engine: of the job whose turn it is nothing is left."""
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
