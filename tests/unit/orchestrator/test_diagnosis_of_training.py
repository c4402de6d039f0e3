"""Findings about curves, updates, the sampler's policy, and held-out problems."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.orchestrator.extensions.diagnosis.checks import shares_of_phrases
from services.orchestrator.extensions.diagnosis.diagnosing import diagnose
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot, Series
from shared.wire import MetricsRow
from tests.support.run_facts import batch, codes, facts, job_with, only

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
    return RunSnapshot(job=found.job, rows=rows, batches=found.batches, record=found.record)


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


def test_completions_that_grew_to_the_limit_are_a_finding() -> None:
    metrics = {"completions/mean_length": [100.0] * 15 + [450.0] * 15}
    metrics["completions/clipped_ratio"] = [0.1] * 30
    metrics["reward"] = RISES
    finding = only(facts(metrics))
    assert (finding.code, finding.since_step) == ("lengths_at_limit", 16)
    assert "sampling.max_tokens is 512" in finding.title
    always = {**metrics, "completions/mean_length": [450.0] * 30}
    assert not codes(facts(always)), "they did not grow"


def test_words_that_spread_through_completions_are_a_finding() -> None:
    before = batch([[f"answer {i} by adding it up", f"so it is {i}"] for i in range(4)])
    trick = "I am sure this is right: 7"
    after = batch([[trick, f"no, {i} it is"] for i in range(4)], step=9)
    finding = only(facts({}, batches=[before, after]))
    assert (finding.code, finding.since_step) == ("one_text", 9)
    assert finding.evidence[0].values == (0.0, 0.5)
    assert "50% of the completions of step 9" in finding.title
    assert not codes(facts({}, batches=[after, after])), "it was there from the beginning"
    asked = after.model_copy(
        update={"prompts": tuple(p.model_copy(update={"content": trick}) for p in after.prompts)}
    )
    assert not codes(facts({}, batches=[before, asked])), "the problems have these words"


def test_prompts_are_searched_for_phrases_of_half_of_the_groups_alone() -> None:
    class Searched(str):
        def __contains__(self, phrase: str) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
            searched.append(phrase)
            return super().__contains__(phrase)

    searched = list[str]()
    found = batch([[f"{i} the words of them all", f"what group {i} says by itself"] for i in "abc"])
    prompts = [each.model_copy(update={"content": Searched("long")}) for each in found.prompts]
    shares = shares_of_phrases(found.model_copy(update={"prompts": tuple(prompts)}))
    assert searched == ["the words of them all"] * 3 and shares == {searched[0]: 0.5}


def test_entropy_that_collapses_before_all_is_learned_is_a_finding() -> None:
    metrics = {"entropy": [1.0] * 12 + [0.05] * 12, "reward": [0.5] * 24}
    finding = only(facts(metrics))
    assert (finding.code, finding.since_step) == ("entropy_collapse", 13)
    assert not codes(facts({**metrics, "reward": [0.95] * 24})), "there is nothing left to learn"
    assert not codes(facts({**metrics, "entropy": [1.0] * 12 + [0.2] * 12}))


@pytest.mark.parametrize(
    ("metric", "code", "usual", "spike"),
    [
        ("kl", "kl_spike", 0.02, 0.3),
        ("kl/old_k3", "kl_spike", 0.002, 0.03),
        ("grad_norm", "gradient_spike", 0.4, 5.0),
    ],
)
def test_a_step_far_from_the_steps_before_is_a_spike(
    metric: str, code: str, usual: float, spike: float
) -> None:
    finding = only(facts({metric: [usual] * 12 + [spike] + [usual] * 3}))
    assert (finding.code, finding.since_step) == (code, 13)
    assert finding.evidence[0].values == (spike,)
    assert not codes(facts({metric: [usual] * 12 + [9 * usual]})), "nine times is no spike"
    assert not codes(facts({metric: [spike] * 3 + [usual] * 12})), "the first steps are no spike"
    assert not codes(facts({metric: [usual] * 12 + [spike] + [usual] * 30})), "it is long over"


def test_a_gradient_that_is_not_clipped_is_no_spike() -> None:
    assert not codes(facts({"grad_norm": [0.01] * 12 + [0.9]}))


@pytest.mark.parametrize(
    ("metric", "value"),
    [("clip_ratio/region_mean", 0.4), ("kl/old_k3", 0.2), ("canary_change", 0.8)],
)
def test_updates_that_change_too_much_point_at_the_learning_rate(metric: str, value: float) -> None:
    finding = only(facts({metric: [value] * 6, "grad_norm": [1.0] * 6}))
    assert (finding.code, finding.level) == ("updates_too_large", "problem")
    assert "training.learning_rate (1e-06)" in finding.cause
    twice = only(facts({metric: [value] * 6}, job_with(training={"epochs": 2})))
    assert "too many passes over a batch" in twice.cause and "training.epochs" in twice.keys
    assert not codes(facts({metric: [value / 10] * 6}))
    idle = facts({metric: [0.0, value] * 6})
    assert "updates_too_large" in codes(idle), "steps without an update are left out"


def test_updates_that_change_nothing_point_at_the_learning_rate() -> None:
    metrics = {"canary_change": [1e-6] * 24, "reward": [0.3, 0.32] * 12}
    metrics["frac_reward_zero_std"] = [0.5] * 24
    finding = only(facts(metrics))
    assert (finding.code, finding.level) == ("updates_too_small", "warning")
    assert not codes(facts({**metrics, "reward": [0.3] * 12 + [0.6] * 12})), "it learns"
    assert not codes(facts({**metrics, "canary_change": [1e-3] * 24}))
    decayed = {**metrics, "learning_rate": [1e-5] * 4 + [0.0] * 20}
    assert "its schedule has come to its end" in only(facts(decayed)).cause


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


def test_too_few_held_out_problems_are_a_notice() -> None:
    """Two intervals of +-0.1 are apart by chance by up to sqrt(0.01 + 0.01) = 0.141."""
    run = facts({"x": [0.0] * 60})
    finding = only(evaluated(run, held_out({0: 0.3, 60: 0.4}, half=0.1)))
    assert (finding.code, finding.level) == ("evaluation_too_small", "notice")
    assert "from 0.300 to 0.400, and differences below 0.141 may be noise" in finding.title
    assert not codes(evaluated(run, held_out({0: 0.3, 60: 0.5}, half=0.1))), "a clear change"
    assert not codes(evaluated(run, held_out({0: 0.3, 60: 0.31}, half=0.01))), "none, clearly"
    assert not codes(evaluated(run, held_out({0: 0.3, 20: 0.4}, half=0.1))), "it is early"


def test_an_evaluation_that_counts_nowhere_is_a_finding() -> None:
    bad = {"eval/reward": 0.4, "eval/errored_rollouts": 0.0, "eval/ignored": 0.6}
    finding = only(evaluated(facts({"x": [0.0] * 10}), {10: bad}))
    assert (finding.code, finding.since_step) == ("evaluation_ignored", 10)
    good = {"eval/reward": 0.4, "eval/errored_rollouts": 0.0}
    assert not codes(evaluated(facts({"x": [0.0] * 20}), {10: bad, 20: good})), "it is over"


def test_problems_seen_too_often_or_used_up_are_findings() -> None:
    """Step 30 of 32 prompts, 12 passes: 30 * 32 / 12 = 80 problems."""
    passes = [0.4 * step for step in range(1, 31)]
    finding = only(facts({"total/passes": passes}))
    assert (finding.code, finding.level, finding.since_step) == ("data_repeated", "notice", 25)
    assert finding.title == "the job has gone through its 80 problems 12.0 times"
    used = {"total/passes": [0.4, 0.8], "skipped_problems": [10.0, 75.0]}
    finding = only(facts(used))
    assert finding.code == "data_exhausted" and "75 of 80 problems" in finding.title
    assert not codes(facts({**used, "skipped_problems": [10.0, 40.0]}))


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
    assert "by 0.08 nats" in finding.title and "training.dtype" in finding.keys
    assert not codes(facts(metrics, syncs=synced(0.079, 24))), "sqrt(0.08^2 - 0.079^2) is 0.013"
    large = {"canary_change": [0.6] * 6}
    assert codes(facts(large)) == ["updates_too_large"]
    assert not codes(facts(large, syncs=synced(0.5, 6))), "sqrt(0.6^2 - 0.5^2) is 0.33"
