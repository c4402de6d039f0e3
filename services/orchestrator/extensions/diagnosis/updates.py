"""What the updates do to the policy, and whether the sampler has the same one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    WINDOW,
    Facts,
    Series,
    percent,
    steps_of,
)
from services.orchestrator.grpo.metrics import CANARY_CHANGE
from shared.wire import Evidence, Finding

COLLAPSED = 0.1
"""Share of its first entropy below which a policy samples nearly the same each time."""

UNLEARNED = 0.9
"""Share of the full mark below which there was more to learn: a policy that earns more has every
reason to be sure."""

SPIKE = 10.0
"""How many times the median of the steps before a spike is: single steps of a healthy run are up
to three or four times that."""

RECENT = 2 * WINDOW
"""Steps for which a spike is told of: an old one has done what it did."""

SPIKE_NATS = 0.01
"""Divergence below which ten times as much is still nothing."""

LOGPROB_WARNING = 0.05
"""In nats, mean over the tokens that were sampled by the trained weights themselves. If sampler and
trainer differ by more, they are not the same policy."""

EFFECTIVE = 0.5
"""Share of the tokens that weigh: below it, half of what was sampled is lost to the correction."""

CLIPPED = 0.3
"""Share of tokens held by the ratio's bounds, from which on passes over a batch mostly repeat what
is not allowed to move."""

FAR_NATS = 0.1
"""KL divergence between the policy before and after a step's updates. PPO's target is 0.01 to
0.02."""

MOVED_NATS = 0.5
"""Change of the canary's log-probs by one step, from which on it is another policy: a probability
changes by a factor of 1.6 on average."""

LEAP_NATS = 2.0
"""The same of a single step that is enough: a probability changes by a factor of 7."""

STILL_NATS = 1e-4
"""Change of the canary's log-probs by one step, below which a hundred steps change a probability by
1 %."""


def entropy_collapse(facts: Facts) -> Iterator[Finding]:
    """Nearly no randomness is left although there is more to learn: nothing new is tried."""
    entropy, reward = facts.of("entropy"), facts.of("reward")
    if len(entropy) < 2 * WINDOW or not reward:
        return
    first, last = entropy.first().median, entropy.last().median
    if not last < COLLAPSED * first or reward.last().median >= UNLEARNED * facts.full_mark:
        return
    yield Finding(
        code="entropy_collapse",
        level="warning",
        title=f"the policy's entropy fell from {first:.3g} to {last:.3g} nats per token, and the "
        f"reward is {reward.last().median:.3g} of {facts.full_mark:g}",
        since_step=entropy.since(lambda value: value < COLLAPSED * first),
        evidence=(entropy.evidence(), reward.evidence()),
        cause="likely tokens were made likelier until completions of a prompt hardly differ",
        remedy="raise training.clip_high, set training.beta to 0.001 or more, or lower "
        "training.learning_rate; a higher sampling.temperature samples more widely",
        keys=(
            "training.clip_high",
            "training.beta",
            "training.learning_rate",
            "sampling.temperature",
        ),
    )


def spikes(facts: Facts) -> Iterator[Finding]:
    """A step's divergence or gradient is far from what was usual before it."""
    for metric in ("kl", "kl/old_k3"):
        yield from _spike(facts, metric, SPIKE_NATS)
    yield from _spike(facts, "grad_norm", facts.job.training.max_grad_norm)


def _spike(facts: Facts, metric: str, least: float) -> Iterator[Finding]:
    series = facts.of(metric)
    found = [
        (step, value)
        for at, (step, value) in enumerate(series)
        if at >= max(len(series) - RECENT, FEWEST)
        and value > max(SPIKE * statistics.median(series.values[max(at - WINDOW, 0) : at]), least)
    ]
    if not found:
        return
    is_kl, (step, value) = metric.startswith("kl"), max(found, key=lambda one: one[1])
    before = series.up_to(step - 1).last()
    yield Finding(
        code="kl_spike" if is_kl else "gradient_spike",
        level="warning",
        title=f"{metric} was {value:.3g} at step {step}, and {before.median:.3g} in "
        f"{steps_of(before)}",
        since_step=found[0][0],
        evidence=(Evidence(metric=metric, steps=(step,), values=(value,)), before.evidence()),
        cause="an update moved the policy by a leap"
        if is_kl
        else "a batch with few or odd examples pulled hard, or the policy nears instability",
        remedy="lower training.learning_rate"
        if is_kl
        else f"look at that step (`hone rollouts JOB --step {step}`); if it recurs, lower "
        "training.max_grad_norm or training.learning_rate",
        keys=("training.learning_rate",)
        if is_kl
        else ("training.max_grad_norm", "training.learning_rate"),
    )


def updates(facts: Facts) -> Iterator[Finding]:
    """Updates change the policy too much, or next to nothing: the learning rate."""
    told = {
        "clip_ratio/region_mean": (CLIPPED, "of the tokens are held by the ratio's bounds"),
        "kl/old_k3": (FAR_NATS, "nats of KL divergence between the policy before and after"),
        CANARY_CHANGE: (MOVED_NATS, "nats by which log-probs of a fixed text change"),
    }
    moved = facts.of(CANARY_CHANGE)
    leaps = Series(CANARY_CHANGE, *_columns([one for one in moved if one[1] >= LEAP_NATS]))
    if leaps:
        yield _too_large(facts, leaps, LEAP_NATS, told[CANARY_CHANGE][1])
        return
    for metric, (most, what) in told.items():
        series = _with_updates(facts.of(metric))
        if len(series) >= FEWEST and series.last().median >= most:
            yield _too_large(facts, series, most, what)
            return
    yield from _too_small(facts)


def _with_updates(series: Series) -> Series:
    """Returns the values of steps that had something to learn: the others change nothing."""
    return Series(series.metric, *_columns([one for one in series if one[1]]))


def _columns(pairs: list[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(step for step, _ in pairs), tuple(value for _, value in pairs)


def _too_large(facts: Facts, series: Series, most: float, what: str) -> Finding:
    last, training = series.last(), facts.job.training
    several = training.epochs * training.minibatches > 1
    return Finding(
        code="updates_too_large",
        level="problem",
        title=f"a step changes the policy too much: {last.median:.3g} {what}, in {steps_of(last)}",
        since_step=series.since(lambda value: value >= most),
        evidence=(series.evidence(), facts.of("grad_norm").evidence()),
        cause=f"training.learning_rate ({facts.job.learning_rate:g}) is too high for this model"
        + (", or there are too many passes over a batch" if several else ""),
        remedy="lower training.learning_rate to a third or a tenth; training.warmup_steps helps "
        "if only the first steps are so"
        + ("; fewer training.epochs or training.minibatches" if several else ""),
        keys=("training.learning_rate", "training.warmup_steps")
        + (("training.epochs", "training.minibatches") if several else ()),
    )


def _too_small(facts: Facts) -> Iterator[Finding]:
    moved, reward = _with_updates(facts.of(CANARY_CHANGE)), facts.of("reward")
    flat = facts.of("frac_reward_zero_std").last().median
    if len(reward) < 2 * WINDOW or not moved or moved.last().median >= STILL_NATS or flat >= 1:
        return
    first, last = reward.first(), reward.last()
    if facts.learned or last.median > first.median + max(first.noise, last.noise):
        return
    yield Finding(
        code="updates_too_small",
        level="warning",
        title=f"steps hardly change the policy: log-probs of a fixed text by "
        f"{moved.last().median:.1g} nats each, and the reward stays at {last.median:.3g}",
        since_step=moved.since(lambda value: value < STILL_NATS),
        evidence=(moved.evidence(), reward.evidence()),
        cause=f"training.learning_rate ({facts.job.learning_rate:g}) is too low for this model"
        + (", or its schedule has come to its end" if _has_decayed(facts) else ""),
        remedy="raise training.learning_rate three to ten times",
        keys=("training.learning_rate", "training.schedule"),
    )


def _has_decayed(facts: Facts) -> bool:
    rate = facts.of("learning_rate")
    return bool(rate) and rate.values[-1] < max(rate.values) / 2


def steps_skipped(facts: Facts) -> Iterator[Finding]:
    """Updates were refused as loss or gradient were not finite."""
    skipped = facts.of("skipped_steps")
    found = [step for step, value in skipped.last(RECENT) if value]
    if not found:
        return
    yield Finding(
        code="steps_skipped",
        level="warning",
        title=f"{len(found)} of the last {min(len(skipped), RECENT)} steps changed no weight: loss "
        "or gradient were not finite",
        since_step=found[0],
        evidence=(skipped.evidence(), facts.of("grad_norm").evidence()),
        cause="numbers overflow, mostly after updates that were too large",
        remedy='lower training.learning_rate, or train in training.dtype = "float32"',
        keys=("training.learning_rate", "training.dtype"),
    )


def mismatch(facts: Facts) -> Iterator[Finding]:
    """Sampler and trainer give the same tokens different log-probs."""
    current = facts.of("mismatch/current/logprob_diff_mean")
    series = current or facts.of("mismatch/logprob_diff_mean")
    if facts.job.is_pushed or not series or series.last(FEWEST).median <= LOGPROB_WARNING:
        return
    yield Finding(
        code="mismatch",
        level="problem",
        title=f"the sampler's and the trainer's log-probs of the same tokens differ by "
        f"{series.last(FEWEST).median:.3f} nats on average (expected under {LOGPROB_WARNING})",
        since_step=series.since(lambda value: value > LOGPROB_WARNING),
        evidence=(series.evidence(), *_canaries(facts)),
        cause=_why_they_differ(facts),
        remedy="`hone doctor JOB --experiments` tells causes apart; correction.method weighs "
        "tokens by the difference meanwhile",
        keys=("correction.method", "training.dtype"),
    )


def _canaries(facts: Facts) -> list[Evidence]:
    """Returns by how much the samplers' log-probs of the canary differ, by version."""
    found = [
        (sync["version"], max(differences))
        for sync in facts.syncs[-WINDOW:]
        if (differences := [d for each in sync["samplers"] if (d := each["canary_difference"])])
    ]
    if not found:
        return []
    steps, values = zip(*found, strict=True)
    text = "difference of a sampler's log-probs of the canary, which are proven at each sync"
    return [Evidence(metric="canary_difference", steps=steps, values=values, text=text)]


def _why_they_differ(facts: Facts) -> str:
    sampling, spec = facts.job.sampling, facts.job.correction
    narrowed = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if narrowed and spec.truncated_sampling == "accept":
        return (
            "the sampler draws from a part of the vocabulary (sampling.top_p, top_k, min_p), and "
            'correction.truncated_sampling = "accept" compares it with the whole'
        )
    canaries = _canaries(facts)
    if canaries and canaries[0].values[-1] <= LOGPROB_WARNING:
        return (
            "the weights are right, as the canary agrees: the difference is in how completions are "
            "sampled or read (cache, kernels, dtype at long sequences)"
        )
    return "sampler and trainer compute in another dtype, or not with the same weights"


def off_policy(facts: Facts) -> Iterator[Finding]:
    """Samples are so old that the correction leaves few of them."""
    series = facts.of("mismatch/effective_sample_size")
    if not facts.job.max_staleness or len(series) < FEWEST or series.last().median >= EFFECTIVE:
        return
    age = facts.of("staleness/mean")
    yield Finding(
        code="off_policy",
        level="warning",
        title=f"only {percent(series.last().median)} of the sampled tokens weigh: the policy has "
        "moved too far from the weights that sampled them",
        since_step=series.since(lambda value: value < EFFECTIVE),
        evidence=(series.evidence(), *([age.evidence()] if age else [])),
        cause=f"max_staleness is {facts.job.max_staleness}, and updates move the policy much",
        remedy="lower max_staleness or training.learning_rate",
        keys=("max_staleness", "training.learning_rate"),
    )
