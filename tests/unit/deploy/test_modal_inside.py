"""What runs in the containers on Modal, with an orchestrator that answers as it is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.modal import inside, refresh, train, trainer
from deploy.modal.flags import Placement
from shared.errors import Unavailable
from shared.job import Job

JOB = Job.model_validate(
    {
        "name": "a",
        "model": "m",
        "steps": 1,
        "data": {"train": "t"},
        "rewards": [{"grader": "length"}],
    }
)


class Orchestrator:
    """Has one job, whose status is the next of `statuses` each time it is asked for."""

    def __init__(self, *statuses: str) -> None:
        self._statuses = list(statuses)
        self.asked: list[str] = []

    def submit(self, job: Job, *, key: str) -> Any:
        self.asked.append(f"submit {job.name} {key}")
        return SimpleNamespace(id="a-1")

    def resume(self, job: str) -> None:
        self.asked.append(f"resume {job}")

    def get(self, job: str) -> Any:
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        shown = {"id": job, "status": status, "error": None, "summary": {}}
        return SimpleNamespace(status=status, model_dump=lambda **_: shown)

    def list(self, limit: int, *, status: str) -> Any:
        assert limit == 1
        found = self._statuses[0] == status
        if found or status == "running":  # the last that is asked for
            self._statuses = self._statuses[1:] or self._statuses
        return SimpleNamespace(jobs=[status] * found)


class Clock:
    """Time passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 10_000, "it never ends"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inside, "time", clock)
    return clock


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled", "paused"])
def test_a_run_ends_with_its_job_and_with_a_pause(end: str, clock: Clock) -> None:
    there: Any = Orchestrator("queued", "running", "running", end)
    assert inside.train(there, JOB, "run-1", clock.sleep)["status"] == end
    assert there.asked == ["submit a run-1"]


def test_a_run_that_is_started_again_continues_with_its_paused_job(clock: Clock) -> None:
    there: Any = Orchestrator("paused", "running", "succeeded")
    assert inside.train(there, JOB, "run-1", clock.sleep)["status"] == "succeeded"
    assert there.asked == ["submit a run-1", "resume a-1"]


def test_the_trainer_works_while_there_are_jobs_and_a_while_longer(clock: Clock) -> None:
    there: Any = Orchestrator("queued", *["running"] * 100, "succeeded")
    inside.work_until_idle(there, 300, clock.sleep)
    assert 101 * inside.LOOK_S + 295 <= clock.now <= 101 * inside.LOOK_S + 305


def test_a_job_that_comes_in_time_keeps_the_trainer(clock: Clock) -> None:
    there: Any = Orchestrator("succeeded", *["paused"] * 30, "queued", "succeeded")
    inside.work_until_idle(there, 300, clock.sleep)
    assert clock.now >= 31 * inside.LOOK_S + 300


class FakeVolume:
    """A file of it is open for the first `num_busy` times."""

    def __init__(self, num_busy: float) -> None:
        self.num_busy = num_busy

    def reload(self) -> None:
        self.num_busy -= 1
        if self.num_busy >= 0:
            raise RuntimeError("there are open files preventing the operation")


def test_a_volume_is_asked_until_no_file_of_it_is_open(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "time", clock)
    monkeypatch.setattr(refresh, "runs", FakeVolume(3))
    refresh.main()
    assert clock.now == 3 * refresh.PAUSE_S
    monkeypatch.setattr(refresh, "runs", FakeVolume(float("inf")))
    with pytest.raises(SystemExit, match="the Volume is in use: there are open files"):
        refresh.main()


async def test_a_service_elsewhere_that_does_not_answer_is_named() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9"):
        await inside.wake(["http://127.0.0.1:9"], deadline_s=0.3)


def test_a_container_with_gpus_ends_without_an_error_if_a_sampler_is_unreachable() -> None:
    why = inside.why_away(["http://127.0.0.1:9"], deadline_s=0.3)
    assert why and "http://127.0.0.1:9" in why
    assert inside.why_away([], deadline_s=0.3) is None


def test_the_trainer_is_not_started_again_while_a_sampler_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(urls: Any, deadline_s: float) -> str:
        return f"{','.join(urls)} away for {deadline_s:g} s"

    places = {"HONE_REWARD_URL": "http://r", "HONE_ROLLOUT_URL": "http://a,http://b"}
    monkeypatch.setattr(inside, "why_away", away)
    monkeypatch.setattr(inside, "start", None)  # would be called for an error
    monkeypatch.setattr(trainer, "places", lambda: places)
    assert trainer.work.local() is None
    ended = train.train.local("run-1", {}, Placement("A100", (), {}, 1), ["http://a"])
    assert (ended["status"], ended["error"]) == ("paused", "http://a away for 1800 s")


def test_the_services_stop_however_the_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda *_, **__: (done.append(name), result)[1]

    urls = {"orchestrator": "http://127.0.0.1:9"}
    monkeypatch.setattr(inside, "start", note("start", urls))
    monkeypatch.setattr(inside, "stop", note("stop"))
    with pytest.raises(ZeroDivisionError), inside.stack(["orchestrator"], {}):
        raise ZeroDivisionError
    assert done == ["start", "stop"]
