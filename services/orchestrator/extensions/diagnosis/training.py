"""What training does to the policy: updates that change it too much or too little, a sampler that
does not have the same one, and rewards that go up for the wrong reason, or down. Lengths and texts
that change while held-out problems are solved better are taken for learning."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    WINDOW,
    HeldOut,
    RunSnapshot,
    Series,
    finding,
    percent,
    steps_of,
)
from services.orchestrator.grpo.metrics import CANARY_CHANGE
from shared.wire import Batch, Evidence, Finding

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

LOST = 0.25
"""Share of its best that the reward must lose: less is what other prompts of a step make of it."""

NOISES = 4.0
"""How many times a step's usual distance from the median that loss must be besides, or how many
standard errors of a step, if all completions of a prompt were alike."""

SHRUNK = 0.25
"""Share of their first length that completions must have left: shorter reasoning halves them, a
trick leaves hardly anything."""

FEWEST_TOKENS = 16
"""Tokens below which lengths say nothing of how a completion was made."""

AT_LIMIT, FAR_FROM_LIMIT = 0.8, 0.5
"""Shares of sampling.max_tokens: a mean length above the first has many completions cut off, and
one that began below the second has grown there."""

PHRASE_WORDS = 5
"""Words of a phrase: fewer are in many texts by chance."""

FEWEST_WORDS = 3
"""Words below which a whole completion is an answer, as "yes" is to many problems."""

OFTEN, SELDOM = 0.5, 0.1
"""Shares of completions with a phrase, in the newest and in the oldest stored batch, from which on
it has spread. What was in all completions from the beginning is their format."""

READ_CHARS = 4000
"""Characters of a completion that are looked at, half from each end."""

SHOWN_CHARS = 120


def entropy_collapse(facts: RunSnapshot) -> Iterator[Finding]:
    """Nearly no randomness is left although there is more to learn: nothing new is tried."""
    entropy, reward, mark = facts.of("entropy"), facts.of("reward"), facts.full_mark
    first, last = entropy.first().median, entropy.last().median
    if len(entropy) < 2 * WINDOW or not reward or not last < COLLAPSED * first:
        return
    if reward.last().median < UNLEARNED * mark:
        yield finding(
            code="entropy_collapse",
            level="warning",
            since_step=entropy.since(lambda value: value < COLLAPSED * first),
            evidence=[entropy, reward],
            title=f"the policy's entropy fell from {first:.3g} to {last:.3g} nats per token, and "
            f"the reward is {reward.last().median:.3g} of {mark:g}",
            cause="likely tokens were made likelier until completions of a prompt hardly differ",
            remedy="raise training.clip_high, set training.beta to 0.001 or more, or lower "
            "training.learning_rate; a higher sampling.temperature samples more widely",
            keys="training.clip_high training.beta training.learning_rate sampling.temperature",
        )


def spikes(facts: RunSnapshot) -> Iterator[Finding]:
    """A step's divergence or gradient is far from what was usual before it."""
    for metric in ("kl", "kl/old_k3"):
        yield from _spike(facts, metric, SPIKE_NATS)
    yield from _spike(facts, "grad_norm", facts.job.training.max_grad_norm)


def _spike(facts: RunSnapshot, metric: str, least: float) -> Iterator[Finding]:
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
    yield finding(
        code="kl_spike" if is_kl else "gradient_spike",
        level="warning",
        since_step=found[0][0],
        evidence=[Evidence(metric=metric, steps=(step,), values=(value,)), before],
        title=f"{metric} was {value:.3g} at step {step}, and {before.median:.3g} in "
        f"{steps_of(before)}",
        cause="an update moved the policy by a leap"
        if is_kl
        else "a batch with few or odd examples pulled hard, or the policy nears instability",
        remedy="lower training.learning_rate"
        if is_kl
        else f"look at that step (`hone rollouts JOB --step {step}`); if it recurs, lower "
        "training.max_grad_norm or training.learning_rate",
        keys="training.learning_rate" if is_kl else "training.max_grad_norm training.learning_rate",
    )


def updates(facts: RunSnapshot) -> Iterator[Finding]:
    """Updates change the policy too much, or next to nothing: the learning rate."""
    moved = "nats by which log-probs of a fixed text change"
    leaps = facts.of(CANARY_CHANGE).kept(lambda _, value: value >= LEAP_NATS)
    if leaps:
        yield _too_large(facts, leaps, LEAP_NATS, moved)
        return
    for metric, most, what in (
        ("clip_ratio/region_mean", CLIPPED, "of the tokens are held by the ratio's bounds"),
        ("kl/old_k3", FAR_NATS, "nats of KL divergence between the policy before and after"),
        (CANARY_CHANGE, MOVED_NATS, moved),
    ):
        series = _with_updates(facts, metric)
        if len(series) >= FEWEST and series.last().median >= most:
            yield _too_large(facts, series, most, what)
            return
    yield from _too_small(facts)


def _with_updates(facts: RunSnapshot, metric: str) -> Series:
    """Returns the values of steps that had something to learn: the others change nothing."""
    return facts.of(metric).kept(lambda _, value: bool(value))


def _too_large(facts: RunSnapshot, series: Series, most: float, what: str) -> Finding:
    last, training = series.last(), facts.job.training
    several = training.epochs * training.minibatches > 1
    return finding(
        code="updates_too_large",
        level="problem",
        since_step=series.since(lambda value: value >= most),
        evidence=[series, facts.of("grad_norm")],
        title=f"a step changes the policy too much: {last.median:.3g} {what}, in {steps_of(last)}",
        cause=f"training.learning_rate ({facts.job.learning_rate:g}) is too high for this model"
        + (", or there are too many passes over a batch" if several else ""),
        remedy="lower training.learning_rate to a third or a tenth; training.warmup_steps helps "
        "if only the first steps are so"
        + ("; fewer training.epochs or training.minibatches" if several else ""),
        keys="training.learning_rate training.warmup_steps"
        + (" training.epochs training.minibatches" if several else ""),
    )


def _too_small(facts: RunSnapshot) -> Iterator[Finding]:
    moved, reward = _with_updates(facts, CANARY_CHANGE), facts.of("reward")
    flat, now = facts.of("frac_reward_zero_std").last().median, moved.last().median
    if len(reward) < 2 * WINDOW or not moved or now >= STILL_NATS or flat >= 1:
        return
    first, last = reward.first(), reward.last()
    if facts.learned or last.median > first.median + max(first.noise, last.noise):
        return
    rate = facts.of("learning_rate").values
    has_decayed = bool(rate) and rate[-1] < max(rate) / 2
    yield finding(
        code="updates_too_small",
        level="warning",
        since_step=moved.since(lambda value: value < STILL_NATS),
        evidence=[moved, reward],
        title=f"steps hardly change the policy: log-probs of a fixed text by {now:.1g} nats each, "
        f"and the reward stays at {last.median:.3g}",
        cause=f"training.learning_rate ({facts.job.learning_rate:g}) is too low for this model"
        + (", or its schedule has come to its end" if has_decayed else ""),
        remedy="raise training.learning_rate three to ten times",
        keys="training.learning_rate training.schedule",
    )


def steps_skipped(facts: RunSnapshot) -> Iterator[Finding]:
    """Updates were refused as loss or gradient were not finite."""
    skipped = facts.of("skipped_steps")
    if found := [step for step, value in skipped.last(RECENT) if value]:
        yield finding(
            code="steps_skipped",
            level="warning",
            since_step=found[0],
            evidence=[skipped, facts.of("grad_norm")],
            title=f"{len(found)} of the last {min(len(skipped), RECENT)} steps changed no weight: "
            "loss or gradient were not finite",
            cause="numbers overflow, mostly after updates that were too large",
            remedy='lower training.learning_rate, or train in training.dtype = "float32"',
            keys="training.learning_rate training.dtype",
        )


def mismatch(facts: RunSnapshot) -> Iterator[Finding]:
    """Sampler and trainer give the same tokens different log-probs."""
    current = facts.of("mismatch/current/logprob_diff_mean")
    series = current or facts.of("mismatch/logprob_diff_mean")
    difference = series.last(FEWEST).median
    if facts.job.is_pushed or not series or difference <= LOGPROB_WARNING:
        return
    canaries = _canaries(facts)
    yield finding(
        code="mismatch",
        level="problem",
        since_step=series.since(lambda value: value > LOGPROB_WARNING),
        evidence=[series, *canaries],
        title="the sampler's and the trainer's log-probs of the same tokens differ by "
        f"{difference:.3f} nats on average (expected under {LOGPROB_WARNING})",
        cause=_why_they_differ(facts, canaries),
        remedy="`hone doctor JOB --experiments` tells causes apart; correction.method weighs "
        "tokens by the difference meanwhile",
        keys="correction.method training.dtype",
    )


def _canaries(facts: RunSnapshot) -> list[Evidence]:
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


def _why_they_differ(facts: RunSnapshot, canaries: list[Evidence]) -> str:
    sampling, spec = facts.job.sampling, facts.job.correction
    narrowed = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if narrowed and spec.truncated_sampling == "accept":
        return (
            "the sampler draws from a part of the vocabulary (sampling.top_p, top_k, min_p), and "
            'correction.truncated_sampling = "accept" compares it with the whole'
        )
    if canaries and canaries[0].values[-1] <= LOGPROB_WARNING:
        return (
            "the weights are right, as the canary agrees: the difference is in how completions are "
            "sampled or read (cache, kernels, dtype at long sequences)"
        )
    return "sampler and trainer compute in another dtype, or not with the same weights"


def off_policy(facts: RunSnapshot) -> Iterator[Finding]:
    """Samples are so old that the correction leaves few of them."""
    series, age = facts.of("mismatch/effective_sample_size"), facts.of("staleness/mean")
    if not facts.job.max_staleness or len(series) < FEWEST or series.last().median >= EFFECTIVE:
        return
    yield finding(
        code="off_policy",
        level="warning",
        since_step=series.since(lambda value: value < EFFECTIVE),
        evidence=[series, *([age] if age else [])],
        title=f"only {percent(series.last().median)} of the sampled tokens weigh: the policy has "
        "moved too far from the weights that sampled them",
        cause=f"max_staleness is {facts.job.max_staleness}, and updates move the policy much",
        remedy="lower max_staleness or training.learning_rate",
        keys="max_staleness training.learning_rate",
    )


def reward_fell(facts: RunSnapshot) -> Iterator[Finding]:
    """The training reward is far below the best that it was: of ten steps, or of one of the first
    steps, since a single update may ruin a policy."""
    reward, first = facts.of("reward"), facts.of("reward").first()
    if len(reward) <= FEWEST:
        return
    last = reward.last(min(WINDOW, len(reward) - 1))
    for series, size in ((reward, WINDOW), (first, 1)):
        best = max(series.windows(size), key=lambda window: window.median, default=last)
        noise = best.noise if size > 1 else first.noise
        if best.median - last.median > _usual_fall(facts, best, noise):
            yield _fell(reward, best, last)
            return


def _fell(reward: Series, best: Series, last: Series) -> Finding:
    middle = (best.median + last.median) / 2
    return finding(
        code="reward_fell",
        level="problem",
        since_step=reward.since(lambda value: value < middle),
        evidence=[best, reward],
        title=f"the training reward fell from {best.median:.3g} in {steps_of(best)} to "
        f"{last.median:.3g} in {steps_of(last)}",
        cause="the policy was moved too far by some updates, or the problems became harder",
        remedy="continue from the best checkpoint in a new job with a lower "
        "training.learning_rate, or with training.beta to hold the policy near its start",
        keys="training.learning_rate training.beta",
    )


def _usual_fall(facts: RunSnapshot, best: Series, noise: float) -> float:
    """Returns how far the reward may fall from its best without anything being wrong."""
    deviation = facts.of("reward_std").median
    deviation = 0.0 if math.isnan(deviation) else deviation
    of_a_step = deviation / math.sqrt(facts.job.sampling.prompts_per_step)
    scale = max(abs(best.median), deviation)
    return max(LOST * scale, NOISES * max(noise, of_a_step))


def held_out_falls(facts: RunSnapshot) -> Iterator[Finding]:
    """The training reward holds or rises while the held-out reward falls: the mark of a reward that
    is played, or of problems learned by heart."""
    train = facts.of("reward")
    for held_out in facts.held_out():
        rewards = held_out.rewards
        if len(rewards) < 3 or len(train) < FEWEST or any(reward_fell(facts)):
            continue
        best = max(range(len(rewards) - 2), key=lambda at: rewards.values[at])
        before = train.up_to(max(rewards.steps[best], FEWEST)).last()
        both_fall = train.last().median < before.median - before.noise
        if both_fall or not all(_is_below(held_out, at, best, facts) for at in (-2, -1)):
            continue
        name = f"the held-out set {held_out.name!r}" if held_out.name else "held-out problems"
        yield finding(
            code="held_out_falls",
            level="problem",
            since_step=rewards.steps[-2],
            evidence=[rewards, train],
            title=f"the reward on {name} fell from {rewards.values[best]:.3f} at step "
            f"{rewards.steps[best]} to {rewards.values[-1]:.3f}, while the training reward did not",
            cause="the reward is earned in a way that does not solve the problem, or the training "
            "problems are learned by heart",
            remedy="read completions that earn most (`hone rollouts`), and close the way in the "
            "rewards; the best checkpoint is kept (checkpoints.keep_best). With few problems, take "
            "more of them, or training.beta",
            keys="rewards checkpoints.keep_best training.beta",
        )


def _is_below(held_out: HeldOut, at: int, best: int, facts: RunSnapshot) -> bool:
    """Returns whether a reward is below the best one by more than chance."""
    drop = held_out.rewards.values[best] - held_out.rewards.values[at]
    return drop > held_out.margin(best, at, facts.full_mark)


def lengths(facts: RunSnapshot) -> Iterator[Finding]:
    """Completions became very short, or nearly as long as they may be."""
    length, reward = facts.of("completions/mean_length"), facts.of("reward")
    if facts.job.environment or facts.learned or len(length) < 2 * WINDOW:
        return
    first, last, limit = length.first().median, length.last().median, facts.job.sampling.max_tokens
    rises = reward.last().median >= reward.first().median
    told = f"completions went from {first:.0f} to {last:.0f} tokens on average"
    if first >= FEWEST_TOKENS and last <= SHRUNK * first and rises:
        yield finding(
            code="lengths_collapse",
            level="warning",
            since_step=length.since(lambda value: value <= SHRUNK * first),
            evidence=[length, reward],
            title=f"{told}, and earn as much",
            cause="the reward is earned without the work that it is meant for, or by guessing",
            remedy="read the newest completions (`hone rollouts`); evaluate on held-out problems "
            "(data.eval) to see whether they are solved",
            keys="rewards data.eval",
        )
    near, far = AT_LIMIT * limit, FAR_FROM_LIMIT * limit
    if limit >= FEWEST_TOKENS and last >= near and first <= far:
        yield finding(
            code="lengths_at_limit",
            level="warning",
            since_step=length.since(lambda value: value >= near),
            evidence=[length, facts.of("completions/clipped_ratio")],
            title=f"{told}, and sampling.max_tokens is {limit}",
            cause="length is rewarded, by itself or as more tries in one completion; or endings "
            "are never seen, since they are cut off",
            remedy="raise sampling.max_tokens if the reasoning is sound, else let a reward of "
            'length (grader `length`) or training.loss = "dr_grpo" take the gain away',
            keys="sampling.max_tokens rewards training.loss",
        )


def one_text(facts: RunSnapshot) -> Iterator[Finding]:
    """One string has spread through the completions of different prompts."""
    if len(facts.batches) < 2 or facts.learned:
        return
    before, now = _shares(facts.batches[0]), _shares(facts.batches[-1])
    spread = [
        text for text, share in now.items() if share >= OFTEN and before.get(text, 0.0) <= SELDOM
    ]
    if not spread:
        return
    text = max(spread, key=lambda each: (now[each], len(each)))
    steps = facts.batches[0].step, facts.batches[-1].step
    shares = before.get(text, 0.0), now[text]
    shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
    values = round(shares[0], 4), round(shares[1], 4)
    words = Evidence(metric="rollouts", steps=steps, values=values, text=shown)
    reward = facts.of("reward")
    yield finding(
        code="one_text",
        level="warning",
        since_step=steps[1],
        evidence=[words, *([reward] if reward else [])],
        title=f"{percent(shares[1])} of the completions of step {steps[1]} have the same words in "
        f"them, {shown!r}; at step {steps[0]} {percent(shares[0])} had",
        cause="the words earn a reward by themselves, whatever the problem is; or a format is "
        "being learned, which is well",
        remedy="read completions with and without them (`hone rollouts`), and let no reward be "
        "earned by them alone; evaluate on held-out problems (data.eval)",
        keys="rewards data.eval",
    )


def _shares(batch: Batch) -> dict[str, float]:
    """Returns the share of completions with each phrase, of phrases in half of the groups at least
    and in no prompt of these. A text that is shorter than a phrase is one itself."""
    counts_P = [
        Counter(phrase for rollout in group.rollouts for phrase in _phrases(rollout.text))
        for group in batch.groups
    ]
    total, enough = sum(len(group.rollouts) for group in batch.groups), math.ceil(len(counts_P) / 2)
    num_groups = Counter(phrase for counts in counts_P for phrase in counts)
    asked_P = [each.content for each in batch.prompts]
    asked_P = [asked if isinstance(asked, str) else repr(asked) for asked in asked_P]
    found: dict[str, float] = {}
    for phrase, num in num_groups.items():
        if num < enough:  # of nearly all phrases: prompts are long to search
            continue
        pairs = zip(asked_P, counts_P, strict=True)
        own = [
            counts[phrase] for asked, counts in pairs if phrase in counts and phrase not in asked
        ]
        if len(own) >= enough:
            found[phrase] = sum(own) / total
    return found


def _phrases(text: str) -> set[str]:
    if len(text) > READ_CHARS:
        text = f"{text[: READ_CHARS // 2]} {text[-READ_CHARS // 2 :]}"
    words = text.split()
    if len(words) < PHRASE_WORDS:
        return {" ".join(words)} if len(words) >= FEWEST_WORDS else set()
    return {" ".join(words[at : at + PHRASE_WORDS]) for at in range(len(words) - PHRASE_WORDS + 1)}
