"""What a call does next, by what came back and when. Times are seconds since the call began."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Busy, Conflict, HoneError, NotFound, Unavailable
from shared.http.retry import FIRST_PAUSE_S, MAX_PAUSE_S, GiveUp, Poll, Retry, Send

SERVICE = "trainer at http://trainer:8002"


def call(
    deadline_s: float = 100.0, patience_s: float = 1000.0, *, counts_away: bool = True
) -> Retry:
    return Retry(
        SERVICE,
        "POST /step",
        0.0,
        deadline_s=deadline_s,
        patience_s=patience_s,
        counts_away=counts_away,
    )


def lost() -> Unavailable:
    return Unavailable("connection lost", code="unreachable")


def forgotten() -> NotFound:
    return NotFound("no operation 'a'", code="no_operation")


def gives_up(action: Send | Poll | GiveUp) -> HoneError:
    assert isinstance(action, GiveUp)
    assert action.error.__notes__ == [f"POST /step of {SERVICE}"]
    return action.error


def test_a_service_is_given_up_where_the_next_attempt_would_be_beyond_the_patience() -> None:
    """Away since 0: attempts at 0, 0.1, 0.3 and 0.7, and none at 1.5."""
    retry = call(patience_s=1.5)
    for now, pause_s in ((0.0, 0.1), (0.1, 0.2), (0.3, 0.4)):
        assert retry.failed(lost(), now) == Send(pause_s)
    assert retry.away_s(0.7) == 0.7
    assert gives_up(retry.failed(lost(), 0.7)).code == "unreachable"


def test_patience_begins_again_once_the_service_was_heard_of() -> None:
    retry = call(patience_s=1.5)
    assert retry.failed(lost(), 1.0) == Send(0.1)
    assert retry.accepted("/operations/a", 1.1) == Poll("/operations/a")
    retry.heard(60.0)  # a poll was answered
    assert retry.failed(lost(), 61.0) == Send(0.2) and retry.away_s(61.0) == 1.0
    assert gives_up(retry.failed(lost(), 61.2)).code == "unreachable"  # 61.6 is after 61.5


def test_no_attempt_begins_at_the_deadline_or_later() -> None:
    retry = call(deadline_s=10.0)
    assert retry.failed(lost(), 9.8) == Send(0.1)
    assert retry.left_s(9.8) == pytest.approx(0.2)
    assert gives_up(retry.failed(lost(), 9.9)).detail == "connection lost"


def test_a_service_that_forgot_the_operation_is_there_and_is_sent_the_request() -> None:
    retry = call(patience_s=0.15)
    assert retry.accepted("/operations/a", 0.0) == Poll("/operations/a")
    assert retry.failed(forgotten(), 50.0) == Send(0.1)
    assert gives_up(retry.failed(lost(), 50.1)).code == "unreachable"  # 50.3 is after 50.25


def test_an_operation_that_has_not_ended_after_all_is_polled_after_growing_pauses() -> None:
    retry = call()
    polls = [retry.accepted("/operations/a", float(now)).pause_s for now in range(7)]
    assert polls == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert retry.failed(lost(), 10.0) == Send(0.1)
    assert retry.accepted("/operations/b", 10.1) == Poll("/operations/b", 0.0)


def test_time_of_an_outage_may_not_count_towards_the_deadline() -> None:
    """Two attempts of 5 s and their pauses move the deadline from 10 to 20.3."""
    retry = call(deadline_s=10.0, patience_s=math.inf, counts_away=False)
    assert retry.failed(lost(), 5.0) == Send(0.1)
    assert retry.failed(lost(), 10.1) == Send(0.2)
    assert retry.left_s(10.3) == pytest.approx(10.0)


def test_a_stream_that_progressed_is_resumed_after_the_first_pause() -> None:
    retry = Retry(SERVICE, "GET /events", 0.0, patience_s=60.0)
    assert [retry.failed(lost(), now) for now in (1.0, 2.0, 3.0)] == [
        Send(0.1),
        Send(0.2),
        Send(0.4),
    ]
    retry.progressed(50.0)
    assert retry.pause_s(lost(), 100.0) == 0.1
    with pytest.raises(Unavailable, match="connection lost"):
        retry.pause_s(lost(), 110.0)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_sequence_of_outcomes_ends_in_time_and_not_too_early(draw: random.Random) -> None:
    """No pause reaches the deadline or grows beyond its bound. A call gives up only if its next
    attempt would be beyond deadline or patience, and its error names the service."""
    deadline_s, patience_s = draw.choice((1, 10, 100)), draw.choice((0.0, 1.0, 5.0, 50.0))
    retry = call(deadline_s, patience_s)
    now, pause_s, away_since = 0.0, FIRST_PAUSE_S, 0.0
    for _ in range(200):
        took_s = draw.choice((0.0, 0.01, 0.5, 3.0))
        if took_s > retry.left_s(now):
            assert SERVICE in str(gives_up(retry.late()).__notes__)
            return
        now += took_s
        kind = draw.choice(("accepted", "lost", "lost", "busy", "forgotten", "stale"))
        if kind == "accepted":
            action, away_since = retry.accepted("/operations/a", now), now
            assert action.pause_s <= MAX_PAUSE_S
            now = min(now + action.pause_s, deadline_s)
            continue
        if kind == "stale" and draw.random() < 0.9:
            continue
        error: HoneError = {
            "lost": lost(),
            "busy": Busy("full", retry_after_s=draw.randrange(5)),
            "forgotten": forgotten(),
            "stale": Conflict("taken over", code="stale"),
        }[kind]
        least_s = error.retry_after_s if isinstance(error, Busy) else 0
        pause_s = max(pause_s, least_s)
        if isinstance(error, Busy | NotFound):
            away_since = now + pause_s
        action = retry.failed(error, now)
        if isinstance(action, GiveUp):
            assert SERVICE in str(gives_up(action).__notes__)
            is_late = now + pause_s >= min(deadline_s, away_since + patience_s)
            assert kind == "stale" or is_late
            return
        assert isinstance(action, Send) and action.pause_s == pause_s
        assert pause_s <= max(MAX_PAUSE_S, least_s) and now + pause_s < deadline_s
        assert now + pause_s < away_since + patience_s
        now, pause_s = now + pause_s, min(2 * pause_s, MAX_PAUSE_S)
