"""The checks of a run; reward hacking has a file of its own, reward_hacking.py. Each check yields a
finding where something is wrong. A check that only compares a metric with a threshold is a rule in
findings.toml. Changes of lengths are not reported while held-out rewards rise."""

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
from shared.wire import Evidence, Finding, JobRecord

# --- updates, and the sampler's policy -----------------------------------------------------------


def steps_skipped(run: RunSnapshot) -> Iterator[Finding]:
    skipped = run.of("skipped_steps")
    recent = skipped.last(2 * WINDOW)  # the effect of an older one has shown
    if found := [step for step, value in recent.points if value]:
        evidence = [skipped, run.of("grad_norm")]
        yield finding("steps_skipped", found[0], evidence, num=len(found), of=len(recent))


LEAP_NATS = 2.0
"""Change of the canary's log-probs by a single step that is enough for a finding: a probability
changes by a factor of 7."""


def updates(run: RunSnapshot) -> Iterator[Finding]:
    """Yields what the size of updates says of the learning rate: too large or too small. Steps
    without signal change nothing, and are left out."""
    moved, rounding = beyond_rounding(run)
    if leaps := moved.where(lambda _, value: value >= LEAP_NATS):
        evidence, last = [leaps, run.of("grad_norm")], leaps.last()
        yield finding("updates_too_large", leaps.steps[0], evidence, last=last, job=run.job)
    elif m := rule(run, "updates_too_large", moved):
        yield m.finding(last=m.last)
    elif (m := rule(run, "updates_too_small", moved)) and _stays(run):
        is_rounded = any(rounding.get(step) for step in m.last.steps)
        yield m.finding("updates_too_small/rounded" if is_rounded else None)


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


def mismatch(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that sampler and trainer are not the same policy, with by how much the samplers'
    log-probs of the canary differ."""
    current = run.of("mismatch/current/logprob_diff_mean")
    m = rule(run, "mismatch", current or run.of("mismatch/logprob_diff_mean"))
    if m is None or run.job.is_pushed:
        return
    proven = [
        max(differences)
        for sync in run.syncs[-WINDOW:]
        if (differences := [d for each in sync["samplers"] if (d := each["canary_difference"])])
    ]
    sampling, name = run.job.sampling, "mismatch"
    narrowed = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if narrowed and run.job.correction.truncated_sampling == "accept":
        name = "mismatch/narrowed"
    elif proven and not m.holds(proven[-1]):
        name = "mismatch/proven"
    yield m.finding(name, [Evidence(metric="canary_difference", values=tuple(proven))])


# --- what is rewarded ----------------------------------------------------------------------------


def reward_fell(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that the training reward is far below its best: of ten steps, or of one of the first
    steps, since a single update may ruin a policy."""
    reward, first = run.of("reward"), run.of("reward").first()
    if len(reward) <= FEWEST:
        return
    last = reward.last(min(WINDOW, len(reward) - 1))
    ends = range(WINDOW, len(reward) + 1)
    windows = [Series(reward.metric, reward.points[end - WINDOW : end]) for end in ends]
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
            values = {"of": held_out.title, "best": rewards[best], "step": steps[best]}
            evidence = [held_out.rewards, train]
            yield finding("held_out_falls", steps[-2], evidence, last=rewards[-1], **values)


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
        name = "reward_constant/full" if mean.values[-1] >= 1 else "reward_constant"
        values = {"label": reward.label, "value": mean.values[-1], "num": len(mean)}
        yield finding(name, mean.steps[0], [mean, std], **values)


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
    m = None if job.environment or run.learned else rule(run, "lengths_collapse")
    # a length of fewer than 16 tokens does not show how a completion was made
    if m and m.began >= 16 and m["reward"] >= run.of("reward").first().median:
        yield m.finding()
    if (m := rule(run, "entropy_collapse")) and m["reward"] < 0.9 * run.full_mark:
        yield m.finding()  # what earns more has every reason to be sure
    if (m := rule(run, "off_policy")) and job.max_staleness > 0:
        yield m.finding()
    if m := rule(run, "overlong_prompts"):
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


# --- the job's state at this moment --------------------------------------------------------------


def state(run: RunSnapshot) -> Iterator[Finding]:
    """Yields what ended the job or holds it up, unless that was requested; and that it lost a
    service's state several times: once or twice are machines that come and go."""
    record = run.record
    if record is None:
        return
    is_asked = record.status == "paused" and record.pause_reason in ("requested", "preempted")
    if record.status in ("failed", "paused") and not is_asked:
        why = record.error or "no reason is known"
        evidence = [Evidence(metric="record", text=f"status {record.status!r}")]
        yield finding(record.status, record.step, evidence, step=record.step, why=why)
    if record.status in ("queued", "running"):
        yield from _waits(record)
    if record.status == "running" and run.last_event_at is not None and not record.waits:
        yield from _stalled(run, record, run.now - run.last_event_at)
    if record.recoveries >= 3:
        count = Evidence(metric="record", values=(float(record.recoveries),), text="recoveries")
        replayed = run.of("replayed")
        since = replayed.steps[0] if replayed else None
        yield finding("recovers_often", since, [count, replayed], num=record.recoveries)


def _waits(record: JobRecord) -> Iterator[Finding]:
    """Yields that the job lacks a service, its data, or a folder."""
    away = {at: each for at, each in record.waits_for.items() if each.away}
    what = record.waits
    if not what and record.place is not None and len(away) == len(record.waits_for):
        what = "; ".join(f"the trainer {at} {each.why}" for at, each in sorted(away.items()))
    if what:
        evidence = [Evidence(metric="record", text=what)]
        yield finding("waits", record.step, evidence, status=record.status, what=what)


def _stalled(run: RunSnapshot, record: JobRecord, silent_s: float) -> Iterator[Finding]:
    """Yields that the job had no event for far longer than a step takes."""
    seconds = run.of("time/step").last()
    usual_s = seconds.median if seconds else 0.0
    # loading a model takes up to 5 minutes, an evaluation or a checkpoint one or two steps' time
    if silent_s >= max(300.0, 5 * usual_s):
        doing = record.doing or "nothing is known of what it does"
        name = "stalled" if record.place is None else "stalled/gone"
        usual = f"; a step takes {usual_s:.0f} s" if usual_s else ""
        evidence = [Evidence(metric="record", text=doing)]
        yield finding(name, record.step, evidence, silent_s=silent_s, usual=usual, doing=doing)
