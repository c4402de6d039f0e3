"""Whose a trainer or sampler is, by who asks and by the time; and which attempts of it may use the
service, by who came and whom each named beside itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shared.errors import Conflict
from shared.http.ownership import (
    HEADER,
    SILENT_S,
    Holders,
    Ownership,
    Requester,
    asking,
    headers,
    requester_of,
)
from shared.settings import Settings
from shared.wire import Fenced, Orchestrator, TrainerJob
from tests.support.trainer_fakes import job_request


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


A, B = (Orchestrator(identity=name, place=f"host-{name}:8000") for name in "ab")
JOB, OTHER = Fenced(job_id="job", attempt=7, epoch=1), Fenced(job_id="other", attempt=2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def trainer(clock: Clock) -> Ownership:
    """Has the job of A."""
    owned = Ownership("trainer", clock)
    as_(A, "job")
    assert owned.take(JOB) is False
    return owned


def as_(orchestrator: Orchestrator | None, job_id: str | None = None) -> None:
    asking.set(orchestrator and Requester(orchestrator, job_id))


def refusal(owned: Ownership) -> str:
    with pytest.raises(Conflict) as caught:
        owned.take(OTHER)
    assert caught.value.code == "taken"
    return caught.value.detail


def loads(job_id: str, attempt: int, *beside: int) -> TrainerJob:
    changes = {"job_id": job_id, "attempt": attempt, "beside": beside}
    return job_request(job_id).model_copy(update=changes)


def test_jobs_that_share_are_the_owners_until_the_last_has_left(trainer: Ownership):
    as_(A, "next")
    trainer.take(loads("next", 9, 7))
    trainer.take(Fenced(job_id="next", attempt=9, epoch=2))  # as each reload of weights does
    trainer.leave(Fenced(job_id="next", attempt=9, epoch=2))
    as_(B, "other")
    assert "'job' of the orchestrator" in refusal(trainer)
    as_(A, "job")
    trainer.leave(JOB)
    as_(B, "other")
    assert trainer.take(OTHER) is True


def test_a_job_that_no_one_named_is_no_owner_any_more(trainer: Ownership):
    as_(A, "next")
    trainer.take(loads("next", 9))
    trainer.leave(Fenced(job_id="next", attempt=9))
    as_(B, "other")
    assert trainer.take(OTHER) is True


def test_another_orchestrator_is_told_who_has_the_trainer(trainer: Ownership):
    as_(B, "other")
    assert refusal(trainer) == (
        "the trainer has job 'job' of the orchestrator at host-a:8000; it serves another one once "
        "that job has ended or is paused: wait for it, or name another in HONE_TRAINER_URL"
    )


def test_who_does_not_say_who_it_is_is_refused_and_owns_nothing(trainer: Ownership):
    as_(None)
    assert "job 'job'" in refusal(trainer)
    free = Ownership("trainer")
    assert free.take(JOB) is False
    as_(B)
    assert free.taken() is None


def test_orchestrators_of_one_redis_are_one_owner(trainer: Ownership):
    as_(Orchestrator(identity="a", place="elsewhere:8000"), "other")
    assert trainer.take(Fenced(job_id="other", attempt=8)) is False
    as_(A, "job")
    assert trainer.taken() is None


def test_a_job_that_leaves_frees_the_trainer(trainer: Ownership):
    trainer.leave(JOB)
    as_(B, "other")
    assert trainer.take(OTHER) is True, "A's fences say nothing of B's"


def test_a_superseded_attempt_frees_nothing(trainer: Ownership):
    trainer.take(Fenced(job_id="job", attempt=8))
    trainer.leave(JOB)
    as_(B, "other")
    assert refusal(trainer)


def test_a_job_of_which_nothing_is_heard_loses_the_trainer(trainer: Ownership, clock: Clock):
    clock.now += SILENT_S
    as_(B, "other")
    assert refusal(trainer)
    clock.now += 0.1
    assert trainer.take(OTHER) is True
    as_(A, "job")
    assert "'other' of the orchestrator at host-b:8000" in (trainer.taken() or "")


def test_any_request_of_its_job_keeps_the_trainer(trainer: Ownership, clock: Clock):
    for _ in range(3):
        clock.now += SILENT_S
        as_(A, "job")
        trainer.hear()
    as_(B, "other")
    assert refusal(trainer)


def test_requests_of_no_job_or_of_another_one_keep_nothing(trainer: Ownership, clock: Clock):
    clock.now += SILENT_S + 1
    for who in ((A, None), (A, "next"), (B, "job"), (None, None)):
        as_(*who)
        trainer.hear()
    as_(B, "other")
    assert trainer.taken() is None


def test_ranks_that_were_started_again_are_still_the_owners(clock: Clock):
    job: TrainerJob = job_request("job").model_copy(update={"orchestrator": A})
    owned = Ownership("trainer", clock)
    owned.go_on(job)
    as_(B, "other")
    assert refusal(owned)
    clock.now += SILENT_S + 1
    assert owned.take(OTHER) is True


def test_a_sampler_that_was_started_again_is_its_jobs_from_its_first_request_on(clock: Clock):
    """Before its model is loaded again, which takes long."""
    sampler = Ownership("rollout", clock)
    for who in ((B, None), (A, "job"), (B, "other")):
        as_(*who)
        sampler.hear()
    assert "the sampler has job 'job' of the orchestrator at host-a:8000" in refusal(sampler)
    as_(A, "job")
    assert sampler.take(JOB) is False
    sampler.leave(JOB)
    sampler.hear()
    as_(B, "other")
    assert sampler.take(OTHER) is True, "a late request of a job that has left it keeps nothing"


def test_the_header_says_who_asks_and_for_which_job():
    own = headers("1f" * 16, Settings(orchestrator_port=8100), "demo-1")
    found = requester_of(own[HEADER])
    assert found is not None
    assert (found.orchestrator.identity, found.job_id) == ("1f" * 16, "demo-1")
    assert found.orchestrator.place.endswith(":8100")
    nobodys = requester_of(headers("1f", Settings())[HEADER])
    assert nobodys is not None and nobodys.job_id is None
    assert headers(None, Settings(), "demo-1") == {}


@pytest.mark.parametrize("text", ["", "a", "a b c d", "é host:1", "a " + "b" * 301])
def test_a_header_that_is_none_says_nothing(text: str):
    assert requester_of(text) is None


def let_in(*calls: tuple[int, int, tuple[int, ...]]) -> Holders:
    found = Holders()
    for attempt, epoch, beside in calls:
        if not found.is_stale((attempt, epoch)):
            found.take((attempt, epoch), beside)
    return found


def holding(found: Holders) -> list[int]:
    return [attempt for attempt in range(20) if attempt in found]


def test_a_newer_attempt_supersedes_all_that_it_does_not_name() -> None:
    assert holding(let_in((5, 1, ()))) == [5]
    assert holding(let_in((5, 1, ()), (7, 1, ()))) == [7]
    assert holding(let_in((5, 1, ()), (7, 1, (5,)), (9, 1, (7,)))) == [7, 9]


def test_the_order_in_which_they_come_makes_no_difference() -> None:
    calls = [(5, 1, ()), (7, 1, (5,)), (9, 1, (5, 7))]
    assert holding(let_in(*calls)) == holding(let_in(*calls[::-1])) == [5, 7, 9]


def test_an_older_epoch_of_a_holder_and_an_attempt_that_no_one_named_are_stale() -> None:
    found = let_in((5, 3, ()), (7, 1, (5,)))
    assert [found.is_stale(fence) for fence in ((5, 2), (5, 3), (6, 9), (7, 0), (8, 0))] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_an_attempt_that_came_without_a_word_of_the_others_names_them_later() -> None:
    """As after a restart of a sampler: weights came before the model."""
    assert holding(let_in((5, 1, ()), (7, 1, ()), (7, 2, (5,)))) == [5, 7]
