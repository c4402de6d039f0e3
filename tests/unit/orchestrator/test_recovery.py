"""Which failures of a service a job goes on after."""

from __future__ import annotations

from typing import Any

import pytest

from services.orchestrator.loop import recovery
from services.orchestrator.loop.groups import MustPause
from services.orchestrator.loop.recovery import can_recover
from services.orchestrator.queue.store import StoreUnavailable
from shared.errors import BadRequest, Conflict, Failed, HoneError, Unavailable
from shared.wire import TrainerState


def state(job_id: str | None = "job", restarts: int = 0) -> TrainerState:
    return TrainerState(
        job_id=job_id,
        step=3,
        num_ranks=1,
        dtype="float32",
        device="cpu",
        num_parameters=1,
        restarts=restarts,
    )


class Trainer:
    """Answers `GET /state` in turn."""

    def __init__(self, *answers: TrainerState | HoneError) -> None:
        self._answers = list(answers)

    async def trainer_state(self) -> TrainerState:
        answer = self._answers.pop(0)
        if isinstance(answer, HoneError):
            raise answer
        return answer


async def recovers(error: HoneError, *answers: TrainerState | HoneError) -> bool:
    trainer: Any = Trainer(*answers)
    return await can_recover(error, state(), trainer)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LAST_WORDS_S", 0.0)


def late() -> Unavailable:
    """What the client raises for a call that took longer than its deadline."""
    try:
        raise Unavailable(
            "trainer did not finish POST /train_step within 3600 s"
        ) from TimeoutError()
    except Unavailable as error:
        return error


async def test_a_service_at_another_step_or_one_that_was_away_can_be_recovered_from() -> None:
    assert await recovers(Conflict("got step 6, expected 4"))
    assert await recovers(Unavailable("cannot reach the trainer"))


async def test_neither_a_deadline_nor_redis_nor_a_pause_nor_a_mistake_of_the_job_is() -> None:
    for error in (
        late(),
        StoreUnavailable("Redis"),
        MustPause("step 3: 80%"),
        BadRequest("unknown grader"),
    ):
        assert not await recovers(error), error


async def test_a_failed_call_is_recovered_from_only_if_the_trainer_is_another_one_since() -> None:
    died = Failed("rank 1: connection closed by peer")
    assert await recovers(died, state(), state(restarts=1))
    assert await recovers(died, state(job_id=None))
    assert await recovers(died, state(), Unavailable("cannot reach the trainer"))
    assert not await recovers(died, state(), state())
