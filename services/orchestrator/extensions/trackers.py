"""Weights & Biases, TensorBoard, MLflow and Trackio, for jobs that ask for them. A tracker neither
delays nor stops a job: its calls run in a thread, and failed ones are retried at the next step. W&B
is a service, and its run is continued. The others write files on this machine. When a job
continues, these are written again from the run folder's metrics, so that they have each step once.
"""

# Packages of extras may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import importlib.util
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from services.orchestrator.seams import TrackerReport
from services.orchestrator.store.folder import RunFolder
from shared.host.logs import get_logger
from shared.job import Job

FINISH_S = 60.0
"""Seconds that W&B has at the end to take the remaining rows."""

INIT_S = 60.0
"""Seconds that W&B has to begin a run."""

POLL_S = 0.05

NO_KEY = "no API key: set WANDB_API_KEY where the orchestrator runs"

WANDB = "W&B"

Row = tuple[int, dict[str, float]]


class TrackerRun(Protocol):
    """The part of `wandb.Run` that is used; trackers that write files have the same methods."""

    def log(self, data: dict[str, Any], *, step: int) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class NoKey(Exception):
    """W&B has no API key, or an invalid one, and refuses everything."""


class Tracker:
    """Sends a job's metrics to a tracker, where `begin` starts a run. `name` is shown in messages.
    `trouble` is a sentence on the rows that the tracker lacks, and why; None: it has all."""

    def __init__(
        self,
        job: Job,
        job_id: str,
        run_dir: Path,
        begin: Callable[[Job, str, Path], TrackerRun],
        name: str = WANDB,
    ) -> None:
        self.trouble: str | None = None
        self._job_id = job_id
        self._name, self._is_local = name, name != WANDB
        offline = not self._is_local and job.wandb and job.wandb.mode == "offline"
        self._where = f"{run_dir}/wandb" if offline else None
        self._begin = functools.partial(begin, job, job_id, run_dir)
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._steps: list[int] = []
        self._num_taken = 0
        self._reason: str | None = None
        self._exit_code = 1
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._steps.append(step)
        self._rows.put((step, metrics))

    async def finish(self, succeeded: bool) -> TrackerReport | None:
        """Waits up to FINISH_S seconds until the tracker has all rows, and returns a report; None
        if there was no row."""
        self._exit_code = 0 if succeeded else 1
        self._rows.put(None)
        end = time.monotonic() + FINISH_S
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        if self._thread.is_alive():
            self._note(f"it did not accept the rest of the run within {FINISH_S:g} s")
        return self._tracked() if self._steps else None

    def _tracked(self) -> TrackerReport:
        if self._reason:
            return TrackerReport(f"{self._lacks()}: {self._reason}; metrics.jsonl has all", False)
        has = f"{self._name} has {_named(self._steps)} of this run"
        if self._where:
            return TrackerReport(f"{has} once `wandb sync` sends it what is in {self._where}", True)
        return TrackerReport(has, True)

    def _lacks(self) -> str:
        if not self._num_taken and self._steps[0] <= 1:
            return f"{self._name} has nothing of this run"
        missing = self._steps[self._num_taken :]
        return f"{self._name} lacks {_named(missing) if missing else 'the end'} of this run"

    def _work(self) -> None:
        """The thread: sends the tracker each row, after the rows that failed before."""
        run: TrackerRun | None = None
        waiting: list[Row] = []
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
            except Exception as error:  # of a tracker's HTTP and its disk, of any class
                run = None if self._is_local else run  # files are written again
                self._note(f"{type(error).__name__}: {error}")

    def _note(self, reason: str) -> None:
        self._reason = reason
        self.trouble = (
            f"{self._lacks()} so far: {reason}; the job continues, and its rows are sent again "
            "with the next step"
        )
        if not self._is_local:
            self.trouble += ' (wandb.mode = "offline" keeps them in the run folder)'
        get_logger().warning(
            "the tracker did not accept metrics",
            tracker=self._name,
            job=self._job_id,
            reason=reason,
        )


def missing(job: Job) -> str | None:
    """Returns a message on the trackers that will record nothing of the job because a key or a
    package is missing. It may take seconds: call it off the event loop."""
    reasons: list[str] = []
    try:
        _check_key(job)
    except NoKey as error:
        reasons.append(
            f"W&B will have nothing of this run: {error}; or leave out [wandb], or set wandb.mode "
            '= "offline", which keeps the metrics in the run folder'
        )
    if absent := [name for name in job.trackers if importlib.util.find_spec(name) is None]:
        reasons.append(
            f"trackers: {', '.join(absent)} will have nothing of this run, because the package is "
            "not installed where the orchestrator runs; install it there: pip install "
            "'hone-rl[trackers]'"
        )
    return "; ".join(reasons) or None


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


def begin_wandb(job: Job, job_id: str, run_dir: Path) -> TrackerRun:
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
        reinit="create_new",  # the default may return another job's run
        dir=str(run_dir),
        config=job.model_dump(mode="json"),
        settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
    )


# --- trackers of files ----------------------------------------------------------------------------


class JobTrackers:
    """The trackers of a job, as one."""

    def __init__(self, job: Job, job_id: str, run_dir: Path) -> None:
        self._each = [Tracker(job, job_id, run_dir, begin_wandb)] if job.wandb else []
        for name in job.trackers:
            shown, begin = LOCAL[name]
            self._each.append(Tracker(job, job_id, run_dir, begin, shown))

    @property
    def trouble(self) -> str | None:
        return "; ".join(each.trouble for each in self._each if each.trouble) or None

    def start(self) -> None:
        for each in self._each:
            each.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for each in self._each:
            each.log(step, metrics)

    async def finish(self, succeeded: bool) -> TrackerReport | None:
        reports = await asyncio.gather(*(each.finish(succeeded) for each in self._each))
        found = [report for report in reports if report]
        if not found:
            return None
        return TrackerReport(
            "; ".join(report.message for report in found), all(report.complete for report in found)
        )


class _FileRun:
    """A run whose files are written from the beginning: the first row is preceded by the earlier
    rows of the run folder. `add` writes one row, `end` finishes the files."""

    def __init__(
        self, run_dir: Path, add: Callable[[Row], None], end: Callable[[int], None]
    ) -> None:
        self._run_dir, self._add, self._end = run_dir, add, end
        self._is_new = True

    def log(self, data: dict[str, Any], *, step: int) -> None:
        if self._is_new:
            for row in RunFolder(self._run_dir).metrics():
                if row.step < step:
                    self._add((row.step, dict(row.metrics)))
            self._is_new = False
        self._add((step, data))

    def finish(self, exit_code: int) -> None:
        self._end(exit_code)


def _tensorboard(job: Job, job_id: str, run_dir: Path) -> TrackerRun:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = run_dir / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    writer: Any = EventFileWriter(str(folder))

    def add(row: Row) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in row[1].items()]
        writer.add_event(Event(wall_time=time.time(), step=row[0], summary=Summary(value=values)))
        writer.flush()

    return _FileRun(run_dir, add, lambda _: writer.close())


MAX_MLFLOW_METRICS = 1000
"""Most metrics that MLflow accepts in one call."""


def _mlflow(job: Job, job_id: str, run_dir: Path) -> TrackerRun:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    folder = run_dir.resolve()
    # MLflow keeps the file open
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    known = client.get_experiment_by_name(job.name)
    artifacts = (folder / "mlflow").as_uri()
    experiment = (
        known.experiment_id
        if known
        else client.create_experiment(job.name, artifact_location=artifacts)
    )
    for run in client.search_runs([experiment]):
        client.delete_run(run.info.run_id)
    run_id = client.create_run(experiment, run_name=job_id).info.run_id

    def add(row: Row) -> None:
        now = int(time.time() * 1000)
        metrics = [  # MLflow refuses the name "pass@1"
            Metric(key.replace("@", "_at_"), value, now, row[0]) for key, value in row[1].items()
        ]
        for at in range(0, len(metrics), MAX_MLFLOW_METRICS):
            client.log_batch(run_id, metrics=metrics[at : at + MAX_MLFLOW_METRICS])

    def end(exit_code: int) -> None:
        client.set_terminated(run_id, "FAILED" if exit_code else "FINISHED")

    return _FileRun(run_dir, add, end)


def _trackio(job: Job, job_id: str, run_dir: Path) -> TrackerRun:
    from trackio.sqlite_storage import SQLiteStorage

    SQLiteStorage.delete_run(job.name, job_id)  # `trackio.init` allows one run per process

    def add(row: Row) -> None:
        SQLiteStorage.bulk_log(job.name, job_id, [row[1]], [row[0]])

    return _FileRun(run_dir, add, lambda _: None)


LOCAL: dict[str, tuple[str, Callable[[Job, str, Path], TrackerRun]]] = {
    "tensorboard": ("TensorBoard", _tensorboard),
    "mlflow": ("MLflow", _mlflow),
    "trackio": ("Trackio", _trackio),
}
