"""Findings about signal, rewards, and completions without a reward."""

from __future__ import annotations

import pytest

from services.orchestrator.extensions.diagnosis.diagnosing import diagnose
from services.orchestrator.extensions.diagnosis.facts import percent
from shared.wire import Part, Score
from tests.support.run_facts import batch, codes, facts, job_with, only, rollout

FLAT = [1.0] * 6


def test_groups_that_all_earn_nothing_are_too_hard() -> None:
    signal = [0.5, *[0.95] * 7]
    finding = only(facts({"frac_reward_zero_std": signal, "reward": [0.02] * 8}))
    assert (finding.code, finding.level) == ("no_signal_hard", "problem")
    assert finding.since_step == 2
    assert finding.title == (  # of eight steps' groups, (0.5 + 7 * 0.95) / 8 are 0.894
        "89% of the groups of steps 1 to 8 teach nothing: hardly any completion earns a reward"
    )
    assert finding.evidence[0].metric == "frac_reward_zero_std"
    assert finding.evidence[0].steps == tuple(range(1, 9))
    assert "difficulty.skip_wrong" in finding.remedy


def test_groups_that_earn_everything_from_the_start_are_too_easy() -> None:
    finding = only(facts({"frac_reward_zero_std": FLAT, "reward": [1.0] * 6}))
    assert (finding.code, finding.level) == ("no_signal_easy", "problem")
    assert "too easy" in finding.cause


def test_a_job_that_has_learned_everything_gets_a_notice() -> None:
    flat, reward = [0.2] * 12 + [0.95] * 10, [0.3] * 12 + [0.97] * 10
    finding = only(facts({"frac_reward_zero_std": flat, "reward": reward}))
    assert (finding.code, finding.level, finding.since_step) == ("no_signal_easy", "notice", 13)


def test_equal_rewards_that_are_neither_right_nor_wrong_are_told_apart() -> None:
    metrics = {"frac_reward_zero_std": FLAT, "reward": [0.5] * 6}
    finding = only(facts(metrics))
    assert finding.code == "no_signal_equal"
    assert finding.cause == "the rewards give different completions the same number"
    same = batch([["yes", "yes"], ["no", "no"]])
    finding = only(facts(metrics, newest=same))
    assert finding.cause == "in 100% of the groups all completions are the same text"
    assert "sampling.temperature" in finding.remedy
    alone = job_with(sampling={"group_size": 1})
    assert "sampling.group_size is 1" in only(facts(metrics, alone)).cause


@pytest.mark.parametrize("signal", [[1.0] * 4, [0.85] * 20, [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]])
def test_few_steps_or_some_groups_with_signal_are_no_finding(signal: list[float]) -> None:
    found = codes(facts({"frac_reward_zero_std": signal, "reward": [0.0] * len(signal)}))
    assert found == (["too_few_steps"] if len(signal) == 4 else [])


def test_three_steps_without_an_update_are_no_all_clear() -> None:
    flat = {"frac_reward_zero_std": [1.0] * 3, "reward": [0.0] * 3, "num_examples": [0.0] * 3}
    few, none = sorted(diagnose(facts(flat)), key=lambda each: each.level)
    assert (none.code, none.level, none.since_step) == ("no_update", "problem", 1)
    assert none.title == "no weight has changed in 3 step(s): no group had a signal"
    assert (few.code, few.title) == ("too_few_steps", "3 step(s) are too few to judge the run")
    one_update = flat | {"num_examples": [0.0, 8.0, 0.0]}
    assert codes(facts(one_update)) == ["too_few_steps"]
    two = {name: values[:2] for name, values in flat.items()}
    assert codes(facts(two)) == ["too_few_steps"], "two flat steps are chance"
    assert codes(facts(two, job_with(steps=2)))[0] == "no_update", "it was the whole job"
    many = {name: values * 3 for name, values in flat.items()}
    assert codes(facts(many)) == ["no_signal_hard"], "one finding says it"


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"learning_rate": [0.0] * 6}, "the learning rate was 0"),
        ({"canary_change": [0.0] * 6}, "each update was rounded away"),
    ],
)
def test_updates_that_change_no_weight_are_a_finding(
    metrics: dict[str, list[float]], why: str
) -> None:
    trained = {"num_examples": [8.0] * 6} | metrics
    assert only(facts(trained)).title == f"no weight has changed in 6 step(s): {why}"
    assert "training.learning_rate" in only(facts(trained)).remedy
    moved = {name: [*values[:5], 0.1] for name, values in metrics.items()}
    assert not codes(facts(trained | moved))


def test_a_run_that_only_its_own_reward_code_judges_names_another_grader() -> None:
    own = {"file": "r.py", "source": "def reward(completions): return [1.0]", "name": "mine"}
    rises = {"reward": [0.2, 0.3, 0.4, 0.5, 0.9, 0.9]}
    finding = only(facts(rises, job_with(rewards=[own])))
    assert (finding.code, finding.level) == ("own_reward", "notice")
    assert "'mine'" in finding.title
    assert "hone eval MODEL JOB --job JOB --grader math" in finding.remedy
    assert not codes(facts(rises, job_with(rewards=[own, {"grader": "math"}])))


def test_one_of_two_rewards_that_never_varies_is_a_finding() -> None:
    job = job_with(rewards=[{"grader": "right"}, {"grader": "form"}])
    constant = {"rewards/form/mean": [0.0] * 5, "rewards/form/std": [0.0] * 5}
    varies = {"rewards/right/mean": [0.1, 0.2] * 3, "rewards/right/std": [0.3] * 6}
    finding = only(facts({**constant, **varies}, job))
    assert (finding.code, finding.level) == ("reward_constant", "warning")
    assert finding.title == "reward 'form' has given every completion 0 in all 5 steps"
    has_all = {"rewards/form/mean": [1.0] * 5, "rewards/form/std": [0.0] * 5}
    assert only(facts({**has_all, **varies}, job)).level == "notice"
    learned = {"rewards/form/mean": [0.9, *[1.0] * 5], "rewards/form/std": [0.1, *[0.0] * 5]}
    assert not codes(facts({**learned, **varies}, job)), "it varied once"


def test_missing_rewards_are_told_with_their_reasons() -> None:
    one = batch([["a", "b", "c"]])
    failed = Part(value=None, verdict="error", detail="no key for the judge")
    scores = (Score(value=None, parts={"judge": failed}),) * 2
    one = one.model_copy(update={"scores": ((*scores, one.scores[0][0]),)})
    finding = only(facts({"missing_rewards": [0.0, 0.05, 0.05, 0.05]}, newest=one))
    assert (finding.code, finding.level, finding.since_step) == ("missing_rewards", "warning", 2)
    assert finding.evidence[1].text == "2 x judge: no key for the judge"
    assert only(facts({"missing_rewards": [0.2]})).level == "problem"
    assert not codes(facts({"missing_rewards": [0.3, 0.0, 0.0, 0.0, 0.0]})), "it is over"


def test_rollouts_that_went_wrong_are_told_with_their_reasons() -> None:
    one = batch([["a", "b"]])
    late = rollout(finish_reason="timeout", error="not done after 600 s")
    group = one.groups[0].model_copy(update={"rollouts": (late, late)})
    one = one.model_copy(update={"groups": (group,)})
    shares = {"errored_rollouts": [0.1] * 3, "timed_out_rollouts": [0.1] * 3}
    finding = only(facts(shares, newest=one))
    assert finding.code == "errored_rollouts" and "HONE_GENERATE_DEADLINE_S" in finding.cause
    assert finding.evidence[2].text == "2 x not done after 600 s"
    others = only(facts({**shares, "timed_out_rollouts": [0.0] * 3}))
    assert "HONE_GENERATE_DEADLINE_S" not in others.remedy


def test_environments_that_die_are_a_finding() -> None:
    assert only(facts({"environment_failures": [0.02] * 5})).code == "environment_failures"
    assert not codes(facts({"environment_failures": [0.0] * 5}))


def test_completions_that_are_cut_off_are_a_finding_by_their_share() -> None:
    metrics = {"completions/clipped_ratio": [0.1, 0.1, *[0.3] * 8]}
    metrics["completions/mean_length"] = [300.0] * 10
    finding = only(facts(metrics))
    assert (finding.code, finding.level, finding.since_step) == ("truncation", "warning", 3)
    assert finding.title.startswith("26% of the completions of steps 1 to 10 were cut off at 512")
    metrics["completions/clipped_ratio"] = [0.6] * 10
    assert only(facts(metrics)).level == "problem"
    masked = only(facts(metrics, job_with(advantages={"mask_truncated": True})))
    assert "they are left out of training" in masked.cause
    metrics["completions/clipped_ratio"] = [0.15] * 10
    assert not codes(facts(metrics))


def test_prompts_that_are_too_long_are_a_finding() -> None:
    assert only(facts({"overlong_prompts": [0.2] * 3})).code == "overlong_prompts"
    assert not codes(facts({"overlong_prompts": [0.05] * 3}))


def test_truncation_that_is_over_is_no_finding() -> None:
    """The median of all six steps is 0.4, and of the last three 0."""
    over = {"completions/clipped_ratio": [0.8, 0.8, 0.8, 0.0, 0.0, 0.0], "reward": [0.5] * 6}
    assert not codes(facts(over))
    odd = {"completions/clipped_ratio": [0.8, 0.8, 0.8, 0.8, 0.0, 0.8], "reward": [0.5] * 6}
    assert codes(facts(odd)) == ["truncation"], "one odd step does not end it"


def test_58_of_60_groups_are_not_all_of_them() -> None:
    """Six groups in each of ten steps; the median step has no signal at all."""
    flat = [4 / 6, *[1.0] * 9]
    title = only(facts({"frac_reward_zero_std": flat, "reward": [0.0] * 10})).title
    assert title.startswith("97% of the groups of steps 1 to 10 teach nothing")
    assert (percent(0.999), percent(1.0), percent(0.99)) == ("over 99%", "100%", "99%")
