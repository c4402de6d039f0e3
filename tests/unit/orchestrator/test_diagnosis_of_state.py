"""Findings about the state of a job, and how findings are listed."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import structlog

from services.orchestrator.extensions.diagnosis.diagnosing import diagnose, findings_of
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot, of_folder
from shared.wire import FindingList, JobRecord, MetricsRow, Obstacle
from tests.support import job_records
from tests.support.run_facts import codes, facts, only


def record(status: str, error: str | None = None, **changes: Any) -> JobRecord:
    return job_records.record(status, error).model_copy(update=changes)


def test_a_job_that_failed_or_had_to_pause_is_a_problem() -> None:
    found = only(facts({}, record=record("failed", "the model is gone")))
    assert (found.code, found.level, found.cause) == ("failed", "problem", "the model is gone")
    assert found.model_dump_json().count("the model is gone") == 1, "reasons may be long"
    found = only(facts({}, record=record("paused", "the disk is full")))
    assert found.code == "paused" and "hone resume" in found.remedy
    assert found.model_dump_json().count("the disk is full") == 1
    assert not codes(facts({}, record=record("paused", "by hand", pause_reason="requested")))
    assert not codes(facts({}, record=record("succeeded")))


def test_a_job_that_lacks_something_waits() -> None:
    lacks = record("running", waits="the reward service is unreachable since 12:00")
    found = only(facts({}, record=lacks))
    assert found.code == "waits" and "the reward service is unreachable" in found.title
    taken = record("queued", place=1, waits_for={"h:1": Obstacle(job="other-1")})
    assert not codes(facts({}, record=taken)), "another job's turn is no fault"
    away = record("queued", place=1, waits_for={"h:1": Obstacle(away="it does not answer")})
    found = only(facts({}, record=away))
    assert found.code == "waits" and "h:1 takes no job: it does not answer" in found.title


def test_a_running_job_without_events_is_stalled() -> None:
    running = record("running", doing="training step 4: trainer: training a step, 400 s")
    metrics = {"time/step": [50.0] * 5}
    found = only(facts(metrics, record=running, last_event_at=1000.0, now=1400.0))
    assert (found.code, found.level) == ("stalled", "warning")
    assert "for 400 s; a step takes 50 s" in found.title and "training a step" in found.cause
    assert not codes(facts(metrics, record=running, last_event_at=1000.0, now=1290.0))
    slow = {"time/step": [100.0] * 5}
    assert not codes(facts(slow, record=running, last_event_at=1000.0, now=1490.0))
    gone = running.model_copy(update={"place": 1})
    found = only(facts(metrics, record=gone, last_event_at=1000.0, now=1400.0))
    assert found.level == "problem" and "no orchestrator works on it" in found.cause


def test_a_job_that_recovers_again_and_again_is_a_finding() -> None:
    found = only(facts({"replayed": [None, 1.0]}, record=record("running", recoveries=3)))
    assert (found.code, found.since_step) == ("recovers_often", 2)
    assert not codes(facts({}, record=record("running", recoveries=2)))


def test_a_check_that_fails_is_logged_and_takes_no_other_along() -> None:
    damaged = [{"version": 1}]  # without its samplers
    metrics = {"mismatch/current/logprob_diff_mean": [0.2] * 5, "overlong_prompts": [0.2] * 5}
    with structlog.testing.capture_logs() as logs:
        assert codes(facts(metrics, syncs=damaged)) == ["overlong_prompts"]
    (said,) = logs
    assert said["event"] == "a check of the run failed" and "samplers" in said["reason"]
    assert said["check"] == "mismatch"


def listed_of(run: RunSnapshot) -> FindingList:
    assert run.record
    return findings_of(run, run.record, diagnose(run))


def test_the_worst_comes_first_and_a_notice_leaves_a_job_well() -> None:
    running = record("running")
    metrics = {"reward": [0.5], "missing_rewards": [0.02], "overlong_prompts": [0.0]}
    listed = listed_of(facts(metrics, record=running))
    assert [finding.level for finding in listed] == ["warning", "notice"]
    assert (listed.well, listed.step, listed.job_id, listed.status) == (
        False,
        1,
        "demo-1",
        "running",
    )
    noticed = facts({"reward": [0.5]}, record=running)
    assert listed_of(noticed).well and codes(noticed) == ["too_few_steps"]
    assert listed_of(facts({}, record=running)).well


def test_of_a_very_long_run_a_bounded_number_of_rows_is_read() -> None:
    """Of the middle too: what fell there is a finding, and evaluations are not skipped."""
    rewards = [min(step, 1_000) / 1_000 if step < 2_000 else 0.2 for step in range(1, 15_001)]
    rows = [
        MetricsRow(step=step, metrics={"reward": reward}) for step, reward in enumerate(rewards, 1)
    ]
    rows[6_543] = MetricsRow(step=6_544, metrics={"reward": 0.2, "eval/reward": 0.2})
    folder = Mock(metrics=lambda: rows, batch_steps=list, syncs=list)
    snapshot = of_folder(cast(Any, folder), job_records.JOB)
    steps = [row.step for row in snapshot.rows]
    assert steps[:200] == [*range(1, 201)] and steps[-2000:] == [*range(13_001, 15_001)]
    assert len(steps) <= 3_200 and sorted(set(steps)) == steps and 6_544 in steps
    assert codes(snapshot) == ["reward_fell"]
