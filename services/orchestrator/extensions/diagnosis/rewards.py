"""Whether there is anything to learn from: groups whose rewards differ, rewards that vary and do
not pull against each other."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from services.orchestrator.extensions.diagnosis.facts import FEWEST, Facts, percent, steps_of
from services.orchestrator.extensions.diagnosis.reward_hacking import reward_hacks
from services.orchestrator.extensions.diagnosis.suspects import reward_fell
from shared.job import RewardSpec
from shared.wire import Batch, Evidence, Finding, Score

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

SIGNAL = "frac_reward_zero_std"


def no_signal(facts: Facts) -> Iterator[Finding]:
    """All completions of a prompt earn the same, so nothing is learned: too hard, too easy, or
    equal for another reason."""
    flat = facts.of(SIGNAL)
    if facts.job.teacher or facts.job.is_pushed or len(flat) < FEWEST or flat.last().median < FLAT:
        return
    reward, mark = facts.of("reward").last(), facts.full_mark
    same = _share_of_one_text(facts.newest)
    since = flat.since(lambda share: share >= FLAT)
    evidence = (flat.evidence(), reward.evidence())
    told = f"{percent(flat.last().median)} of the groups of {steps_of(flat.last())}"
    if facts.job.sampling.group_size == 1 or same >= SAME_ANSWERS:
        yield _equal(facts, told, since, evidence, same)
    elif reward.median >= (1 - NEAR) * mark:
        title = f"{told} teach nothing: the reward is {reward.median:.3g} of {mark:g} throughout"
        yield _easy(facts, title, since, evidence)
    elif reward.median <= NEAR * mark:
        yield _hard(facts, told, since, evidence)
    else:
        yield _equal(facts, told, since, evidence, same)


def _easy(facts: Facts, title: str, since: int | None, evidence: tuple[Evidence, ...]) -> Finding:
    """The finding where nearly all completions earn everything: from the beginning, or by now; or
    the reward is earned without the answer."""
    had = facts.of(SIGNAL).first().median < FLAT
    why = "the problems are too easy for the model"
    how = (
        "stop here (stop.target), or take harder problems: difficulty.skip_right skips problems "
        "that are always solved"
    )
    keys: tuple[str, ...] = ("stop.target", "difficulty.skip_right")
    hacks = sorted({finding.code for finding in reward_hacks(facts)})
    if hacks:
        why = f"the reward is earned without the right answer: see {', '.join(hacks)}"
        how, keys = "let the reward refuse such completions, and train again", ("rewards",)
    elif had:
        why = "the model has learned what these problems can teach"
    return Finding(
        code="no_signal_easy",
        level="notice" if had and not hacks else "problem",
        title=title,
        since_step=since,
        evidence=evidence,
        cause=why,
        remedy=how,
        keys=keys,
    )


def _hard(facts: Facts, told: str, since: int | None, evidence: tuple[Evidence, ...]) -> Finding:
    """The finding where hardly any completion earns a reward: from the beginning, or by now."""
    if any(reward_fell(facts)):
        why = "the policy has lost what it could do, as its reward shows"
        how = "continue from the best checkpoint with a lower training.learning_rate"
        keys: tuple[str, ...] = ("training.learning_rate",)
    else:
        why = (
            "the problems are too hard for the model, or the reward never finds what it looks for: "
            "`hone rollouts` shows answers beside their rewards"
        )
        how = (
            "check the reward by `hone grade`, then take easier problems, more completions of each "
            "(sampling.group_size), longer ones (sampling.max_tokens), or skip what is always "
            "wrong (difficulty.skip_wrong)"
        )
        keys = ("sampling.group_size", "sampling.max_tokens", "difficulty.skip_wrong")
    return Finding(
        code="no_signal_hard",
        level="problem",
        title=f"{told} teach nothing: hardly any completion earns a reward",
        since_step=since,
        evidence=evidence,
        cause=why,
        remedy=how,
        keys=keys,
    )


def _equal(
    facts: Facts, told: str, since: int | None, evidence: tuple[Evidence, ...], same: float
) -> Finding:
    """The finding where rewards are equal, and neither all right nor all wrong."""
    sampling = facts.job.sampling
    if sampling.group_size == 1:
        why = "sampling.group_size is 1, so no completion is compared with another"
        how, keys = "set sampling.group_size to 8 or more", ("sampling.group_size",)
    elif same >= SAME_ANSWERS:
        why = f"in {percent(same)} of the groups all completions are the same text"
        how = "raise sampling.temperature; widen sampling.top_p, top_k and min_p, if they are set"
        keys = ("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p")
    else:
        why = "the rewards give different completions the same number"
        how, keys = "let the rewards tell better from worse answers: try `hone grade`", ("rewards",)
    return Finding(
        code="no_signal_equal",
        level="problem",
        title=f"{told} teach nothing: all completions of a prompt earn the same",
        since_step=since,
        evidence=evidence,
        cause=why,
        remedy=how,
        keys=keys,
    )


def _share_of_one_text(batch: Batch | None) -> float:
    """Returns the share of groups whose completions are all one text; 0 if it is not known."""
    groups = [group for group in batch.groups if len(group.rollouts) > 1] if batch else []
    texts = [{rollout.text for rollout in group.rollouts} for group in groups]
    return statistics.fmean(len(each) == 1 for each in texts) if texts else 0.0


def reward_constant(facts: Facts) -> Iterator[Finding]:
    """One of several rewards has never varied."""
    if len(facts.job.rewards) < 2:
        return  # then no group has signal, which is said by `no_signal`
    for reward in facts.job.rewards:
        mean, std = (facts.of(f"rewards/{reward.label}/{each}") for each in ("mean", "std"))
        if len(std) < FEWEST or max(std.values) > 0 or max(mean.values) > min(mean.values):
            continue
        value, has_all = mean.values[-1], mean.values[-1] >= 1
        yield Finding(
            code="reward_constant",
            level="notice" if has_all else "warning",
            title=f"reward {reward.label!r} has given every completion {value:g} in all "
            f"{len(mean)} steps",
            since_step=mean.steps[0],
            evidence=(mean.evidence(), std.evidence()),
            cause="every completion has what it rewards already"
            if has_all
            else "it finds in no completion what it looks for, or looks at the wrong column",
            remedy=f"try it on a completion that should differ (`hone grade`), or leave reward "
            f"{reward.label!r} out",
            keys=("rewards",),
        )


def rewards_contradict(facts: Facts) -> Iterator[Finding]:
    """Two rewards pull against each other within the groups of the newest batch."""
    batch = facts.newest
    weighed = [reward for reward in facts.job.rewards if reward.weight]
    for one, other in itertools.combinations(weighed, 2) if batch else ():
        assert batch is not None
        pairs = _within_groups(batch.scores, one, other)
        found = correlation(pairs)
        if len(pairs) < FEWEST_PAIRS or found is None or found > CONTRADICTS:
            continue
        yield Finding(
            code="rewards_contradict",
            level="warning",
            title=f"rewards {one.label!r} and {other.label!r} pull against each other: among the "
            f"completions of a prompt their correlation is {found:.2f}",
            since_step=batch.step,
            evidence=(
                Evidence(
                    metric="rollouts",
                    steps=(batch.step,),
                    values=(round(found, 4),),
                    text=f"correlation of what both add to the reward, over {len(pairs)} "
                    "completions, each less its group's mean",
                ),
            ),
            cause="what one of them rewards costs the other one, so their sum moves little",
            remedy="lower the weight of one, or set its `shaping` so that it decides no group",
            keys=("rewards.weight", "rewards.shaping"),
        )


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
    if len(pairs) < 2:
        return None
    ones, others = zip(*pairs, strict=True)
    try:
        return statistics.correlation(ones, others)
    except statistics.StatisticsError:
        return None
