"""What holds a job up, or ended it: its record, and when something last happened."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from services.orchestrator.errors import is_put_away
from services.orchestrator.extensions.diagnosis.facts import WINDOW, Facts
from services.orchestrator.store.worker_side import PAUSED_ON_REQUEST
from shared.wire import Evidence, Finding, JobRecord

STALLED_STEPS = 5.0
"""How many times as long as a usual step nothing has happened: an evaluation or a checkpoint takes
one or two steps' time."""

STALLED_S = 300.0
"""Seconds without an event below which a job is not called stalled: loading a model takes as
long."""

MANY_RECOVERIES = 3
"""Recoveries of one job: one or two are machines that come and go."""


def ended_badly(facts: Facts) -> Iterator[Finding]:
    """The job failed, or is paused and needs an operator, though no person paused it."""
    record = facts.record
    if record is None or record.status not in ("failed", "paused"):
        return
    why = record.error or "no reason is known"
    if record.status == "failed":
        yield Finding(
            code="failed",
            level="problem",
            title=f"the job failed after step {record.step}: {why}",
            since_step=record.step,
            evidence=(Evidence(metric="record", text=why),),
            cause=why,
            remedy="fix what it says, and submit the job again, from its newest checkpoint as "
            "model if it has one (`hone checkpoints`)",
        )
    elif record.error != PAUSED_ON_REQUEST and not is_put_away(why):
        yield Finding(
            code="paused",
            level="problem",
            title=f"the job is paused after step {record.step}: {why}",
            since_step=record.step,
            evidence=(Evidence(metric="record", text=why),),
            cause=why,
            remedy="fix what it says, then `hone resume`; it continues where it was",
        )


def waits(facts: Facts) -> Iterator[Finding]:
    """A queued or running job lacks something: a service, its data, a folder."""
    record = facts.record
    if record is None or record.status not in ("queued", "running"):
        return
    away = {at: each for at, each in record.waits_for.items() if each.away}
    if record.waits:
        yield _waits(record, record.waits)
    elif record.place is not None and away and len(away) == len(record.waits_for):
        told = "; ".join(f"the trainer {at} {each.why}" for at, each in sorted(away.items()))
        yield _waits(record, told)


def _waits(record: JobRecord, what: str) -> Finding:
    return Finding(
        code="waits",
        level="problem",
        title=f"the {record.status} job waits: {what}",
        since_step=record.step,
        evidence=(Evidence(metric="record", text=what),),
        cause="something that the job needs is unreachable",
        remedy="bring it back (`hone doctor` shows the services); the job continues automatically",
    )


def stalled(facts: Facts) -> Iterator[Finding]:
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
    yield Finding(
        code="stalled",
        level="problem" if gone else "warning",
        title=f"nothing has happened for {silent_s:.0f} s"
        + (f"; a step takes {usual_s:.0f} s" if usual_s else ""),
        since_step=record.step,
        evidence=(Evidence(metric="record", text=doing),),
        cause="no orchestrator works on it: the lease of its worker has ended" if gone else doing,
        remedy="start an orchestrator with this Redis and HONE_RUNS_DIR; the job then continues"
        if gone
        else "see the log of the service that it waits for; after HONE_STALL_S the events name it",
        keys=("HONE_RUNS_DIR",) if gone else ("HONE_STALL_S",),
    )


def recovers_often(facts: Facts) -> Iterator[Finding]:
    """The job lost a service's state again and again."""
    record = facts.record
    if record is None or record.recoveries < MANY_RECOVERIES:
        return
    replayed = facts.of("replayed")
    yield Finding(
        code="recovers_often",
        level="warning",
        title=f"the job continued {record.recoveries} times after a service had lost its state",
        since_step=replayed.steps[0] if replayed else None,
        evidence=(
            Evidence(metric="record", values=(float(record.recoveries),), text="recoveries"),
            *([replayed.evidence(WINDOW)] if replayed else []),
        ),
        cause="a trainer or sampler dies: often the memory of GPU or host is too small",
        remedy="see in the events (`hone logs`) which one, and in its log why; lower "
        "memory.micro_batch_tokens or HONE_GPU_MEMORY_UTILIZATION if memory ran out",
        keys=("memory.micro_batch_tokens", "HONE_GPU_MEMORY_UTILIZATION"),
    )
