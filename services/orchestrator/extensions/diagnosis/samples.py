"""Whether what a run samples can teach: completions that were cut off, went wrong or got no reward;
rewards that differ within groups and do not pull against each other; problems that are used up or
too few to tell."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    WINDOW,
    HeldOut,
    RunSnapshot,
    of_batch,
    percent,
)
from services.orchestrator.extensions.diagnosis.reward_hacking import reward_hacks
from services.orchestrator.extensions.diagnosis.rules import (
    NEWEST,
    Reading,
    Rule,
    at_least,
    finding,
)
from services.orchestrator.extensions.diagnosis.training import reward_fell, steps_skipped
from services.orchestrator.grpo.advantages import outcomes
from services.orchestrator.grpo.held_out import metric_prefix
from services.orchestrator.grpo.metrics import CANARY_CHANGE, PASSES
from shared.job import RewardSpec
from shared.wire import Batch, EvaluationReport, Evidence, Finding, Score

FLAT = 0.9
"""Share of groups without signal from which on a step teaches next to nothing: of ten prompts that
were paid for, one is used."""

NEAR = 0.1
"""Share of the full mark within which a mean reward counts as none, or as full."""

SAME_ANSWERS = 0.9
"""Share of groups with only one text from which on sampling is what makes them equal."""

CONTRADICTS = -0.6
"""Correlation within groups from which on two rewards pull against each other: r squared is 0.36,
so more than a third of what one gives the other one takes."""

FEWEST_PAIRS = 32
"""Completions for a correlation: by chance it is below -0.6 one time in 5,000."""

MISSING, MANY_MISSING = 0.01, 0.1
"""Shares of completions without a reward, for a warning and a problem. A text in a hundred that a
grader cannot read is usual."""

NUM_REASONS, REASON_CHARS = 3, 200

MANY_PASSES = 10.0
"""Passes over the data from which on the same problems are hardly news. Language models gain from
about four (arXiv 2305.16264); with new completions each time some more are useful."""

TOO_WIDE = 0.05
"""Share of the full mark that half a confidence interval has to be, to be called wide: a narrower
one that shows no change says that there is none."""

LATE = 0.5
"""Part of the steps after which a change should show."""


def _share_of_one_text(m: Reading) -> float:
    """Returns the share of groups whose completions are all one text; 0 if it is unknown."""
    groups = m.run.newest.groups if m.run.newest else ()
    texts = [{one.text for one in group.rollouts} for group in groups if len(group.rollouts) > 1]
    return statistics.fmean(len(each) == 1 for each in texts) if texts else 0.0


def _are_same(m: Reading) -> bool:
    return _share_of_one_text(m) >= SAME_ANSWERS


def _hacks(m: Reading) -> str:
    """Returns the codes of the hacks that earn the rewards; "" if none is known."""
    return ", ".join(sorted({found.code for found in reward_hacks(m.run)}))


def _is_easy(m: Reading) -> bool:
    return m.now("reward") >= (1 - NEAR) * m.run.full_mark


def _is_hard(m: Reading) -> bool:
    return m.now("reward") <= NEAR * m.run.full_mark


no_signal = Rule(
    "no_signal_equal",
    "frac_reward_zero_std",
    at_least(FLAT),
    min_steps=FEWEST,
    when=lambda m: not (m.job.teacher or m.job.is_pushed),
    cases={
        "no_signal_equal/single": lambda m: m.job.sampling.group_size == 1,
        "no_signal_equal/same_text": _are_same,
        "no_signal_easy/hacked": lambda m: _is_easy(m) and bool(_hacks(m)),
        "no_signal_easy/learned": lambda m: _is_easy(m) and m.began < FLAT,
        "no_signal_easy": _is_easy,
        "no_signal_hard/fell": lambda m: _is_hard(m) and any(reward_fell(m.run)),
        "no_signal_hard": _is_hard,
    },
    also=["reward"],
    values=lambda m: {
        "reward": m.now("reward"),
        "mark": m.run.full_mark,
        "same": percent(_share_of_one_text(m)),
        "hacks": _hacks(m),
    },
)


def no_update(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that no step of the run has changed a weight, unless another finding says why. The
    first step or two may be without signal by chance."""
    rows = [row for row in run.rows if row.step >= 1]
    reasons = Counter(row.why_unchanged for row in rows)
    canary = run.of(CANARY_CHANGE)
    same = bool(canary) and not any(canary.values)
    if (
        len(rows) < max(min(NEWEST, run.job.steps), 1)
        or (reasons[""] and not same)
        or any(no_signal(run))
        or any(steps_skipped(run))
    ):
        return
    why, _ = reasons.most_common(1)[0]
    evidence = [run.of(each) for each in ("num_examples", "reward", "learning_rate")]
    values = {"num": len(rows), "why": why or "each update was rounded away"}
    name = "no_update/flat" if run.of("num_examples").last().median == 0 else "no_update"
    yield finding(name, rows[0].step, [*evidence, canary], **values)


def reward_constant(run: RunSnapshot) -> Iterator[Finding]:
    """Yields the rewards, of several, that have never varied."""
    if len(run.job.rewards) < 2:
        return  # then no group has signal, which is said by `no_signal`
    for reward in run.job.rewards:
        mean, std = (run.of(f"rewards/{reward.label}/{each}") for each in ("mean", "std"))
        if len(std) < FEWEST or max(std.values) > 0 or max(mean.values) > min(mean.values):
            continue
        yield finding(
            "reward_constant/full" if mean.values[-1] >= 1 else "reward_constant",
            mean.steps[0],
            [mean, std],
            label=reward.label,
            value=mean.values[-1],
            num=len(mean),
        )


def rewards_contradict(run: RunSnapshot) -> Iterator[Finding]:
    """Yields pairs of rewards that pull against each other in the groups of the newest batch."""
    if not (batch := run.newest):
        return
    weighed = [reward for reward in run.job.rewards if reward.weight]
    for one, other in itertools.combinations(weighed, 2):
        pairs = _within_groups(batch.scores, one, other)
        found = correlation(pairs)
        if len(pairs) < FEWEST_PAIRS or found is None or found > CONTRADICTS:
            continue
        text = (
            f"correlation of what both add to the reward, over {len(pairs)} completions, each less "
            "its group's mean"
        )
        values = {"one": one.label, "other": other.label, "correlation": found}
        yield finding("rewards_contradict", batch.step, [of_batch(batch, text, found)], **values)


def _within_groups(
    scores_PG: Sequence[Sequence[Score]], one: RewardSpec, other: RewardSpec
) -> list[tuple[float, float]]:
    """Returns what both rewards add to each completion that has both, less the group's mean."""
    found: list[tuple[float, float]] = []
    for scores_G in scores_PG:
        both = [
            (one.weight * a.value, other.weight * b.value)
            for score in scores_G
            if (a := score.parts.get(one.label)) and (b := score.parts.get(other.label))
            if a.value is not None and b.value is not None
        ]
        if len(both) > 1:
            means = [statistics.fmean(each) for each in zip(*both, strict=True)]
            found += [(a - means[0], b - means[1]) for a, b in both]
    return found


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns Pearson's correlation; None where one side does not vary."""
    try:
        return statistics.correlation(*zip(*pairs, strict=True)) if len(pairs) > 1 else None
    except statistics.StatisticsError:
        return None


def _reasons(reasons_of: Callable[[Batch], Iterable[str]]) -> Callable[[Reading], list[Evidence]]:
    """Returns what gives the commonest reasons in the newest batch, the most frequent first."""

    def reasons(m: Reading) -> list[Evidence]:
        batch = m.run.newest
        counts = Counter(each[:REASON_CHARS] for each in reasons_of(batch)) if batch else None
        if batch is None or not counts:
            return []
        found = [f"{count} x {reason}" for reason, count in counts.most_common(NUM_REASONS)]
        return [of_batch(batch, "; ".join(found))]

    return reasons


def _why_missing(batch: Batch) -> Iterator[str]:
    for score in itertools.chain.from_iterable(batch.scores):
        for label, part in score.parts.items():
            if part.value is None and part.verdict != "skipped":
                yield f"{label}: {part.detail or part.verdict}"


def _why_wrong(batch: Batch) -> Iterator[str]:
    for rollout in itertools.chain.from_iterable(group.rollouts for group in batch.groups):
        if rollout.went_wrong:
            yield rollout.error or rollout.finish_reason


truncation = Rule(
    "truncation",
    "completions/clipped_ratio",
    at_least(0.2),  # a fifth of the gradient says nothing but "shorter"
    problem_from=0.5,
    min_steps=FEWEST,
    cases={"truncation/masked": lambda m: m.job.advantages.mask_truncated},
    also=["completions/mean_length"],
)

overlong_prompts = Rule(
    "overlong_prompts",
    "overlong_prompts",
    at_least(0.1),  # fewer are outliers of the data
)

missing_rewards = Rule(
    "missing_rewards",
    "missing_rewards",
    at_least(MISSING),
    problem_from=MANY_MISSING,
    window=FEWEST,
    also=[_reasons(_why_missing)],
)


def _are_late(m: Reading) -> bool:
    return m.run.of("timed_out_rollouts").last(FEWEST).median >= m.value / 2


errored_rollouts = Rule(
    "errored_rollouts",
    "errored_rollouts",
    at_least(0.05),
    window=FEWEST,
    cases={"errored_rollouts/late": _are_late},
    also=["timed_out_rollouts", _reasons(_why_wrong)],
)

environment_failures = Rule(
    "environment_failures",
    "environment_failures",
    at_least(MISSING),
    window=FEWEST,
    also=[_reasons(_why_wrong)],
)


def _num_problems(m: Reading) -> int:
    passes = m.run.of(PASSES)
    return round(passes.steps[-1] * m.job.sampling.prompts_per_step / passes.values[-1])


data_repeated = Rule(
    "data_repeated",
    PASSES,
    at_least(MANY_PASSES),
    window=1,
    values=lambda m: {"num": _num_problems(m)},
)

data_exhausted = Rule(
    "data_exhausted",
    lambda run: run.of("skipped_problems") if run.of(PASSES) else run.of(PASSES),
    lambda m, value: value >= 0.9 * _num_problems(m),  # then steps take skipped ones again
    window=1,
    values=lambda m: {"num": _num_problems(m)},
)


def evaluation_too_small(run: RunSnapshot) -> Iterator[Finding]:
    """Yields held-out problems that are too few to show what training changed."""
    for held_out in run.held_out():
        last_step = held_out.rewards.steps[-1]
        if len(held_out.rewards) > 1 and run.job.steps and last_step >= LATE * run.job.steps:
            yield from _too_small(run, held_out)
    summary = run.record.summary if run.record else None
    if summary and summary.get("evaluation"):
        yield from _cannot_compare(EvaluationReport.model_validate(summary["evaluation"]))


def _too_small(run: RunSnapshot, held_out: HeldOut) -> Iterator[Finding]:
    rewards, half = held_out.rewards, held_out.half_widths[-1]
    first, last = rewards.values[0], rewards.values[-1]
    margin = held_out.margin(0, -1, run.full_mark)
    if half < TOO_WIDE * run.full_mark or abs(last - first) >= margin:
        return
    upper_end = Evidence(
        metric=f"{rewards.metric}_high",
        steps=rewards.steps[-1:],
        values=(round(last + half, 6),),
        text="upper end of the 95 % confidence interval",
    )
    values = {"of": held_out.title, "first": first, "last": last, "margin": margin}
    yield finding("evaluation_too_small", rewards.steps[-1], [rewards, upper_end], **values)


def _cannot_compare(report: EvaluationReport) -> Iterator[Finding]:
    for of_set, model in ((each, model) for each in report.sets for model in each.models):
        found = model.differences.get("reward")
        if found is None or found.low is None or found.high is None:
            continue
        if (found.high - found.low) / 2 >= TOO_WIDE and found.low < 0 < found.high:
            yield finding(
                "evaluation_too_small/models",
                None,
                [Evidence(metric="eval/reward", text=of_set.source)],
                num=of_set.num_problems,
                model=model.name,
                other=of_set.models[0].name,
                found=found,
            )


def too_few_steps(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that the run has too few steps for most findings, so that none is no all-clear."""
    rewards = run.of("reward")
    if 0 < len(rewards) < FEWEST:
        yield finding(
            "too_few_steps", None, [rewards], num=len(rewards), fewest=FEWEST, compared=2 * WINDOW
        )


def own_reward(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that a run is judged by nothing but the job's own reward code, once it earns."""
    rewards = run.of("reward")
    graders = [reward for reward in outcomes(run.job) if reward.weight > 0]
    is_own = bool(graders) and all(reward.source is not None for reward in graders)
    if is_own and len(rewards) >= FEWEST and rewards.last().median > 0:
        labels = ", ".join(repr(reward.label) for reward in graders)
        yield finding("own_reward", None, [rewards], labels=labels)


def evaluation_ignored(run: RunSnapshot) -> Iterator[Finding]:
    """Yields held-out sets whose last evaluation is ignored: too many completions lack a reward."""
    for name in ("", *run.job.evaluation.sets):
        prefix = metric_prefix(name)
        ignored, evaluated = run.of(f"{prefix}ignored"), run.of(f"{prefix}errored_rollouts")
        if ignored and ignored.steps[-1] == evaluated.steps[-1]:
            yield finding(
                "evaluation_ignored",
                ignored.steps[0],
                [ignored],
                step=ignored.steps[-1],
                share=percent(ignored.values[-1]),
            )
