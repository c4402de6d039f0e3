"""Weights & Biases, for jobs that ask for it. It never keeps a job waiting and never stops one: its
calls are a thread's, which tries again at the next step what did not succeed."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shared.job import Job
from shared.logs import get_logger

FINISH_S = 60.0
"""Seconds that W&B has at the end to take what it did not take yet."""

INIT_S = 60.0
"""Seconds that W&B has to begin a run."""

POLL_S = 0.05


class WandbRun(Protocol):
    """What is used of `wandb.Run`."""

    def log(self, data: dict[str, Any], *, step: int) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class Tracker:
    """Gives W&B a job's metrics; does nothing for a job without a `[wandb]` section. `begin` starts
    the W&B run. `trouble` is why W&B did not take something, the last time that it did not."""

    def __init__(
        self,
        job: Job,
        job_id: str,
        run_dir: Path,
        begin: Callable[[Job, str, Path], WandbRun] | None = None,
    ) -> None:
        self.trouble: str | None = None
        self._job_id = job_id
        self._begin = lambda: (begin or _begin)(job, job_id, run_dir)
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._exit_code = 1
        self._thread = (
            threading.Thread(target=self._work, name="wandb", daemon=True) if job.wandb else None
        )

    def start(self) -> None:
        if self._thread:
            self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._thread:
            self._rows.put((step, metrics))

    async def finish(self, succeeded: bool) -> None:
        """Waits until W&B has everything, for up to FINISH_S seconds."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._exit_code = 0 if succeeded else 1
        self._rows.put(None)
        end = time.monotonic() + FINISH_S
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        if self._thread.is_alive():
            self._note(f"it did not take the rest of the run in {FINISH_S:g} s")

    def _work(self) -> None:
        """The thread: gives W&B each row, and before it those that it did not take."""
        run: WandbRun | None = None
        waiting: list[tuple[int, dict[str, float]]] = []
        ended = False
        while not ended:
            row = self._rows.get()
            ended = row is None
            waiting += [row] if row else []
            try:
                if waiting:
                    run = run or self._begin()
                while run and waiting:
                    step, metrics = waiting[0]
                    run.log(metrics, step=step)
                    waiting.pop(0)
                if run and ended:
                    run.finish(exit_code=self._exit_code)
            except Exception as error:  # not ours: it raises what its HTTP and its disk raise
                self._note(f"{type(error).__name__}: {error}")

    def _note(self, reason: str) -> None:
        self.trouble = (
            f"Weights & Biases lacks some metrics: {reason}; the job goes on, and they are sent "
            'again with the next step (check WANDB_API_KEY, or set wandb.mode = "offline")'
        )
        get_logger().warning("W&B did not take metrics", job=self._job_id, reason=reason)


def _begin(job: Job, job_id: str, run_dir: Path) -> WandbRun:
    import wandb

    spec = job.wandb
    assert spec is not None
    return wandb.init(
        project=spec.project,
        entity=spec.entity,
        mode=spec.mode,
        tags=list(spec.tags),
        name=spec.name or job_id,
        id=job_id,
        resume="allow",
        dir=str(run_dir),
        config=job.model_dump(mode="json"),
        settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
    )
