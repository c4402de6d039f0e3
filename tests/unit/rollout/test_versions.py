"""The labels beside tokens: whose weights sampled them, and which version."""

from __future__ import annotations

import pytest

from services.rollout.running import label, spans
from shared.errors import Conflict
from shared.wire import Span


def test_a_span_per_sync_says_where_it_begins() -> None:
    labels = [(label("job:2:1", 5), 0), (label("job:2:1", 6), 7)]
    assert spans(labels, "job:2:1") == (Span(version=5, start=0), Span(version=6, start=7))


def test_weights_that_no_job_published_have_no_version() -> None:
    assert spans([("default", 0)], "") == ()


@pytest.mark.parametrize("other", [label("job:2:2", 5), label("next:2:1", 5), "default"])
def test_tokens_of_another_life_are_never_a_jobs(other: str) -> None:
    labels = [(label("job:2:1", 5), 0), (other, 3)]
    with pytest.raises(Conflict, match="tokens from 3 on were sampled by weights of") as caught:
        spans(labels, "job:2:1")
    assert caught.value.code == "stale"


def test_by_hand_all_lives_are_taken() -> None:
    labels = [(label("job:2:1", 5), 0), (label("job:2:2", 3), 4)]
    assert spans(labels, "") == (Span(version=5, start=0), Span(version=3, start=4))
