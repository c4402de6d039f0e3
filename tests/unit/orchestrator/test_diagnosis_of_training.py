"""Findings about curves, updates, the sampler's policy, and held-out problems."""

from __future__ import annotations

import math
from typing import Any

from services.orchestrator.extensions.diagnosis.diagnosing import diagnose
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot, Series
from shared.wire import MetricsRow
from tests.support.run_facts import codes, facts, job_with, only

RISES = [0.1 + 0.02 * step for step in range(30)]


def held_out(values: dict[int, float], half: float = 0.05) -> dict[int, dict[str, float]]:
    """Evaluations by step, with their intervals."""
    return {
        step: {
            "eval/reward": value,
            "eval/reward_low": value - half,
            "eval/reward_high": value + half,
        }
        for step, value in values.items()
    }


def evaluated(found: RunSnapshot, evaluations: dict[int, dict[str, float]]) -> RunSnapshot:
    """The run with evaluations at some of its steps, or before the first."""
    by_step = {row.step: row.metrics for row in found.rows}
    for step, metrics in evaluations.items():
        by_step[step] = by_step.get(step, {}) | metrics
    rows = [MetricsRow(step=step, metrics=by_step[step]) for step in sorted(by_step)]
    return RunSnapshot(job=found.job, rows=rows, record=found.record)


def test_since_is_where_most_later_values_agree() -> None:
    """From step 3 on four of five are above 1, from step 1 on four of seven."""
    series = Series("x", tuple(enumerate((2.0, 0.0, 2.0, 2.0, 0.0, 2.0, 2.0), 1)))
    assert series.since(lambda value: value > 1) == 3
    assert series.since(lambda value: value > 2) is None
    assert math.isnan(Series("x").median) and Series("x").noise == 0


def test_a_reward_that_falls_from_its_best_is_a_finding() -> None:
    reward = [0.5] * 5 + [0.8] * 12 + [0.2] * 12
    finding = only(facts({"reward": reward}))
    assert (finding.code, finding.level, finding.since_step) == ("reward_fell", "problem", 18)
    assert "fell from 0.8 in steps" in finding.title and "to 0.2 in steps 20 to 29" in finding.title
    assert not codes(facts({"reward": [0.5] * 5 + [0.8] * 12 + [0.7] * 12})), "an eighth is lost"
    noisy = [0.4, 0.8] * 10 + [0.3, 0.6] * 5
    assert not codes(facts({"reward": noisy})), "its steps differ by as much"


def test_a_policy_that_one_step_ruins_is_a_finding_soon() -> None:
    """What a learning rate a hundred times too high did to `make demo-tiny`."""
    metrics = {"reward": [0.37] + [0.0] * 23, "reward_std": [0.48] + [0.0] * 23}
    metrics |= {"canary_change": [3.28] + [0.0] * 23, "grad_norm": [0.4] + [0.0] * 23}
    metrics["frac_reward_zero_std"] = [0.06] + [1.0] * 23
    ruined = facts(metrics, job_with(sampling={"prompts_per_step": 48}))
    found = evaluated(ruined, held_out({0: 0.33, 6: 0.0, 12: 0.0}))
    large, fell, signal = diagnose(found)
    assert (signal.code, signal.cause) == (
        "no_signal_hard",
        "the policy has lost what it could do, as its reward shows",
    )
    assert (fell.code, fell.since_step) == ("reward_fell", 2)
    assert (large.code, large.since_step) == ("updates_too_large", 1)
    assert large.title == (
        "a step changes the policy too much: 3.28 nats by which log-probs of a fixed text change, "
        "in step 1"
    )
    assert not codes(facts({"reward": [0.5, 0.4, 0.3, 0.35, 0.3, 0.35, 0.3], "reward_std": [0.5]}))


def test_held_out_rewards_that_fall_while_training_rises_are_a_finding() -> None:
    found = evaluated(facts({"reward": RISES}), held_out({0: 0.3, 10: 0.5, 20: 0.35, 30: 0.3}))
    finding = only(found)
    assert (finding.code, finding.level, finding.since_step) == ("held_out_falls", "problem", 20)
    assert "fell from 0.500 at step 10 to 0.300" in finding.title
    once = held_out({0: 0.3, 10: 0.5, 20: 0.48, 30: 0.3})
    assert not codes(evaluated(facts({"reward": RISES}), once)), "one may be chance"
    wide = held_out({0: 0.3, 10: 0.5, 20: 0.35, 30: 0.3}, half=0.2)
    assert not codes(evaluated(facts({"reward": RISES}), wide)), "the intervals are wider"


def test_completions_that_became_short_are_suspect_unless_they_solve_more() -> None:
    metrics = {"reward": RISES, "completions/mean_length": [400.0] * 15 + [60.0] * 15}
    finding = only(facts(metrics))
    assert (finding.code, finding.since_step) == ("lengths_collapse", 16)
    assert "from 400 to 60 tokens" in finding.title
    better = evaluated(facts(metrics), held_out({0: 0.2, 30: 0.6}))
    assert not codes(better), "held-out problems are solved better"
    half = {**metrics, "completions/mean_length": [400.0] * 15 + [200.0] * 15}
    assert not codes(facts(half))


def test_entropy_that_collapses_before_all_is_learned_is_a_finding() -> None:
    metrics = {"entropy": [1.0] * 12 + [0.05] * 12, "reward": [0.5] * 24}
    finding = only(facts(metrics))
    assert (finding.code, finding.since_step) == ("entropy_collapse", 13)
    assert not codes(facts({**metrics, "reward": [0.95] * 24})), "there is nothing left to learn"
    assert not codes(facts({**metrics, "entropy": [1.0] * 12 + [0.2] * 12}))


def test_updates_that_change_too_much_point_at_the_learning_rate() -> None:
    finding = only(facts({"canary_change": [0.8] * 6, "grad_norm": [1.0] * 6}))
    assert (finding.code, finding.level) == ("updates_too_large", "problem")
    assert "training.learning_rate (1e-06)" in finding.cause
    assert not codes(facts({"canary_change": [0.08] * 6}))
    idle = facts({"canary_change": [0.0, 0.8] * 6})
    assert "updates_too_large" in codes(idle), "steps without an update are left out"


def test_updates_that_change_nothing_point_at_the_learning_rate() -> None:
    metrics = {"canary_change": [1e-6] * 24, "reward": [0.3, 0.32] * 12}
    metrics["frac_reward_zero_std"] = [0.5] * 24
    finding = only(facts(metrics))
    assert (finding.code, finding.level) == ("updates_too_small", "warning")
    assert not codes(facts({**metrics, "reward": [0.3] * 12 + [0.6] * 12})), "it learns"
    assert not codes(facts({**metrics, "canary_change": [1e-3] * 24}))


def test_steps_without_an_update_are_a_finding() -> None:
    metrics = {"skipped_steps": [0.0, 1.0, 0.0], "grad_norm": [1.0] * 3}
    finding = only(facts(metrics))
    assert (finding.code, finding.since_step) == ("steps_skipped", 2)
    assert not codes(facts({**metrics, "skipped_steps": [0.0] * 3}))


def test_log_probs_that_differ_are_a_finding_with_what_is_known_of_the_cause() -> None:
    metrics = {"mismatch/current/logprob_diff_mean": [0.01, *[0.2] * 5]}
    found = facts(metrics)
    finding = only(found)
    assert (finding.code, finding.level, finding.since_step) == ("mismatch", "problem", 2)
    assert "in another dtype" in finding.cause
    sync = {"version": 5, "samplers": [{"replica": "a", "canary_difference": 0.002}]}
    finding = only(facts(metrics, syncs=[sync]))
    assert "the weights are right" in finding.cause and finding.evidence[1].values == (0.002,)
    narrowed = {"sampling": {"top_p": 0.9}, "correction": {"truncated_sampling": "accept"}}
    assert "sampling.top_p" in only(facts(metrics, job_with(**narrowed))).cause
    assert not codes(facts({"mismatch/current/logprob_diff_mean": [0.2, *[0.01] * 5]}))


def test_samples_that_hardly_count_are_a_finding() -> None:
    job, metrics = job_with(max_staleness=4), {"mismatch/effective_sample_size": [0.3] * 6}
    finding = only(facts({**metrics, "staleness/mean": [3.0] * 6}, job))
    assert (finding.code, finding.level) == ("off_policy", "warning")
    assert not codes(facts({"mismatch/effective_sample_size": [0.9] * 6}, job))


def test_an_evaluation_that_counts_nowhere_is_a_finding() -> None:
    bad = {"eval/reward": 0.4, "eval/errored_rollouts": 0.0, "eval/ignored": 0.6}
    finding = only(evaluated(facts({"x": [0.0] * 10}), {10: bad}))
    assert (finding.code, finding.since_step) == ("evaluation_ignored", 10)
    good = {"eval/reward": 0.4, "eval/errored_rollouts": 0.0}
    assert not codes(evaluated(facts({"x": [0.0] * 20}), {10: bad, 20: good})), "it is over"


def synced(rounding: float, count: int) -> list[dict[str, Any]]:
    return [
        {"version": step, "canary_rounding": rounding, "samplers": []}
        for step in range(1, count + 1)
    ]


def test_the_size_of_updates_is_compared_with_the_rounding_of_the_dtype() -> None:
    """0.08 nats in bfloat16, where rounding makes 0.08, and 0.009 in float32 are the same rate."""
    stays = {"reward": [0.3, 0.32] * 12}
    metrics = {"canary_change": [0.08] * 24, **stays}
    assert not codes(facts(metrics)), "in float32 0.08 nats are an update"
    finding = only(facts(metrics, syncs=synced(0.08, 24)))
    assert finding.code == "updates_too_small" and "no more than rounding does" in finding.title
    assert "by 0.08 nats" in finding.title and "training.dtype" in finding.remedy
    assert not codes(facts(metrics, syncs=synced(0.079, 24))), "sqrt(0.08^2 - 0.079^2) is 0.013"
    large = {"canary_change": [0.6] * 6}
    assert codes(facts(large)) == ["updates_too_large"]
    assert not codes(facts(large, syncs=synced(0.5, 6))), "sqrt(0.6^2 - 0.5^2) is 0.33"
