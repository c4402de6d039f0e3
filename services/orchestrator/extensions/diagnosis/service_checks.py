"""Checks of the job's services and of the speed of its steps. Checks of learning are in
checks.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    RunSnapshot,
    Series,
    finding,
    of_batch,
    percent,
    rule,
)
from shared.wire import Evidence, Finding, JobRecord

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
        evidence = [Evidence(metric="record", text=why)]
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


# --- speed ---------------------------------------------------------------------------------------

OTHER_STAGES = {
    "reward": ("slow_stage/reward", "grading the last completions"),
    "sync": ("slow_stage/sync", "bringing the weights to the samplers"),
    "store": ("slow_stage", "writing the batch"),
    "keep": ("slow_stage", "writing finished groups"),
    "record": ("slow_stage", "writing the row"),
    "checkpoint": ("slow_stage/checkpoint", "writing checkpoints"),
    "eval": ("slow_stage/eval", "evaluating held-out problems"),
}
"""Stages other than sampling and training: the entry of findings.toml, and what the stage does."""


def speed(run: RunSnapshot) -> Iterator[Finding]:
    """Yields what bounds a step, in jobs that take an hour or more in all: of others the speed does
    not matter."""
    total = run.of("time/step").last()
    if len(run.of("time/step")) < FEWEST or total.median * run.job.steps < 3600:
        return
    for stage, (name, what) in OTHER_STAGES.items():
        series = run.of(f"time/{stage}").where(lambda step, _: step >= total.steps[0])
        share = sum(series.values) / sum(total.values)
        if share >= 0.3:
            values = {"what": what, "share": percent(share), "stage": stage, "total": total}
            yield finding(name, total.steps[0], [series, total], **values)
    yield from _slower(run)
    m = rule(run, "slow_stage/sampling")
    if m and run.job.max_staleness > 0 and m["utilization/trainer"] <= 0.5:
        yield m.finding(trainer=percent(m["utilization/trainer"]))
    if m := rule(run, "samplers_wait"):
        yield m.finding("samplers_wait/overlapped" if run.job.max_staleness > 0 else None)


def _slower(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that steps take longer than the first ones, but for evaluations and checkpoints, which
    only some steps have; with the stage that grew most."""
    extras = [dict(run.of(f"time/{each}").points) for each in ("eval", "checkpoint")]
    points = [
        (step, value - sum(each.get(step, 0.0) for each in extras))
        for step, value in run.of("time/step").points
    ]
    m = rule(run, "slower", Series("time/step", tuple(points)))
    if m is None:
        return
    stages = ("generate", "reward", "store", "train", "sync", "keep")
    found = [series for stage in stages if (series := run.of(f"time/{stage}"))]
    none = Series("time/step", ((0, 0.0),))
    grown = max(found, key=lambda each: each.last().median - each.first().median, default=none)
    length = run.of("completions/mean_length")
    longer = length.last().median / max(length.first().median, 1.0) if length else 1.0
    yield m.finding(
        "slower/longer" if longer >= 2 else "slower",
        [run.of(grown.metric).evidence()],
        metric=grown.metric,
        grown=(grown.first().median, grown.last().median),
        longer=longer,
    )


def sampler_idle(run: RunSnapshot) -> Iterator[Finding]:
    """Yields the samplers, of several, that get hardly any groups: less than a quarter of their
    part, as uneven lengths leave a sampler half of it."""
    batch = run.newest
    names = sorted({each["replica"] for each in run.syncs[-1]["samplers"]}) if run.syncs else []
    counts = Counter(group.replica for group in batch.groups) if batch else Counter[str]()
    total = sum(counts[name] for name in names)
    if batch is None or len(names) < 2 or total < 4 * len(names):
        return  # fewer groups than four for each cannot be shared out
    evidence = [of_batch(batch, ", ".join(f"{each}: {counts[each]}" for each in names))]
    for name in names:
        if counts[name] < 0.25 * total / len(names):
            values = {"name": name, "count": counts[name], "fair": total / len(names)}
            yield finding(
                "sampler_idle", batch.step, evidence, total=total, step=batch.step, **values
            )
