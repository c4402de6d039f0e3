"""What training does to the policy: updates that change it too much or too little, a sampler with
another policy, and rewards that rise for the wrong reason, or fall. Lengths and texts that change
while held-out problems are solved better are taken for learning."""

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
    of_batch,
    percent,
)
from services.orchestrator.extensions.diagnosis.rules import Reading, Rule, below, finding
from services.orchestrator.grpo.metrics import CANARY_CHANGE
from shared.wire import Batch, Evidence, Finding

RECENT = 2 * WINDOW
"""Steps for which a spike or a skipped step is reported: the effect of an older one has shown."""

SPIKE = 10.0
"""How many times the median of the steps before it a spike is: single steps of a healthy run are up
to three or four times that."""

SPIKE_NATS = 0.01
"""Divergence below which even ten times the usual is harmless."""

LOGPROB_WARNING = 0.05
"""In nats, mean over the tokens that were sampled by the trained weights themselves. If sampler and
trainer differ by more, they are not the same policy."""

LEAP_NATS = 2.0
"""Change of the canary's log-probs by a single step that is enough for a finding: a probability
changes by a factor of 7."""

MOVED = "nats by which log-probs of a fixed text change"

TOO_LARGE = (
    ("clip_ratio/region_mean", 0.3, "of the tokens are held by the ratio's bounds"),
    ("kl/old_k3", 0.1, "nats of KL divergence between the policy before and after"),
    (CANARY_CHANGE, 0.5, MOVED),
)
"""Metrics of how far a step moves the policy, and from which value on it is too far. Beyond 30 % of
clipped tokens, passes over a batch mostly repeat what is not allowed to move; PPO's target of KL is
0.01 to 0.02 nats; by 0.5 nats a probability changes by a factor of 1.6."""

LOST = 0.25
"""Share of its best that the reward must lose: prompts differ from step to step by less."""

NOISES = 4.0
"""How many times a step's usual distance from the median the loss must also be, or how many
standard errors of a step, if all completions of a prompt were alike."""

FEWEST_TOKENS = 16
"""Tokens below which a length does not show how a completion was made."""

PHRASE_WORDS = 5
"""Words of a phrase: fewer are in many texts by chance."""

FEWEST_WORDS = 3
"""Words below which a whole completion is an answer, as "yes" is to many problems."""

OFTEN, SELDOM = 0.5, 0.1
"""Shares of completions with a phrase, in the newest and in the oldest stored batch, from which on
it has spread. A phrase in all completions from the beginning is their format."""

READ_CHARS = 4000
"""Characters of a completion that are read, half from each end."""

SHOWN_CHARS = 120


def steps_skipped(run: RunSnapshot) -> Iterator[Finding]:
    skipped = run.of("skipped_steps")
    recent = skipped.last(RECENT)
    if found := [step for step, value in recent if value]:
        evidence = [skipped, run.of("grad_norm")]
        yield finding("steps_skipped", found[0], evidence, num=len(found), of=len(recent))


def updates(run: RunSnapshot) -> Iterator[Finding]:
    """Yields what the size of updates says of the learning rate: too large or too small. Steps
    without signal change nothing, and are left out."""
    leaps = beyond_rounding(run).kept(lambda _, value: value >= LEAP_NATS)
    several = run.job.training.epochs * run.job.training.minibatches > 1
    name = "updates_too_large/passes" if several else "updates_too_large"
    for metric, most, unit in TOO_LARGE if not leaps else ((CANARY_CHANGE, LEAP_NATS, MOVED),):
        series = leaps or _with_updates(run, metric)
        last = series.last()
        if leaps or (len(series) >= FEWEST and last.median >= most):
            since = series.since(lambda value, most=most: value >= most)
            evidence = [series, run.of("grad_norm")]
            yield finding(name, since, evidence, last=last, unit=unit, job=run.job)
            return
    yield from updates_too_small(run)


def _with_updates(run: RunSnapshot, metric: str) -> Series:
    series = beyond_rounding(run) if metric == CANARY_CHANGE else run.of(metric)
    updated = {step for step, value in run.of(metric) if value}
    return series.kept(lambda step, _: step in updated)


def beyond_rounding(run: RunSnapshot) -> Series:
    """Returns `canary_change` without what rounding makes of it: the root of the difference of the
    squares, since the two are independent. In 16 bits rounding alone moves the canary by a tenth of
    a nat, so that the same update would seem ten times as large as in 32."""
    rounding = _rounding(run)
    series = run.of(CANARY_CHANGE)
    values = [
        math.sqrt(max(value**2 - rounding.get(step, 0.0) ** 2, 0.0)) for step, value in series
    ]
    return Series(CANARY_CHANGE, series.steps, tuple(values))


def _rounding(run: RunSnapshot) -> dict[int, float]:
    """Returns by step how far rounding alone may have moved the canary, where it is known."""
    return {sync["version"]: sync.get("canary_rounding") or 0.0 for sync in run.syncs}


def _is_rounding(m: Reading) -> bool:
    return any(_rounding(m.run).get(step) for step in m.last.steps)


def _stays(m: Reading) -> bool:
    """Whether some groups had signal, and neither the reward nor a held-out reward has risen."""
    reward = m.run.of("reward")
    first, last = reward.first(), reward.last()
    rises = last.median > first.median + max(first.noise, last.noise)
    has_none = m.now("frac_reward_zero_std") >= 1
    return len(reward) >= 2 * WINDOW and not (has_none or rises or m.run.learned)


def _has_decayed(m: Reading) -> bool:
    rates = m.run.of("learning_rate").values
    return bool(rates) and rates[-1] < max(rates) / 2


updates_too_small = Rule(
    "updates_too_small",
    lambda run: _with_updates(run, CANARY_CHANGE),
    below(1e-4),  # nats: a hundred steps change a probability by 1 %
    when=_stays,
    cases={"updates_too_small/rounded": _is_rounding, "updates_too_small/decayed": _has_decayed},
    also=["reward"],
    values=lambda m: {"reward": m.now("reward"), "moved": m.now(CANARY_CHANGE)},
)


def spikes(run: RunSnapshot) -> Iterator[Finding]:
    """Yields the metrics of which a recent step is far from the steps before it."""
    for metric, least, name in (
        ("kl", SPIKE_NATS, "kl_spike"),
        ("kl/old_k3", SPIKE_NATS, "kl_spike"),
        ("grad_norm", run.job.training.max_grad_norm, "gradient_spike"),
    ):
        series = run.of(metric)
        values = series.values
        found = [
            (step, value)
            for at, (step, value) in enumerate(series)
            if at >= max(len(series) - RECENT, FEWEST)
            and value > max(SPIKE * statistics.median(values[max(at - WINDOW, 0) : at]), least)
        ]
        if found:
            step, value = max(found, key=lambda one: one[1])
            before = series.up_to(step - 1).last()
            evidence = [Evidence(metric=metric, steps=(step,), values=(value,)), before]
            said = {"metric": metric, "value": value, "step": step, "before": before}
            yield finding(name, found[0][0], evidence, **said)


entropy_collapse = Rule(
    "entropy_collapse",
    "entropy",
    lambda m, value: value < 0.1 * m.began,  # it samples nearly the same each time
    min_steps=2 * WINDOW,
    when=lambda m: m.now("reward") < 0.9 * m.run.full_mark,  # more has every reason to be sure
    also=["reward"],
    values=lambda m: {"reward": m.now("reward"), "mark": m.run.full_mark},
)


def _canaries(m: Reading) -> list[Evidence]:
    """Returns by how much the samplers' log-probs of the canary differ, by version."""
    found = [
        (sync["version"], max(differences))
        for sync in m.run.syncs[-WINDOW:]
        if (differences := [d for each in sync["samplers"] if (d := each["canary_difference"])])
    ]
    if not found:
        return []
    steps, values = zip(*found, strict=True)
    text = "difference of a sampler's log-probs of the canary, which are proven at each sync"
    return [Evidence(metric="canary_difference", steps=steps, values=values, text=text)]


def _is_narrowed(m: Reading) -> bool:
    sampling = m.job.sampling
    narrowed = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    return narrowed and m.job.correction.truncated_sampling == "accept"


mismatch = Rule(
    "mismatch",
    lambda run: (
        run.of("mismatch/current/logprob_diff_mean") or run.of("mismatch/logprob_diff_mean")
    ),
    lambda _, value: value > LOGPROB_WARNING,
    window=FEWEST,
    when=lambda m: not m.job.is_pushed,
    cases={
        "mismatch/narrowed": _is_narrowed,
        "mismatch/proven": lambda m: any(
            each.values[-1] <= LOGPROB_WARNING for each in _canaries(m)
        ),
    },
    also=[_canaries],
    values=lambda _: {"most": LOGPROB_WARNING},
)

off_policy = Rule(
    "off_policy",
    "mismatch/effective_sample_size",
    below(0.5),  # the correction loses half of the samples
    min_steps=FEWEST,
    when=lambda m: m.job.max_staleness > 0,
    also=["staleness/mean"],
)


def reward_fell(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that the training reward is far below its best: of ten steps, or of one of the first
    steps, since a single update may ruin a policy."""
    reward, first = run.of("reward"), run.of("reward").first()
    if len(reward) <= FEWEST:
        return
    last = reward.last(min(WINDOW, len(reward) - 1))
    for series, size in ((reward, WINDOW), (first, 1)):
        best = max(series.windows(size), key=lambda window: window.median, default=last)
        noise = best.noise if size > 1 else first.noise
        if best.median - last.median > _usual_fall(run, best, noise):
            middle = (best.median + last.median) / 2
            since = reward.since(lambda value, middle=middle: value < middle)
            yield finding("reward_fell", since, [best, reward], best=best, last=last)
            return


def _usual_fall(run: RunSnapshot, best: Series, noise: float) -> float:
    """Returns how far the reward of a healthy run may fall from its best."""
    deviations = run.of("reward_std")
    deviation = deviations.median if deviations else 0.0
    of_a_step = deviation / math.sqrt(run.job.sampling.prompts_per_step)
    return max(LOST * max(abs(best.median), deviation), NOISES * max(noise, of_a_step))


def held_out_falls(run: RunSnapshot) -> Iterator[Finding]:
    """Yields held-out sets whose reward falls while the training reward holds or rises: the mark of
    a hacked reward, or of memorized problems."""
    train = run.of("reward")
    if len(train) < FEWEST or any(reward_fell(run)):
        return
    for held_out in run.held_out():
        rewards = held_out.rewards
        if len(rewards) < 3:
            continue
        best = max(range(len(rewards) - 2), key=lambda at: rewards.values[at])
        before = train.up_to(max(rewards.steps[best], FEWEST)).last()
        both_fall = train.last().median < before.median - before.noise
        if not both_fall and all(_is_below(held_out, at, best, run) for at in (-2, -1)):
            yield finding(
                "held_out_falls",
                rewards.steps[-2],
                [rewards, train],
                of=held_out.title,
                best=rewards.values[best],
                step=rewards.steps[best],
                last=rewards.values[-1],
            )


def _is_below(held_out: HeldOut, at: int, best: int, run: RunSnapshot) -> bool:
    """Returns whether a reward is below the best one by more than chance."""
    drop = held_out.rewards.values[best] - held_out.rewards.values[at]
    return drop > held_out.margin(best, at, run.full_mark)


def _is_unexplained(m: Reading) -> bool:
    return not m.job.environment and not m.run.learned


lengths_collapse = Rule(
    "lengths_collapse",
    "completions/mean_length",
    lambda m, value: value <= 0.25 * m.began,  # shorter reasoning halves it at most
    min_steps=2 * WINDOW,
    when=lambda m: (
        _is_unexplained(m)
        and m.began >= FEWEST_TOKENS
        and m.now("reward") >= m.run.of("reward").first().median
    ),
    also=["reward"],
)

lengths_at_limit = Rule(
    "lengths_at_limit",
    "completions/mean_length",
    lambda m, value: value >= 0.8 * m.job.sampling.max_tokens,  # many are cut off
    min_steps=2 * WINDOW,
    when=lambda m: (
        _is_unexplained(m)
        and m.job.sampling.max_tokens >= FEWEST_TOKENS
        and m.began <= 0.5 * m.job.sampling.max_tokens
    ),
    also=["completions/clipped_ratio"],
)


def one_text(run: RunSnapshot) -> Iterator[Finding]:
    """Yields one string that has spread through the completions of different prompts."""
    if len(run.batches) < 2 or run.learned:
        return
    oldest, newest = run.batches[0], run.batches[-1]
    before, now = _shares(oldest), _shares(newest)
    spread = [
        text for text, share in now.items() if share >= OFTEN and before.get(text, 0.0) <= SELDOM
    ]
    if spread:
        text = max(spread, key=lambda each: (now[each], len(each)))
        had, has = before.get(text, 0.0), now[text]
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
        words = of_batch(newest, shown, had, has)
        yield finding(
            "one_text",
            newest.step,
            [words.model_copy(update={"steps": (oldest.step, newest.step)}), run.of("reward")],
            has=percent(has),
            had=percent(had),
            text=shown,
            newest=newest.step,
            oldest=oldest.step,
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
