"""Whether the run runs: what holds the job up or ended it, where the time of a step goes, and who
waits for whom."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    WINDOW,
    RunSnapshot,
    Series,
    finding,
    percent,
    steps_of,
)
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
"""Seconds that all steps of a job take, below which its speed is nobody's concern."""

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

FASTER_DISK = "put HONE_RUNS_DIR on a faster disk"

SIDES = {
    "reward": (
        "grading the last completions",
        "give the reward service more processors or HONE_SANDBOX_SLOTS, shorten a grader's "
        "timeout_s, or run it at another host (HONE_REWARD_URL)",
        "HONE_SANDBOX_SLOTS HONE_REWARD_URL",
    ),
    "sync": (
        "bringing the weights to the samplers",
        'take a faster weight_sync ("shm" on one host, "nccl" between GPUs, "lora" for adapters), '
        "or sync less often (sync_every, with max_staleness)",
        "weight_sync sync_every max_staleness",
    ),
    "store": ("writing the batch", FASTER_DISK, "HONE_RUNS_DIR"),
    "keep": ("writing finished groups", FASTER_DISK, "HONE_RUNS_DIR"),
    "record": ("writing the row", FASTER_DISK, "HONE_RUNS_DIR"),
    "checkpoint": (
        "writing checkpoints",
        f"raise checkpoints.every, or {FASTER_DISK}",
        "checkpoints.every HONE_RUNS_DIR",
    ),
    "eval": (
        "evaluating held-out problems",
        "raise evaluation.every, or lower evaluation.num_prompts or samples",
        "evaluation.every evaluation.num_prompts evaluation.samples",
    ),
}
"""Stages beside sampling and training: what they are, the remedy, and the keys that it names."""


def ended_badly(facts: RunSnapshot) -> Iterator[Finding]:
    """The job failed, or is paused and needs an operator, though no person paused it."""
    record = facts.record
    if record is None or record.status not in ("failed", "paused"):
        return
    why = record.error or "no reason is known"
    has_failed = record.status == "failed"
    if record.pause_reason in ("requested", "preempted"):
        return
    yield finding(
        code="failed" if has_failed else "paused",
        level="problem",
        since_step=record.step,
        evidence=[Evidence(metric="record", text=why)],
        title=f"the job {'failed' if has_failed else 'is paused'} after step {record.step}: {why}",
        cause=why,
        remedy="fix what it says, and submit the job again, from its newest checkpoint as model if "
        "it has one (`hone checkpoints`)"
        if has_failed
        else "fix what it says, then `hone resume`; it continues where it was",
    )


def waits(facts: RunSnapshot) -> Iterator[Finding]:
    """A queued or running job lacks something: a service, its data, a folder."""
    record = facts.record
    if record is None or record.status not in ("queued", "running"):
        return
    away = {at: each for at, each in record.waits_for.items() if each.away}
    what = record.waits
    if not what and record.place is not None and len(away) == len(record.waits_for):
        what = "; ".join(f"the trainer {at} {each.why}" for at, each in sorted(away.items()))
    if what:
        yield finding(
            code="waits",
            level="problem",
            since_step=record.step,
            evidence=[Evidence(metric="record", text=what)],
            title=f"the {record.status} job waits: {what}",
            cause="something that the job needs is unreachable",
            remedy="bring it back (`hone doctor` shows the services); the job continues "
            "automatically",
        )


def stalled(facts: RunSnapshot) -> Iterator[Finding]:
    """A running job from which nothing was heard for far longer than a step takes."""
    record, last = facts.record, facts.last_event_at
    if record is None or record.status != "running" or last is None or record.waits:
        return
    seconds = facts.of("time/step").last().values
    usual_s = statistics.median(seconds) if seconds else 0.0
    silent_s = facts.now - last
    if silent_s < max(STALLED_S, STALLED_STEPS * usual_s):
        return
    gone = record.place is not None
    doing = record.doing or "nothing is known of what it does"
    yield finding(
        code="stalled",
        level="problem" if gone else "warning",
        since_step=record.step,
        evidence=[Evidence(metric="record", text=doing)],
        title=f"nothing has happened for {silent_s:.0f} s"
        + (f"; a step takes {usual_s:.0f} s" if usual_s else ""),
        cause="no orchestrator works on it: the lease of its worker has ended" if gone else doing,
        remedy="start an orchestrator with this Redis and HONE_RUNS_DIR; the job then continues"
        if gone
        else "see the log of the service that it waits for; after HONE_STALL_S the events name it",
        keys="HONE_RUNS_DIR" if gone else "HONE_STALL_S",
    )


def recovers_often(facts: RunSnapshot) -> Iterator[Finding]:
    """The job lost a service's state again and again."""
    record, replayed = facts.record, facts.of("replayed")
    if record is None or record.recoveries < MANY_RECOVERIES:
        return
    count = Evidence(metric="record", values=(float(record.recoveries),), text="recoveries")
    yield finding(
        code="recovers_often",
        level="warning",
        since_step=replayed.steps[0] if replayed else None,
        evidence=[count, *([replayed] if replayed else [])],
        title=f"the job continued {record.recoveries} times after a service had lost its state",
        cause="a trainer or sampler dies: often the memory of GPU or host is too small",
        remedy="see in the events (`hone logs`) which one, and in its log why; lower "
        "memory.micro_batch_tokens or HONE_GPU_MEMORY_UTILIZATION if memory ran out",
        keys="memory.micro_batch_tokens HONE_GPU_MEMORY_UTILIZATION",
    )


def _is_long(facts: RunSnapshot) -> bool:
    """Returns whether the job takes so long that its speed matters."""
    total = facts.of("time/step")
    return len(total) >= FEWEST and total.last().median * facts.job.steps >= LONG_S


def slow_stage(facts: RunSnapshot) -> Iterator[Finding]:
    """A stage beside sampling and training takes much of a step, or sampling alone bounds it."""
    total = facts.of("time/step").last()
    if not _is_long(facts):
        return
    for stage, (what, remedy, keys) in SIDES.items():
        series = facts.of(f"time/{stage}").kept(lambda step, _: step >= total.steps[0])
        share = sum(series.values) / sum(total.values)
        if share >= SIDE_SHARE:
            yield finding(
                code="slow_stage",
                level="warning",
                since_step=total.steps[0],
                evidence=[series, total],
                title=f"{what} takes {percent(share)} of the time of {steps_of(total)}",
                cause=f"time/{stage} bounds the step, not sampling or training",
                remedy=remedy,
                keys=keys,
            )
    yield from _bound_by_samplers(facts, total)


def _bound_by_samplers(facts: RunSnapshot, total: Series) -> Iterator[Finding]:
    rollout, trainer = (facts.of(f"utilization/{each}") for each in ("rollout", "trainer"))
    busy, idle = rollout.last().median, trainer.last().median
    if not facts.job.max_staleness or not trainer or busy < BUSY or idle > IDLE:
        return
    yield finding(
        code="slow_stage",
        level="notice",
        since_step=rollout.since(lambda share: share >= BUSY),
        evidence=[rollout, trainer, facts.of("time/generate")],
        title=f"sampling bounds the step: the samplers are busy for {percent(busy)} of "
        f"{total.median:.0f} s, the trainer for {percent(idle)}",
        cause="there are too few samplers for this trainer, or completions are very uneven: the "
        "longest one of a step ends it",
        remedy="add samplers (HONE_ROLLOUT_URL, HONE_ROLLOUT_REPLICAS), or lower "
        "sampling.max_tokens",
        keys="HONE_ROLLOUT_URL HONE_ROLLOUT_REPLICAS sampling.max_tokens",
    )


def samplers_wait(facts: RunSnapshot) -> Iterator[Finding]:
    """Samplers are idle most of the time, because they wait for the trainer."""
    rollout, total = facts.of("utilization/rollout"), facts.of("time/step").last()
    if not _is_long(facts) or not rollout or rollout.last().median > IDLE:
        return
    overlaps = facts.job.max_staleness > 0
    yield finding(
        code="samplers_wait",
        level="notice",
        since_step=rollout.since(lambda share: share <= IDLE),
        evidence=[rollout, facts.of("time/wait_for_trainer")],
        title=f"the samplers have work for {percent(rollout.last().median)} of a step of "
        f"{total.median:.0f} s",
        cause="the trainer is slower than they are"
        if overlaps
        else "with max_staleness = 0 sampling and training take turns",
        remedy="give the trainer more of the GPUs (HONE_TRAINER_RANKS), or take fewer samplers"
        if overlaps
        else "set max_staleness = 1, unless they share a GPU (HONE_COLOCATE)",
        keys="HONE_TRAINER_RANKS" if overlaps else "max_staleness",
    )


def sampler_idle(facts: RunSnapshot) -> Iterator[Finding]:
    """One sampler of several gets hardly any groups."""
    batch = facts.newest
    names = {each["replica"] for each in facts.syncs[-1]["samplers"]} if facts.syncs else set[str]()
    counts = Counter(group.replica for group in batch.groups) if batch else Counter[str]()
    total = sum(counts[name] for name in names)
    if batch is None or len(names) < 2 or total < FEWEST_EACH * len(names):
        return
    fair = total / len(names)
    shown = ", ".join(f"{each}: {counts[each]}" for each in sorted(names))
    for name in sorted(names):
        if counts[name] < FAIR_SHARE * fair:
            yield finding(
                code="sampler_idle",
                level="notice",
                since_step=batch.step,
                evidence=[Evidence(metric="rollouts", steps=(batch.step,), text=shown)],
                title=f"sampler {name!r} got {counts[name]} of {total} groups of step "
                f"{batch.step}; an equal part is {fair:.0f}",
                cause="it is slower than the others, joined late, or has room for fewer tokens",
                remedy="see its line in `hone doctor`, and how many completions it may have at "
                "once (HONE_MAX_NUM_SEQS, HONE_GPU_MEMORY_UTILIZATION)",
                keys="HONE_MAX_NUM_SEQS HONE_GPU_MEMORY_UTILIZATION",
            )


def slower(facts: RunSnapshot) -> Iterator[Finding]:
    """Steps take far longer than in the beginning."""
    total = _without_extras(facts)
    if len(total) < 3 * WINDOW:
        return
    first, last = total.first().median, total.last().median
    if not _is_long(facts) or last < SLOWER * first:
        return
    stages = ("generate", "reward", "store", "train", "sync", "keep")
    of_stages = [series for stage in stages if (series := facts.of(f"time/{stage}"))]
    grown = max(of_stages, key=_growth, default=Series("time/step", (0,), (0.0,)))
    length = facts.of("completions/mean_length")
    longer = length.last().median / max(length.first().median, 1.0) if length else 1.0
    yield finding(
        code="slower",
        level="notice" if longer >= SLOWER else "warning",
        since_step=total.since(lambda seconds: seconds >= SLOWER * first),
        evidence=[total, facts.of(grown.metric)],
        title=f"a step takes {last:.0f} s, and took {first:.0f} s in the beginning",
        cause=f"{grown.metric} went from {grown.first().median:.1f} to "
        f"{grown.last().median:.1f} s"
        + (f"; completions are {longer:.1f} times as long" if longer >= SLOWER else ""),
        remedy="lower sampling.max_tokens if the length is of no use"
        if longer >= SLOWER
        else "see what else uses that machine; `hone doctor` shows how its services are",
        keys="sampling.max_tokens" if longer >= SLOWER else "",
    )


def _growth(series: Series) -> float:
    return series.last().median - series.first().median


def _without_extras(facts: RunSnapshot) -> Series:
    """Returns time/step without evaluations and checkpoints, which only some steps have."""
    extras = [dict(facts.of(f"time/{each}")) for each in ("eval", "checkpoint")]
    total = facts.of("time/step")
    values = [value - sum(each.get(step, 0.0) for each in extras) for step, value in total]
    return Series(total.metric, total.steps, tuple(values))
