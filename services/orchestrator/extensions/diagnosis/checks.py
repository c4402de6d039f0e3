"""Checks of learning; reward hacking has a file of its own, reward_hacking.py. Each check yields a
finding where something is wrong. A check that only compares a metric with a threshold is a rule in
findings.toml. Changes of lengths and texts are not reported while held-out rewards rise."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    NEWEST,
    WINDOW,
    RunSnapshot,
    Series,
    finding,
    of_batch,
    percent,
    rule,
)
from services.orchestrator.extensions.diagnosis.reward_hacking import reward_hacks
from services.orchestrator.grpo.advantages import outcomes
from services.orchestrator.grpo.held_out import IGNORED, metric_prefix
from services.orchestrator.grpo.metrics import CANARY_CHANGE
from shared.wire import Batch, EvaluationReport, Evidence, Finding

# --- updates, and the sampler's policy -----------------------------------------------------------

RECENT = 2 * WINDOW
"""Steps for which a spike or a skipped step is reported: the effect of an older one has shown."""


def steps_skipped(run: RunSnapshot) -> Iterator[Finding]:
    skipped = run.of("skipped_steps")
    recent = skipped.last(RECENT)
    if found := [step for step, value in recent.points if value]:
        evidence = [skipped, run.of("grad_norm")]
        yield finding("steps_skipped", found[0], evidence, num=len(found), of=len(recent))


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


def updates(run: RunSnapshot) -> Iterator[Finding]:
    """Yields what the size of updates says of the learning rate: too large or too small. Steps
    without signal change nothing, and are left out."""
    moved, rounding = beyond_rounding(run)
    leaps = moved.where(lambda _, value: value >= LEAP_NATS)
    several = run.job.training.epochs * run.job.training.minibatches > 1
    name = "updates_too_large/passes" if several else "updates_too_large"
    for metric, most, unit in TOO_LARGE if not leaps else ((CANARY_CHANGE, LEAP_NATS, MOVED),):
        others = run.of(metric).where(lambda _, value: value != 0)
        series = leaps or (moved if metric == CANARY_CHANGE else others)
        last = series.last()
        if leaps or (len(series) >= FEWEST and last.median >= most):
            since = series.since(lambda value, most=most: value >= most)
            evidence = [series, run.of("grad_norm")]
            yield finding(name, since, evidence, last=last, unit=unit, job=run.job)
            return
    m = rule(run, "updates_too_small", moved)
    if m and _stays(run):
        rates = run.of("learning_rate").values
        has_decayed = bool(rates) and rates[-1] < max(rates) / 2
        is_rounded = any(rounding.get(step) for step in m.last.steps)
        name = "updates_too_small/decayed" if has_decayed else "updates_too_small"
        yield m.finding("updates_too_small/rounded" if is_rounded else name)


def beyond_rounding(run: RunSnapshot) -> tuple[Series, dict[int, float]]:
    """Returns `canary_change`, where it changed, without what rounding makes of it, the root of the
    difference of the squares, since the two are independent; and the latter by step. In 16 bits
    rounding alone moves the canary by a tenth of a nat, so that the same update would seem ten
    times as large as in 32."""
    rounding = {sync["version"]: sync.get("canary_rounding") or 0.0 for sync in run.syncs}
    points = [
        (step, math.sqrt(max(value**2 - rounding.get(step, 0.0) ** 2, 0.0)))
        for step, value in run.of(CANARY_CHANGE).points
        if value
    ]
    return Series(CANARY_CHANGE, tuple(points)), rounding


def _stays(run: RunSnapshot) -> bool:
    """Whether some groups had signal, and neither the reward nor a held-out reward has risen."""
    reward = run.of("reward")
    first, last = reward.first(), reward.last()
    rises = last.median > first.median + max(first.noise, last.noise)
    has_none = run.of("frac_reward_zero_std").last().median >= 1
    return len(reward) >= 2 * WINDOW and not (has_none or rises or run.learned)


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
    name = "no_update/flat" if evidence[0].last().median == 0 else "no_update"
    why = why or "each update was rounded away"
    yield finding(name, rows[0].step, [*evidence, canary], num=len(rows), why=why)


def spikes(run: RunSnapshot) -> Iterator[Finding]:
    """Yields the metrics of which a recent step is far from the steps before it: ten times their
    median, as single steps of a healthy run are up to three or four times that."""
    for metric, least, name in (
        ("kl", 0.01, "kl_spike"),  # nats: below that even ten times the usual is harmless
        ("kl/old_k3", 0.01, "kl_spike"),
        ("grad_norm", run.job.training.max_grad_norm, "gradient_spike"),
    ):
        series = run.of(metric)
        before = {at: series.first(at).last() for at in range(FEWEST, len(series))[-RECENT:]}
        found = [
            (step, value)
            for at, usual in before.items()
            if (value := series.values[at]) > max(10 * usual.median, least)
            for step in [series.steps[at]]
        ]
        if found:
            step, value = max(found, key=lambda one: one[1])
            usual = before[series.steps.index(step)]
            evidence = [Evidence(metric=metric, steps=(step,), values=(value,)), usual]
            values = {"metric": metric, "value": value, "step": step, "before": usual}
            yield finding(name, found[0][0], evidence, **values)


def mismatch(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that sampler and trainer are not the same policy, with by how much the samplers'
    log-probs of the canary differ, by version."""
    current = run.of("mismatch/current/logprob_diff_mean")
    m = rule(run, "mismatch", current or run.of("mismatch/logprob_diff_mean"))
    if m is None or run.job.is_pushed:
        return
    canaries = Series(
        "canary_difference",
        tuple(
            (sync["version"], max(differences))
            for sync in run.syncs[-WINDOW:]
            if (differences := [d for each in sync["samplers"] if (d := each["canary_difference"])])
        ),
    )
    text = "difference of a sampler's log-probs of the canary, which are proven at each sync"
    evidence = Evidence(
        metric=canaries.metric, steps=canaries.steps, values=canaries.values, text=text
    )
    sampling, name = run.job.sampling, "mismatch"
    narrowed = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if narrowed and run.job.correction.truncated_sampling == "accept":
        name = "mismatch/narrowed"
    elif canaries and not m.holds(canaries.values[-1]):
        name = "mismatch/proven"
    yield m.finding(name, [evidence] if canaries else [])


# --- what is rewarded ----------------------------------------------------------------------------


def reward_fell(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that the training reward is far below its best: of ten steps, or of one of the first
    steps, since a single update may ruin a policy."""
    reward, first = run.of("reward"), run.of("reward").first()
    if len(reward) <= FEWEST:
        return
    last = reward.last(min(WINDOW, len(reward) - 1))
    windows = [reward.first(end).last() for end in range(WINDOW, len(reward) + 1)]
    for parts, noise in (
        (windows, None),
        ([first.first(end).last(1) for end in range(1, len(first) + 1)], first.noise),
    ):
        best = max(parts, key=lambda part: part.median, default=last)
        usual = _usual_fall(run, best, best.noise if noise is None else noise)
        if best.median - last.median > usual:
            middle = (best.median + last.median) / 2
            since = reward.since(lambda value, middle=middle: value < middle)
            yield finding("reward_fell", since, [best, reward], best=best, last=last)
            return


def _usual_fall(run: RunSnapshot, best: Series, noise: float) -> float:
    """Returns how far the reward of a healthy run may fall from its best: by a quarter, as prompts
    differ from step to step by less, and by four times a step's usual distance from the median or
    a step's standard error, if all completions of a prompt were alike."""
    deviations = run.of("reward_std")
    deviation = deviations.median if deviations else 0.0
    of_a_step = deviation / math.sqrt(run.job.sampling.prompts_per_step)
    return max(0.25 * max(abs(best.median), deviation), 4 * max(noise, of_a_step))


def held_out_falls(run: RunSnapshot) -> Iterator[Finding]:
    """Yields held-out sets whose reward falls while the training reward holds or rises: the mark of
    a hacked reward, or of memorized problems."""
    train = run.of("reward")
    if len(train) < FEWEST or any(reward_fell(run)):
        return
    for held_out in run.held_out:
        steps, rewards = held_out.rewards.steps, held_out.rewards.values
        if len(rewards) < 3:
            continue
        best = max(range(len(rewards) - 2), key=lambda at: rewards[at])
        until = max(steps[best], FEWEST)
        before = train.where(lambda step, _, until=until: step <= until).last()
        both_fall = train.last().median < before.median - before.noise
        if not both_fall and all(
            rewards[best] - rewards[at] > held_out.margin(best, at, run.full_mark)
            for at in (-2, -1)  # one may be chance
        ):
            yield finding(
                "held_out_falls",
                steps[-2],
                [held_out.rewards, train],
                of=held_out.title,
                best=rewards[best],
                step=steps[best],
                last=rewards[-1],
            )


def one_text(run: RunSnapshot) -> Iterator[Finding]:
    """Yields one string that has spread through the completions of different prompts. A phrase in
    all completions from the beginning is their format."""
    if len(run.batches) < 2 or run.learned:
        return
    oldest, newest = run.batches[0], run.batches[-1]
    before, now = shares_of_phrases(oldest), shares_of_phrases(newest)
    spread = [text for text, share in now.items() if share >= 0.5 and before.get(text, 0.0) <= 0.1]
    if spread:
        text = max(spread, key=lambda each: (now[each], len(each), each))
        had, has = before.get(text, 0.0), now[text]
        shown = text if len(text) <= 120 else f"{text[:120]}..."
        steps = {"steps": (oldest.step, newest.step)}
        words = of_batch(newest, shown, had, has).model_copy(update=steps)
        yield finding(
            "one_text",
            newest.step,
            [words, run.of("reward")],
            has=percent(has),
            had=percent(had),
            text=shown,
            newest=newest.step,
            oldest=oldest.step,
        )


def shares_of_phrases(batch: Batch) -> dict[str, float]:
    """Returns the share of completions with each phrase, of phrases in half of the groups at least
    and in no prompt of these."""
    counts_P = [
        Counter(phrase for rollout in group.rollouts for phrase in _phrases(rollout.text))
        for group in batch.groups
    ]
    total, enough = sum(len(group.rollouts) for group in batch.groups), math.ceil(len(counts_P) / 2)
    num_groups = Counter(phrase for counts in counts_P for phrase in counts)
    asked_P = [
        each.content if isinstance(each.content, str) else repr(each.content)
        for each in batch.prompts
    ]
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
    """Returns every five words in a row: fewer are in many texts by chance. A shorter text is a
    phrase itself, but not of one or two words, as "yes" answers many problems. Of a long text both
    ends are read."""
    words = (text if len(text) <= 4000 else f"{text[:2000]} {text[-2000:]}").split()
    if len(words) < 5:
        return {" ".join(words)} if len(words) >= 3 else set()
    return {" ".join(words[at : at + 5]) for at in range(len(words) - 4)}


# --- signal --------------------------------------------------------------------------------------


def no_signal(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that hardly a group has completions that earn differently, and why."""
    m = rule(run, "no_signal_equal")
    if m is None or run.job.teacher or run.job.is_pushed:
        return
    groups = run.newest.groups if run.newest else ()
    texts = [{one.text for one in group.rollouts} for group in groups if len(group.rollouts) > 1]
    same = statistics.fmean(len(each) == 1 for each in texts) if texts else 0.0
    hacks = ", ".join(sorted({found.code for found in reward_hacks(run)}))
    # within a tenth of the full mark a mean reward counts as none, or as full
    is_easy, is_hard = m["reward"] >= 0.9 * run.full_mark, m["reward"] <= 0.1 * run.full_mark
    if run.job.sampling.group_size == 1:
        name = "no_signal_equal/single"
    elif same >= 0.9:
        name = "no_signal_equal/same_text"
    elif is_easy:
        name = "no_signal_easy" if m.holds(m.began) else "no_signal_easy/learned"
        name = "no_signal_easy/hacked" if hacks else name
    elif is_hard:
        name = "no_signal_hard/fell" if any(reward_fell(run)) else "no_signal_hard"
    else:
        name = "no_signal_equal"
    yield m.finding(name, same=percent(same), hacks=hacks)


def reward_constant(run: RunSnapshot) -> Iterator[Finding]:
    """Yields the rewards, of several, that have never varied. Of one, `no_signal` says it."""
    for reward in run.job.rewards if len(run.job.rewards) > 1 else ():
        mean, std = (run.of(f"rewards/{reward.label}/{each}") for each in ("mean", "std"))
        if len(std) < FEWEST or max(std.values) > 0 or max(mean.values) > min(mean.values):
            continue
        value = mean.values[-1]
        name = "reward_constant/full" if value >= 1 else "reward_constant"
        values = {"label": reward.label, "value": value, "num": len(mean)}
        yield finding(name, mean.steps[0], [mean, std], **values)


def rewards_contradict(run: RunSnapshot) -> Iterator[Finding]:
    """Yields pairs of rewards that pull against each other in the groups of the newest batch: with
    a correlation of -0.6 more than a third of what one gives the other one takes. Of 32 completions
    it is below that by chance one time in 5,000."""
    if (batch := run.newest) is None:
        return
    for one, other in itertools.combinations((each for each in run.job.rewards if each.weight), 2):
        pairs: list[tuple[float, float]] = []
        for scores_G in batch.scores:
            both = [
                (one.weight * a.value, other.weight * b.value)
                for score in scores_G
                if (a := score.parts.get(one.label)) and (b := score.parts.get(other.label))
                if a.value is not None and b.value is not None
            ]
            if len(both) > 1:
                means = [statistics.fmean(each) for each in zip(*both, strict=True)]
                pairs += [(a - means[0], b - means[1]) for a, b in both]
        if len(pairs) < 32 or any(len({*values}) == 1 for values in zip(*pairs, strict=True)):
            continue
        found = statistics.correlation(*zip(*pairs, strict=True))
        if found <= -0.6:
            text = (
                f"correlation of what both add to the reward, over {len(pairs)} completions, each "
                "less its group's mean"
            )
            values = {"one": one.label, "other": other.label, "correlation": found}
            yield finding(
                "rewards_contradict", batch.step, [of_batch(batch, text, found)], **values
            )


# --- what a metric shows -------------------------------------------------------------------------


def by_metric(run: RunSnapshot) -> Iterator[Finding]:
    """Yields the rules that are met, as far as the job's other settings and metrics allow it."""
    job = run.job
    wrong = [one for group in run.newest.groups for one in group.rollouts] if run.newest else []
    why_wrong = [one.error or one.finish_reason for one in wrong if one.went_wrong]
    if m := rule(run, "missing_rewards"):
        yield m.finding(evidence=_commonest(run, _why_missing(run)))
    if m := rule(run, "errored_rollouts"):
        is_late = run.of("timed_out_rollouts").last(FEWEST).median >= m.value / 2
        name = "errored_rollouts/late" if is_late else "errored_rollouts"
        yield m.finding(name, _commonest(run, why_wrong))
    if m := rule(run, "environment_failures"):
        yield m.finding(evidence=_commonest(run, why_wrong))
    if m := rule(run, "truncation"):
        yield m.finding("truncation/masked" if job.advantages.mask_truncated else None)
    # a length of fewer than 16 tokens does not show how a completion was made
    is_unexplained = not job.environment and not run.learned
    m = rule(run, "lengths_collapse") if is_unexplained else None
    if m and m.began >= 16 and m["reward"] >= run.of("reward").first().median:
        yield m.finding()
    m = rule(run, "lengths_at_limit") if is_unexplained else None
    if m and m.max_tokens >= 16 and m.began <= 0.5 * m.max_tokens:
        yield m.finding()
    if (m := rule(run, "entropy_collapse")) and m["reward"] < 0.9 * run.full_mark:
        yield m.finding()  # what earns more has every reason to be sure
    if (m := rule(run, "off_policy")) and job.max_staleness > 0:
        yield m.finding()
    for name in ("overlong_prompts", "data_repeated", "data_exhausted"):
        if m := rule(run, name):
            yield m.finding()


def _why_missing(run: RunSnapshot) -> Iterator[str]:
    for score in itertools.chain.from_iterable(run.newest.scores if run.newest else ()):
        for label, part in score.parts.items():
            if part.value is None and part.verdict != "skipped":
                yield f"{label}: {part.detail or part.verdict}"


def _commonest(run: RunSnapshot, reasons: Iterable[str]) -> list[Evidence]:
    """Returns the commonest reasons in the newest batch, the most frequent first."""
    counts = Counter(each[:200] for each in reasons).most_common(3)
    found = "; ".join(f"{count} x {reason}" for reason, count in counts)
    return [of_batch(run.newest, found)] if run.newest and found else []


# --- data and evaluations ------------------------------------------------------------------------

TOO_WIDE = 0.05
"""Share of the full mark that half a confidence interval has to be, to be called wide: a narrower
one that shows no change says that there is none."""


def evaluation_too_small(run: RunSnapshot) -> Iterator[Finding]:
    """Yields held-out problems that are too few to show what training changed, once half of the
    steps are done; or to tell models apart."""
    for held_out in run.held_out:
        rewards, half = held_out.rewards, held_out.half_widths[-1]
        step, first, last = rewards.steps[-1], rewards.values[0], rewards.values[-1]
        margin = held_out.margin(0, -1, run.full_mark)
        is_late = len(rewards) > 1 and 0 < run.job.steps <= 2 * step
        if is_late and half >= TOO_WIDE * run.full_mark and abs(last - first) < margin:
            upper_end = Evidence(
                metric=f"{rewards.metric}_high",
                steps=(step,),
                values=(round(last + half, 6),),
                text="upper end of the 95 % confidence interval",
            )
            values = {"of": held_out.title, "first": first, "last": last, "margin": margin}
            yield finding("evaluation_too_small", step, [rewards, upper_end], **values)
    summary = run.record.summary if run.record else None
    if summary and summary.get("evaluation"):
        yield from _cannot_compare(EvaluationReport.model_validate(summary["evaluation"]))


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


def evaluation_ignored(run: RunSnapshot) -> Iterator[Finding]:
    """Yields held-out sets whose last evaluation is ignored: too many completions lack a reward."""
    for name in ("", *run.job.evaluation.sets):
        prefix = metric_prefix(name)
        ignored, evaluated = run.of(prefix + IGNORED), run.of(f"{prefix}errored_rollouts")
        if ignored and ignored.steps[-1] == evaluated.steps[-1]:
            values = {"step": ignored.steps[-1], "share": percent(ignored.values[-1])}
            yield finding("evaluation_ignored", ignored.steps[0], [ignored], **values)


def too_few_steps(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that the run has too few steps for most findings, so that none is no all-clear."""
    rewards = run.of("reward")
    if 0 < len(rewards) < FEWEST:
        num, compared = len(rewards), 2 * WINDOW
        yield finding("too_few_steps", None, [rewards], num=num, fewest=FEWEST, compared=compared)


def own_reward(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that a run is judged by nothing but the job's own reward code, once it earns."""
    rewards = run.of("reward")
    graders = [reward for reward in outcomes(run.job) if reward.weight > 0]
    is_own = bool(graders) and all(reward.source is not None for reward in graders)
    if is_own and len(rewards) >= FEWEST and rewards.last().median > 0:
        labels = ", ".join(repr(reward.label) for reward in graders)
        yield finding("own_reward", None, [rewards], labels=labels)
