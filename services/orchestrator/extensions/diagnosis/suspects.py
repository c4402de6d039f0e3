"""Rewards that go up for the wrong reason, or down. What changes while held-out problems are solved
better is taken for learning, and nothing is said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    WINDOW,
    Facts,
    HeldOut,
    Series,
    percent,
    steps_of,
)
from shared.wire import Batch, Evidence, Finding

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


def reward_fell(facts: Facts) -> Iterator[Finding]:
    """The training reward is far below the best that it was: of ten steps, or of one of the first
    steps, since a single update may ruin a policy."""
    reward, first = facts.of("reward"), facts.of("reward").first()
    if len(reward) <= FEWEST:
        return
    last = reward.last(min(WINDOW, len(reward) - 1))
    for series, size in ((reward, WINDOW), (first, 1)):
        best = max(series.windows(size), key=lambda window: window.median, default=last)
        noise = best.noise if size > 1 else first.noise
        if best.median - last.median > _usual(facts, best, noise):
            yield _fell(reward, best, last)
            return


def _usual(facts: Facts, best: Series, noise: float) -> float:
    """Returns how far the reward may fall from its best without anything being wrong."""
    deviation = facts.of("reward_std").median
    deviation = 0.0 if math.isnan(deviation) else deviation
    of_a_step = deviation / math.sqrt(facts.job.sampling.prompts_per_step)
    scale = max(abs(best.median), deviation)
    return max(LOST * scale, NOISES * max(noise, of_a_step))


def _fell(reward: Series, best: Series, last: Series) -> Finding:
    middle = (best.median + last.median) / 2
    return Finding(
        code="reward_fell",
        level="problem",
        title=f"the training reward fell from {best.median:.3g} in {steps_of(best)} to "
        f"{last.median:.3g} in {steps_of(last)}",
        since_step=reward.since(lambda value: value < middle),
        evidence=(best.evidence(), reward.evidence()),
        cause="the policy was moved too far by some updates, or the problems became harder",
        remedy="continue from the best checkpoint in a new job with a lower "
        "training.learning_rate, or with training.beta to hold the policy near its start",
        keys=("training.learning_rate", "training.beta"),
    )


def held_out_falls(facts: Facts) -> Iterator[Finding]:
    """The training reward holds or rises while the held-out reward falls: the mark of a reward that
    is played, or of problems learned by heart."""
    for held_out in facts.held_out():
        if found := _falls(facts, held_out):
            yield found


def _falls(facts: Facts, held_out: HeldOut) -> Finding | None:
    rewards, train = held_out.rewards, facts.of("reward")
    if len(rewards) < 3 or len(train) < FEWEST or any(reward_fell(facts)):
        return None
    best = max(range(len(rewards) - 2), key=lambda at: rewards.values[at])
    drops = [rewards.values[best] - rewards.values[at] for at in (-2, -1)]
    margins = [held_out.margin(best, at, facts.full_mark) for at in (-2, -1)]
    before = train.up_to(max(rewards.steps[best], FEWEST)).last()
    if any(drop <= margin for drop, margin in zip(drops, margins, strict=True)):
        return None
    if train.last().median < before.median - before.noise:
        return None  # both fall
    name = f"the held-out set {held_out.name!r}" if held_out.name else "held-out problems"
    return Finding(
        code="held_out_falls",
        level="problem",
        title=f"the reward on {name} fell from {rewards.values[best]:.3f} at step "
        f"{rewards.steps[best]} to {rewards.values[-1]:.3f}, while the training reward did not",
        since_step=rewards.steps[-2],
        evidence=(rewards.evidence(), train.evidence()),
        cause="the reward is earned in a way that does not solve the problem, or the training "
        "problems are learned by heart",
        remedy="read completions that earn most (`hone rollouts`), and close the way in the "
        "rewards; the best checkpoint is kept (checkpoints.keep_best). With few problems, take "
        "more of them, or training.beta",
        keys=("rewards", "checkpoints.keep_best", "training.beta"),
    )


def lengths(facts: Facts) -> Iterator[Finding]:
    """Completions became very short, or nearly as long as they may be."""
    length, reward = facts.of("completions/mean_length"), facts.of("reward")
    if facts.job.environment or facts.learned or len(length) < 2 * WINDOW:
        return
    first, last, limit = length.first().median, length.last().median, facts.job.sampling.max_tokens
    rises = reward.last().median >= reward.first().median
    told = f"completions went from {first:.0f} to {last:.0f} tokens on average"
    if first >= FEWEST_TOKENS and last <= SHRUNK * first and rises:
        yield Finding(
            code="lengths_collapse",
            level="warning",
            title=f"{told}, and earn as much",
            since_step=length.since(lambda value: value <= SHRUNK * first),
            evidence=(length.evidence(), reward.evidence()),
            cause="the reward is earned without the work that it is meant for, or by guessing",
            remedy="read the newest completions (`hone rollouts`); evaluate on held-out problems "
            "(data.eval) to see whether they are solved",
            keys=("rewards", "data.eval"),
        )
    near, far = AT_LIMIT * limit, FAR_FROM_LIMIT * limit
    if limit >= FEWEST_TOKENS and last >= near and first <= far:
        yield Finding(
            code="lengths_at_limit",
            level="warning",
            title=f"{told}, and sampling.max_tokens is {limit}",
            since_step=length.since(lambda value: value >= near),
            evidence=(length.evidence(), facts.of("completions/clipped_ratio").evidence()),
            cause="length is rewarded, by itself or as more tries in one completion; or endings "
            "are never seen, since they are cut off",
            remedy="raise sampling.max_tokens if the reasoning is sound, else let a reward of "
            'length (grader `length`) or training.loss = "dr_grpo" take the gain away',
            keys=("sampling.max_tokens", "rewards", "training.loss"),
        )


def one_text(facts: Facts) -> Iterator[Finding]:
    """One string has spread through the completions of different prompts."""
    if len(facts.batches) < 2 or facts.learned:
        return
    before, now = _shares(facts.batches[0]), _shares(facts.batches[-1])
    spread = {text: share for text, share in now.items() if share >= OFTEN}
    spread = {text: share for text, share in spread.items() if before.get(text, 0.0) <= SELDOM}
    if not spread:
        return
    text = max(spread, key=lambda each: (spread[each], len(each)))
    steps = facts.batches[0].step, facts.batches[-1].step
    shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
    reward = facts.of("reward")
    yield Finding(
        code="one_text",
        level="warning",
        title=f"{percent(spread[text])} of the completions of step {steps[1]} have the same words "
        f"in them, {shown!r}; at step {steps[0]} {percent(before.get(text, 0.0))} had",
        since_step=steps[1],
        evidence=(
            Evidence(
                metric="rollouts",
                steps=steps,
                values=(round(before.get(text, 0.0), 4), round(spread[text], 4)),
                text=shown,
            ),
            *([reward.evidence()] if reward else []),
        ),
        cause="the words earn a reward by themselves, whatever the problem is; or a format is "
        "being learned, which is well",
        remedy="read completions with and without them (`hone rollouts`), and let no reward be "
        "earned by them alone; evaluate on held-out problems (data.eval)",
        keys=("rewards", "data.eval"),
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
