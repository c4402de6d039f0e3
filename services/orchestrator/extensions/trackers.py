"""Weights & Biases, for jobs that ask for it. It never keeps a job waiting and never stops one: a
thread makes its calls, and retries failed ones at the next step."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from services.orchestrator.seams import TrackerReport
from shared.host.logs import get_logger
from shared.job import Job

FINISH_S = 60.0
"""Seconds that W&B has at the end to take the remaining rows."""

INIT_S = 60.0
"""Seconds that W&B has to begin a run."""

POLL_S = 0.05

NO_KEY = "no API key: set WANDB_API_KEY where the orchestrator runs"


class WandbRun(Protocol):
    """The part of `wandb.Run` that is used."""

    def log(self, data: dict[str, Any], *, step: int) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class NoKey(Exception):
    """W&B takes nothing: it has no key, or an invalid one."""


class Tracker:
    """Gives W&B a job's metrics; does nothing for a job without a `[wandb]` section. `begin` starts
    the W&B run. `trouble` says which rows W&B has not taken so far, and why; None: it has all."""

    def __init__(
        self,
        job: Job,
        job_id: str,
        run_dir: Path,
        begin: Callable[[Job, str, Path], WandbRun] | None = None,
    ) -> None:
        self.trouble: str | None = None
        self._job_id = job_id
        self._where = f"{run_dir}/wandb" if job.wandb and job.wandb.mode == "offline" else None
        self._begin = lambda: (begin or _begin)(job, job_id, run_dir)
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._steps: list[int] = []
        self._num_taken = 0
        self._reason: str | None = None
        self._exit_code = 1
        self._thread = (
            threading.Thread(target=self._work, name="wandb", daemon=True) if job.wandb else None
        )

    def start(self) -> None:
        if self._thread:
            self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._thread:
            self._steps.append(step)
            self._rows.put((step, metrics))

    async def finish(self, succeeded: bool) -> TrackerReport | None:
        """Waits up to FINISH_S seconds until W&B has everything, and returns what it has; None if
        it was given no row."""
        if self._thread is None:
            return None
        self._exit_code = 0 if succeeded else 1
        self._rows.put(None)
        end = time.monotonic() + FINISH_S
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        if self._thread.is_alive():
            self._note(f"it did not take the rest of the run in {FINISH_S:g} s")
        return self._tracked() if self._steps else None

    def _tracked(self) -> TrackerReport:
        if self._reason:
            return TrackerReport(f"{self._lacks()}: {self._reason}; metrics.jsonl has all", False)
        has = f"W&B has {_named(self._steps)} of this run"
        if self._where:
            return TrackerReport(f"{has} once `wandb sync` sends it what is in {self._where}", True)
        return TrackerReport(has, True)

    def _lacks(self) -> str:
        if not self._num_taken and self._steps[0] <= 1:
            return "W&B has nothing of this run"
        missing = self._steps[self._num_taken :]
        return f"W&B lacks {_named(missing) if missing else 'the end'} of this run"

    def _work(self) -> None:
        """The thread: gives W&B each row, after the rows that failed before."""
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
                    self._num_taken += 1
                if run and ended:
                    run.finish(exit_code=self._exit_code)
                self._reason = self.trouble = None
            except NoKey as error:
                self._note(str(error))
            except Exception as error:  # W&B raises errors of its HTTP and its disk
                self._note(f"{type(error).__name__}: {error}")

    def _note(self, reason: str) -> None:
        self._reason = reason
        self.trouble = (
            f"{self._lacks()} so far: {reason}; the job continues, and its rows are sent again "
            'with the next step (wandb.mode = "offline" keeps them in the run folder)'
        )
        get_logger().warning("W&B did not take metrics", job=self._job_id, reason=reason)


def missing_key(job: Job) -> str | None:
    """Returns a message if W&B will take nothing of the job for lack of a key. It may take seconds:
    call it off the event loop."""
    try:
        _check_key(job)
    except NoKey as error:
        return (
            f"W&B will have nothing of this run: {error}; or leave out [wandb], or set wandb.mode "
            '= "offline", which keeps the metrics in the run folder'
        )
    return None


def _check_key(job: Job) -> None:
    """Raises NoKey if W&B finds no key in the environment, in netrc or in its settings."""
    if job.wandb is None or job.wandb.mode == "offline":
        return
    import wandb
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib import wbauth

    host = wandb.setup().settings.base_url
    try:
        found = wbauth.authenticate_session(
            host=host, source="hone", prompt=False, update_session=False
        )
    except AuthenticationError as error:
        raise NoKey(str(error)) from error
    if found is None:
        raise NoKey(NO_KEY)


def _named(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _begin(job: Job, job_id: str, run_dir: Path) -> WandbRun:
    import wandb

    spec = job.wandb
    assert spec is not None
    _check_key(job)
    return wandb.init(
        project=spec.project,
        entity=spec.entity,
        mode=spec.mode,
        tags=list(spec.tags),
        name=spec.name or job_id,
        id=job_id,
        resume="allow",
        reinit="create_new",  # the default would return another job's run
        dir=str(run_dir),
        config=job.model_dump(mode="json"),
        settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
    )
