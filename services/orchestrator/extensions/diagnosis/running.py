"""Whether the run runs: what holds the job up or ended it, where the time of a step is spent, and
which service waits for which."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    WINDOW,
    RunSnapshot,
    Series,
    of_batch,
    percent,
)
from services.orchestrator.extensions.diagnosis.rules import Reading, Rule, at_least, finding
from shared.wire import Evidence, Finding

STALLED_STEPS = 5.0
"""How many times as long as a usual step nothing has happened: an evaluation or a checkpoint takes
one or two steps' time."""

STALLED_S = 300.0
"""Seconds without an event below which a job is not called stalled: loading a model takes as
long."""

MANY_RECOVERIES = 3
"""Recoveries of one job: one or two are machines that come and go."""

LONG_S = 3600.0
"""Seconds that all steps of a job take, below which its speed does not matter."""

SIDE_SHARE = 0.3
"""Share of a step that anything but sampling and training may take: these two are what is paid
for."""

BUSY, IDLE = 0.9, 0.5
"""Shares of time/step for which a service has work, from which on it bounds the step, and below
which it is idle most of the time."""

SLOWER = 2.0
"""How many times as long as its first steps a job's last ones take."""

FAIR_SHARE = 0.25
"""Share of its part of the groups below which a sampler is idle: uneven lengths leave a sampler
half of it."""

FEWEST_EACH = 4
"""Groups per sampler below which a step cannot be shared out."""

SIDES = {
    "reward": ("slow_stage/reward", "grading the last completions"),
    "sync": ("slow_stage/sync", "bringing the weights to the samplers"),
    "store": ("slow_stage", "writing the batch"),
    "keep": ("slow_stage", "writing finished groups"),
    "record": ("slow_stage", "writing the row"),
    "checkpoint": ("slow_stage/checkpoint", "writing checkpoints"),
    "eval": ("slow_stage/eval", "evaluating held-out problems"),
}
"""Stages beside sampling and training: their sentences, and what they do."""


def ended_badly(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that the job failed, or is paused and needs an operator, though not on request."""
    record = run.record
    if record is None or record.status not in ("failed", "paused"):
        return
    why = record.error or "no reason is known"
    if record.status == "failed" or record.pause_reason not in ("requested", "preempted"):
        evidence = [Evidence(metric="record", text=why)]
        yield finding(record.status, record.step, evidence, step=record.step, why=why)


def waits(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that a queued or running job lacks a service, its data, or a folder."""
    record = run.record
    if record is None or record.status not in ("queued", "running"):
        return
    away = {at: each for at, each in record.waits_for.items() if each.away}
    what = record.waits
    if not what and record.place is not None and len(away) == len(record.waits_for):
        what = "; ".join(f"the trainer {at} {each.why}" for at, each in sorted(away.items()))
    if what:
        evidence = [Evidence(metric="record", text=what)]
        yield finding("waits", record.step, evidence, status=record.status, what=what)


def stalled(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that a running job has had no event for far longer than a step takes."""
    record, last = run.record, run.last_event_at
    if record is None or record.status != "running" or last is None or record.waits:
        return
    seconds = run.of("time/step").last().values
    usual_s = statistics.median(seconds) if seconds else 0.0
    silent_s = run.now - last
    if silent_s >= max(STALLED_S, STALLED_STEPS * usual_s):
        doing = record.doing or "nothing is known of what it does"
        yield finding(
            "stalled" if record.place is None else "stalled/gone",
            record.step,
            [Evidence(metric="record", text=doing)],
            silent_s=silent_s,
            usual=f"; a step takes {usual_s:.0f} s" if usual_s else "",
            doing=doing,
        )


def recovers_often(run: RunSnapshot) -> Iterator[Finding]:
    """Yields that the job lost a service's state several times."""
    record, replayed = run.record, run.of("replayed")
    if record is not None and record.recoveries >= MANY_RECOVERIES:
        count = Evidence(metric="record", values=(float(record.recoveries),), text="recoveries")
        since = replayed.steps[0] if replayed else None
        yield finding("recovers_often", since, [count, replayed], num=record.recoveries)


def _is_long(run: RunSnapshot) -> bool:
    """Returns whether the job takes so long that its speed matters."""
    total = run.of("time/step")
    return len(total) >= FEWEST and total.last().median * run.job.steps >= LONG_S


def slow_stage(run: RunSnapshot) -> Iterator[Finding]:
    """Yields stages beside sampling and training that take much of a step, and sampling where it
    alone bounds the step."""
    total = run.of("time/step").last()
    if not _is_long(run):
        return
    for stage, (name, what) in SIDES.items():
        series = run.of(f"time/{stage}").kept(lambda step, _: step >= total.steps[0])
        share = sum(series.values) / sum(total.values)
        if share >= SIDE_SHARE:
            values = {"what": what, "share": percent(share), "stage": stage, "total": total}
            yield finding(name, total.steps[0], [series, total], **values)
    yield from _bound_by_samplers(run)


def _utilization(m: Reading) -> dict[str, object]:
    trainer = percent(m.now("utilization/trainer"))
    return {"step_s": m.now("time/step"), "trainer": trainer}


_bound_by_samplers = Rule(
    "slow_stage/sampling",
    "utilization/rollout",
    at_least(BUSY),
    when=lambda m: m.job.max_staleness > 0 and m.now("utilization/trainer") <= IDLE,
    also=["utilization/trainer", "time/generate"],
    values=_utilization,
)

samplers_wait = Rule(
    "samplers_wait",
    "utilization/rollout",
    lambda _, value: value <= IDLE,
    when=lambda m: _is_long(m.run),
    cases={"samplers_wait/overlapped": lambda m: m.job.max_staleness > 0},
    also=["time/wait_for_trainer"],
    values=lambda m: {"step_s": m.now("time/step")},
)


def sampler_idle(run: RunSnapshot) -> Iterator[Finding]:
    """Yields the samplers, of several, that get hardly any groups."""
    batch = run.newest
    names = {each["replica"] for each in run.syncs[-1]["samplers"]} if run.syncs else set[str]()
    counts = Counter(group.replica for group in batch.groups) if batch else Counter[str]()
    total = sum(counts[name] for name in names)
    if batch is None or len(names) < 2 or total < FEWEST_EACH * len(names):
        return
    shown = ", ".join(f"{each}: {counts[each]}" for each in sorted(names))
    values = {"total": total, "fair": total / len(names), "step": batch.step}
    for name in sorted(names):
        if counts[name] < FAIR_SHARE * total / len(names):
            evidence = [of_batch(batch, shown)]
            values |= {"name": name, "count": counts[name]}
            yield finding("sampler_idle", batch.step, evidence, **values)


def _without_extras(run: RunSnapshot) -> Series:
    """Returns time/step without evaluations and checkpoints, which only some steps have."""
    extras = [dict(run.of(f"time/{each}")) for each in ("eval", "checkpoint")]
    total = run.of("time/step")
    values = [value - sum(each.get(step, 0.0) for each in extras) for step, value in total]
    return Series(total.metric, total.steps, tuple(values))


def _grown(m: Reading) -> Series:
    """Returns the stage whose time grew most."""
    stages = ("generate", "reward", "store", "train", "sync", "keep")
    found = [series for stage in stages if (series := m.run.of(f"time/{stage}"))]
    none = Series("time/step", (0,), (0.0,))
    return max(found, key=lambda each: each.last().median - each.first().median, default=none)


def _longer(m: Reading) -> float:
    """Returns how many times as long completions are as in the beginning; 1 if unknown."""
    length = m.run.of("completions/mean_length")
    return length.last().median / max(length.first().median, 1.0) if length else 1.0


slower = Rule(
    "slower",
    _without_extras,
    lambda m, value: value >= SLOWER * m.began,
    min_steps=3 * WINDOW,
    when=lambda m: _is_long(m.run),
    cases={"slower/longer": lambda m: _longer(m) >= SLOWER},
    also=[lambda m: [m.run.of(_grown(m).metric).evidence()]],
    values=lambda m: {
        "metric": _grown(m).metric,
        "grown": (_grown(m).first().median, _grown(m).last().median),
        "longer": _longer(m),
    },
)
