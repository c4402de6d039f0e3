"""W&B that is unreachable, slow or broken never keeps a job waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.extensions import trackers as tracking
from services.orchestrator.extensions.trackers import JobTrackers, Tracker, TrackerReport
from services.orchestrator.store.folder import RunFolder
from shared.job import Job
from shared.wire import MetricsRow
from tests.support.scored_batches import make_job
from tests.support.wandb_files import offline_run


def wandb_job() -> Job:
    return Job.model_validate(make_job().model_dump() | {"wandb": {"project": "p"}})


def offline_job(**wandb: str) -> Job:
    return Job.model_validate(make_job().model_dump() | {"wandb": wandb | {"mode": "offline"}})


def without_key(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None

    def log(self, data: dict[str, Any], *, step: int) -> None:
        self.rows.append((step, data))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


async def until(condition: Any) -> None:
    async with asyncio.timeout(90):  # the real package takes seconds to start
        while not condition():
            await asyncio.sleep(0.005)


async def test_rows_that_were_not_taken_are_sent_with_the_next(tmp_path: Path) -> None:
    run, failures = FakeRun(), iter([ConnectionError("no route"), ConnectionError("no route")])

    def begin(*_: Any) -> FakeRun:
        if error := next(failures, None):
            raise error
        return run

    tracker = Tracker(wandb_job(), "job-1", tmp_path, begin)
    tracker.start()
    tracker.log(0, {"a": 0.0})
    await until(lambda: tracker.trouble)
    assert tracker.trouble is not None and "ConnectionError: no route" in tracker.trouble
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    tracked = await tracker.finish(True)
    assert run.rows == [(0, {"a": 0.0}), (1, {"a": 1.0}), (2, {"a": 2.0})] and run.exit_code == 0
    assert tracked == TrackerReport("W&B has steps 0 to 2 of this run", complete=True)


async def test_a_wandb_that_hangs_neither_keeps_steps_waiting_nor_the_end_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "FINISH_S", 0.2)
    released = threading.Event()

    def begin(*_: Any) -> FakeRun:
        released.wait(30)
        return FakeRun()

    tracker = Tracker(wandb_job(), "job-1", tmp_path, begin)
    tracker.start()
    start = time.monotonic()
    for step in range(100):
        tracker.log(step, {})
    await tracker.finish(False)
    assert time.monotonic() - start < 5
    assert tracker.trouble is not None and "did not accept the rest" in tracker.trouble
    released.set()


async def test_two_jobs_of_one_process_have_a_run_each(tmp_path: Path) -> None:
    begun: list[str] = []

    def begin(job: Job, job_id: str, run_dir: Path) -> Any:
        run = tracking.begin_wandb(job, job_id, run_dir)
        begun.append(job_id)
        return run

    trackers: dict[str, Tracker] = {}
    for name in ("one", "two"):
        run_dir = tmp_path / name
        run_dir.mkdir()
        own = {"name": "mine"} if name == "two" else {}
        tracker = Tracker(offline_job(project=name, **own), f"job-{name}", run_dir, begin)
        tracker.start()
        tracker.log(0, {})
        await until(lambda name=name: f"job-{name}" in begun)
        trackers[name] = tracker
    for step in (1, 2, 3):
        trackers["one"].log(step, {"reward": float(step)})
        trackers["two"].log(step, {"reward": -float(step)})
    ended = await asyncio.gather(trackers["one"].finish(True), trackers["two"].finish(False))
    for name, shown, sign, code, tracked in zip(
        trackers, ("job-one", "mine"), (1.0, -1.0), (0, 1), ended, strict=True
    ):
        run = offline_run(tmp_path / name)
        assert (run.id, run.name, run.project) == (f"job-{name}", shown, name)
        assert run.rewards == {step: sign * step for step in (1, 2, 3)} and run.exit_code == code
        where = tmp_path / name / "wandb"
        message = f"W&B has steps 0 to 3 of this run once `wandb sync` sends it what is in {where}"
        assert tracked == TrackerReport(message, complete=True)


async def test_without_a_key_the_job_says_that_wandb_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_key(monkeypatch, tmp_path)
    tracker = Tracker(wandb_job(), "job-1", tmp_path, tracking.begin_wandb)
    tracker.start()
    tracker.log(0, {})
    await until(lambda: tracker.trouble)
    assert tracker.trouble is not None
    assert tracker.trouble.startswith("W&B has nothing of this run so far: no API key: set WANDB")
    tracker.log(1, {"reward": 1.0})
    assert await tracker.finish(True) == TrackerReport(
        "W&B has nothing of this run: no API key: set WANDB_API_KEY where the orchestrator runs; "
        "metrics.jsonl has all",
        complete=False,
    )


async def test_what_wandb_lacks_at_the_end_is_named_by_its_steps(tmp_path: Path) -> None:
    class Breaks(FakeRun):
        def log(self, data: dict[str, Any], *, step: int) -> None:
            if step > 2:
                raise ConnectionError("no route")
            super().log(data, step=step)

    tracker = Tracker(wandb_job(), "job-1", tmp_path, lambda *_: Breaks())
    tracker.start()
    for step in (1, 2, 3, 4):
        tracker.log(step, {})
    assert await tracker.finish(True) == TrackerReport(
        "W&B lacks steps 3 to 4 of this run: ConnectionError: no route; metrics.jsonl has all",
        complete=False,
    )


def test_a_missing_key_is_known_before_a_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_key(monkeypatch, tmp_path)
    said = tracking.missing(wandb_job())
    assert said is not None and said.startswith("W&B will have nothing of this run: no API key")
    assert tracking.missing(offline_job(project="p")) is None
    assert tracking.missing(make_job()) is None
    monkeypatch.setenv("WANDB_API_KEY", "short")
    said = tracking.missing(wandb_job())
    assert said is not None and "WANDB_API_KEY invalid" in said
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert tracking.missing(wandb_job()) is None


# --- trackers of files: the real packages ---------------------------------------------------------

Steps = list[tuple[int, float]]


def read_tensorboard(run_dir: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(each.step, each.value) for each in events.Scalars("eval/pass@1")]


def read_mlflow(run_dir: Path) -> Steps:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name == "test"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("job-1", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "eval/pass_at_1")
    return [(each.step, each.value) for each in history]


def read_trackio(run_dir: Path) -> Steps:
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("test") == ["job-1"]
    logs = SQLiteStorage.get_logs("test", "job-1")
    return [(each["step"], each["eval/pass@1"]) for each in logs]


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.fixture(scope="module", autouse=True)
def _trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # which the package reads when it is imported
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield


@pytest.mark.parametrize("name", READERS)
async def test_files_have_each_step_once_after_a_crash_and_a_replay(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip(name, reason="the extra trackers is not installed")
    job = make_job().model_copy(update={"trackers": (name,), "name": "test"})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    folder = RunFolder(tmp_path)

    async def attempt(steps: list[int], kept: int, logged: int) -> Any:
        """Runs steps of which the tracker has seen only the first `logged` when it ends."""
        folder.start_at(kept)
        tracker = JobTrackers(job, "job-1", tmp_path)
        tracker.start()
        for step in steps:
            row = {"eval/pass@1": step / 8, "loss": -1.5}
            folder.append_metrics(MetricsRow(step=step, metrics=row))
            if step in steps[:logged]:
                tracker.log(step, row)
        return await tracker.finish(True), tracker.trouble

    await attempt([0, 1, 2, 3], kept=-1, logged=3)  # step 3 is on disk, and then it crashed
    shown, trouble = await attempt([2, 3, 4], kept=1, logged=3)  # from the checkpoint of step 1
    assert trouble is None and shown.complete
    assert READERS[name](tmp_path) == [(step, step / 8) for step in range(5)]
    shown, _ = await attempt([5], kept=4, logged=1)
    assert READERS[name](tmp_path) == [(step, step / 8) for step in range(6)]
    assert "step 5 of this run" in shown.message


async def test_files_that_failed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    failures = iter([OSError(28, "No space left on device")])

    def begin(job: Job, job_id: str, run_dir: Path) -> Any:
        rows.clear()

        def add(row: tuple[int, dict[str, float]]) -> None:
            rows.append(row[0])
            if row[0] == 1 and (error := next(failures, None)):
                raise error

        return tracking._FileRun(run_dir, add, lambda _: None)

    monkeypatch.setitem(tracking.LOCAL, "trackio", ("Trackio", begin))
    job, folder = make_job().model_copy(update={"trackers": ("trackio",)}), RunFolder(tmp_path)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    tracker = JobTrackers(job, "job-1", tmp_path)
    tracker.start()
    for step in (0, 1):
        folder.append_metrics(MetricsRow(step=step, metrics={}))
        tracker.log(step, {})
    await until(lambda: tracker.trouble)
    assert tracker.trouble == (
        "Trackio lacks step 1 of this run so far: OSError: [Errno 28] No space left on device; the "
        "job continues, and its rows are sent again with the next step"
    )
    tracker.log(2, {})
    shown = await tracker.finish(True)
    assert rows == [0, 1, 2] and tracker.trouble is None
    assert shown == TrackerReport("Trackio has steps 0 to 2 of this run", complete=True)


def test_a_missing_package_of_a_tracker_is_known_before_a_job_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job().model_copy(update={"trackers": ("mlflow",)})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = tracking.missing(job)
    assert said is not None and said.startswith("trackers: mlflow will have nothing of this run")
    assert "pip install 'hone-rl[trackers]'" in said
