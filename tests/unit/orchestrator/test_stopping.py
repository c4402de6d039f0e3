"""What ends a job early, and which checkpoint did best: read off rows of metrics."""

from __future__ import annotations

import pytest

from services.orchestrator.grpo.metrics import WRITTEN
from services.orchestrator.jobs import results
from services.orchestrator.jobs.results import (
    COST,
    HOURS,
    TOKENS,
    JobUsage,
    best_step,
    reason_to_stop,
)
from shared.job import CheckpointSpec, Job, StopSpec
from shared.wire import MetricsRow
from tests.support.scored_batches import make_batch, make_job, score


@pytest.mark.parametrize(
    ("spec", "metrics", "why"),
    [
        ({}, {"eval/reward": 1.0, TOKENS: 1e9, HOURS: 99.0}, None),
        ({"target": 0.9}, {"eval/reward": 0.89}, None),
        ({"target": 0.9}, {"eval/reward": 0.9}, "eval/reward is 0.9, and stop.target is 0.9"),
        ({"target": 0.9}, {"reward": 1.0}, None),
        ({"target": 0.9}, {"eval/reward": 1.0, "eval/ignored": 0.6}, None),
        (
            {"target": 0.8},  # what 10 x 0.8 come to in floats, divided by 10
            {"eval/reward": 0.7999999999999999, "eval/hard/ignored": 0.6},
            "eval/reward is 0.8, and stop.target is 0.8",
        ),
        (
            {"target": 0.5, "metric": "hard/pass@4"},
            {"eval/reward": 0.0, "eval/hard/pass@4": 0.75},
            "eval/hard/pass@4 is 0.75, and stop.target is 0.5",
        ),
        ({"max_tokens": 100}, {TOKENS: 99.0}, None),
        (
            {"max_tokens": 100},
            {TOKENS: 100.0},
            "100 tokens were sampled, and stop.max_tokens is 100",
        ),
        ({"max_hours": 1.5}, {HOURS: 1.6, "replayed": 1.0}, None),
        (
            {"max_hours": 1.5, "target": 0.5},
            {HOURS: 1.5, "eval/reward": 1.0},
            "it has run for 1.5 hours, and stop.max_hours is 1.5",
        ),
    ],
)
def test_a_row_says_why_no_step_follows(
    spec: dict[str, float], metrics: dict[str, float], why: str | None
) -> None:
    row = MetricsRow(step=7, metrics=metrics)
    expected = f"stopped after step 7: {why}" if why else None
    assert reason_to_stop(row, StopSpec.model_validate(spec)) == expected


def test_what_was_spent_continues_from_the_rows_that_are_left() -> None:
    rows = [
        MetricsRow(step=step, metrics={TOKENS: 10.0 * step, HOURS: 0.5 * step}) for step in range(5)
    ]
    spent = JobUsage(rows)
    spent.continue_from(rows[:3])  # the trainer went back to step 2
    job = make_job()
    batch = make_batch((score(job, 1.0), score(job, 0.0)))  # 2 completions of a token
    found = spent.after(batch.model_copy(update={"dropped_tokens": 5}))
    assert found[TOKENS] == 27
    assert found[HOURS] == pytest.approx(2.0, abs=0.01), "what was done in vain has been spent"
    spent.continue_from([])
    assert spent.after(batch)[TOKENS] == 2


def test_each_attempt_costs_its_hours_at_the_price_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 hours have cost 8; 0.5 more at 4 make it 10."""
    now = 1000.0
    monkeypatch.setattr(results.time, "monotonic", lambda: now)
    price = results.Price(per_hour=4.0, currency="EUR")
    rows = [MetricsRow(step=1, metrics={HOURS: 1.0, COST: 3.0})]
    spent = JobUsage(rows, 2.0, price, 8.0)
    now += 1800
    batch = make_batch((score(make_job(), 1.0),))
    assert spent.after(batch)[COST] == pytest.approx(10.0)
    assert (spent.hours, spent.cost) == (pytest.approx(2.5), pytest.approx(10.0))
    assert spent.beyond(StopSpec(max_cost=10.5)) is None and spent.beyond(StopSpec()) is None
    why = "it has cost 10.00 EUR (2.5 hours, now at 4 each), and stop.max_cost is 10"
    assert spent.beyond(StopSpec(max_cost=10)) == why
    assert JobUsage(rows, 2.0, price).cost == pytest.approx(3.0), "by its row"
    unknown = JobUsage([], 2.5)
    assert COST not in unknown.after(batch) and unknown.beyond(StopSpec(max_cost=1)) is None


def test_the_best_step_is_the_first_of_the_best_that_have_a_checkpoint() -> None:
    rewards = {10: 0.2, 20: 0.7, 25: 0.9, 30: 0.7, 40: 0.1}
    rows = [
        MetricsRow(
            step=step,
            metrics={"eval/reward": reward, "eval/hard/reward": step / 100}
            | ({} if step == 25 else {WRITTEN: 0.1}),
        )
        for step, reward in rewards.items()
    ]
    rows.append(MetricsRow(step=50, metrics={"reward": 1.0, WRITTEN: 0.1}))
    found = {
        metric: best_step(
            make_job().model_copy(update={"checkpoints": CheckpointSpec(keep_best=metric)}), rows
        )
        for metric in ("reward", "hard/reward", "pass@1", None)
    }
    assert found == {"reward": 20, "hard/reward": 40, "pass@1": None, None: None}


def test_an_evaluation_that_is_ignored_or_above_by_rounding_is_not_the_best() -> None:
    def row(step: int, reward: float, **more: float) -> MetricsRow:
        own = {"eval/hard/reward": reward, "eval/hard/errored_rollouts": 0.0, WRITTEN: 0.1}
        return MetricsRow(step=step, metrics=own | more)

    document = make_job().model_dump(mode="json")
    document["evaluation"]["sets"] = {"hard": {"source": "h"}, "easy": {"source": "e"}}
    job = Job.model_validate(document)
    rows = [row(1, 0.3), row(2, 0.1 + 0.2), row(3, 0.9, **{"eval/hard/ignored": 0.6})]
    assert best_step(job, rows) == 1, "by the first set, for there is no data.eval"


def test_a_summarys_seconds_are_of_the_steps_that_were_sampled() -> None:
    """A step that is replayed after a pause takes no time, as the plan of a run knows, too."""
    first, last = ({"time/train": 4.0, "time/step": 10.0}, {"time/train": 6.0, "time/step": 20.0})
    again = {"time/train": 0.02, "time/step": 0.25, "time/eval": 9.0, "replayed": 1.0}
    assert results._seconds_per_step([first, again, last]) == {"train": 5.0, "step": 15.0}
    assert results._seconds_per_step([again]) == {"train": 0.02, "step": 0.25}
