"""Findings about speed, samplers, and the state of a job; and comparisons of models."""

from __future__ import annotations

from typing import Any

import structlog

from services.orchestrator.extensions.diagnosis.diagnosing import diagnose, findings_of
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot
from shared.wire import FindingList, JobRecord, Obstacle
from tests.support import job_records
from tests.support.run_facts import batch, codes, facts, job_with, only

HOUR = {"time/step": [60.0] * 12}


def record(status: str, error: str | None = None, **changes: Any) -> JobRecord:
    return job_records.record(status, error).model_copy(update=changes)


def test_a_stage_beside_sampling_and_training_is_slow_by_its_share() -> None:
    finding = only(facts({**HOUR, "time/reward": [24.0] * 12}))
    assert (finding.code, finding.level) == ("slow_stage", "warning")
    assert finding.title == "grading the last completions takes 40% of the time of steps 3 to 12"
    assert "HONE_SANDBOX_SLOTS" in finding.keys
    assert not codes(facts({**HOUR, "time/reward": [12.0] * 12}))
    for stage, key in (
        ("sync", "weight_sync"),
        ("store", "HONE_RUNS_DIR"),
        ("checkpoint", "checkpoints.every"),
    ):
        finding = only(facts({**HOUR, f"time/{stage}": [18.0] * 12}))
        assert finding.code == "slow_stage" and finding.keys[0] == key
    quick = {"time/step": [6.0] * 12, "time/reward": [3.0] * 12}
    assert not codes(facts(quick)), "all 100 steps take ten minutes"
    every_fifth = [150.0 if step % 5 == 0 else None for step in range(1, 13)]
    finding = only(facts({**HOUR, "time/eval": every_fifth}))
    assert "evaluating held-out problems takes 50%" in finding.title


def test_sampling_that_bounds_the_step_is_a_notice() -> None:
    busy = {**HOUR, "utilization/rollout": [0.98] * 12, "utilization/trainer": [0.2] * 12}
    finding = only(facts({**busy, "time/generate": [50.0] * 12}, job_with(max_staleness=1)))
    assert (finding.code, finding.level) == ("slow_stage", "notice")
    assert "sampling bounds the step" in finding.title


def test_samplers_that_wait_for_the_trainer_are_a_notice() -> None:
    idle = {**HOUR, "utilization/rollout": [0.3] * 12, "time/wait_for_trainer": [40.0] * 12}
    finding = only(facts(idle))
    assert (finding.code, finding.level) == ("samplers_wait", "notice")
    assert "max_staleness = 1" in finding.remedy
    overlapping = only(facts(idle, job_with(max_staleness=1)))
    assert overlapping.keys == ("HONE_TRAINER_RANKS",)


def test_a_sampler_without_groups_is_a_notice() -> None:
    sync = {"version": 1, "samplers": [{"replica": "a"}, {"replica": "b"}]}
    sync["samplers"] = [{**each, "canary_difference": None} for each in sync["samplers"]]
    uneven = batch([["x"]] * 8, replicas=["a"] * 8)
    finding = only(facts({}, batches=[uneven], syncs=[sync]))
    assert finding.code == "sampler_idle" and "'b' got 0 of 8 groups" in finding.title
    even = batch([["x"]] * 8, replicas=["a", "b"] * 4)
    assert not codes(facts({}, batches=[even], syncs=[sync]))


def test_steps_that_became_slow_name_the_stage_that_grew() -> None:
    metrics = {"time/step": [20.0] * 15 + [60.0] * 15, "time/generate": [10.0] * 15 + [48.0] * 15}
    finding = only(facts(metrics))
    assert (finding.code, finding.level, finding.since_step) == ("slower", "warning", 16)
    assert finding.cause == "time/generate went from 10.0 to 48.0 s"
    longer = {**metrics, "completions/mean_length": [50.0] * 15 + [200.0] * 15}
    finding = only(facts(longer))
    assert finding.level == "notice" and "4.0 times as long" in finding.cause


def test_a_job_that_failed_or_had_to_pause_is_a_problem() -> None:
    found = only(facts({}, record=record("failed", "the model is gone")))
    assert (found.code, found.level, found.cause) == ("failed", "problem", "the model is gone")
    found = only(facts({}, record=record("paused", "the disk is full")))
    assert found.code == "paused" and "hone resume" in found.remedy
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


def test_models_that_cannot_be_told_apart_are_a_notice() -> None:
    def report(low: float, high: float) -> dict[str, Any]:
        mean = {"mean": 0.5, "num_problems": 20}
        change = {"mean": (low + high) / 2, "low": low, "high": high, "num_problems": 20}
        shares = {"missing_rewards": 0.0, "errored_rollouts": 0.0}
        models = [
            {"name": "before", "metrics": {"reward": mean}, **shares},
            {"name": "after", "metrics": {"reward": mean}, "differences": {"reward": change}}
            | shares,
        ]
        of_set = {"name": "", "source": "test.jsonl", "num_problems": 20, "num_samples": 1}
        return {"id": "e-1", "temperature": 0.0, "seed": 0, "sets": [{**of_set, "models": models}]}

    unclear = record("succeeded", summary={"evaluation": report(-0.1, 0.2)})
    found = only(facts({}, record=unclear))
    assert found.code == "evaluation_too_small"
    assert "to tell 'after' from 'before': +0.050, between -0.100 and +0.200" in found.title
    clear = record("succeeded", summary={"evaluation": report(0.05, 0.35)})
    assert not codes(facts({}, record=clear))


def test_a_check_that_fails_is_logged_and_takes_no_other_along() -> None:
    wrong = record("succeeded", summary={"evaluation": {"mean": "no report"}})
    with structlog.testing.capture_logs() as logs:
        assert codes(facts({"total/passes": [12.0]}, record=wrong)) == ["data_repeated"]
    (said,) = logs
    assert said["event"] == "a check of the run failed" and "EvaluationReport" in said["reason"]
    assert said["check"] == "evaluation_too_small"


def listed_of(run: RunSnapshot) -> FindingList:
    assert run.record
    return findings_of(run, run.record, diagnose(run))


def test_the_worst_comes_first_and_a_notice_leaves_a_job_well() -> None:
    running = record("running")
    metrics = {"total/passes": [12.0], "missing_rewards": [0.02], "overlong_prompts": [0.0]}
    listed = listed_of(facts(metrics, record=running))
    assert [finding.level for finding in listed] == ["warning", "notice"]
    assert (listed.well, listed.step, listed.job_id, listed.status) == (
        False,
        1,
        "demo-1",
        "running",
    )
    noticed = facts({"total/passes": [12.0]}, record=running)
    assert listed_of(noticed).well and codes(noticed) == ["data_repeated"]
    assert listed_of(facts({}, record=running)).well
