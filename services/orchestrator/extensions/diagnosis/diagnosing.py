"""What is wrong with a run. READ FIRST. Checks are pure functions over a run's snapshot (facts.py).
Each yields a finding where something is wrong and nothing where all is well, so page, `hone doctor
JOB` and the job's events say the same. The sentences are in findings.toml, and docs/diagnosis.md
has the table of all.

`python -m services.orchestrator.extensions.diagnosis.diagnosing RUN_FOLDER` prints the findings of
a run folder as JSON, without a stack. `hone doctor RUN_FOLDER` runs it in a process of its own,
because `hone` imports no service."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from services.orchestrator.extensions.diagnosis import checks, reward_hacking
from services.orchestrator.extensions.diagnosis.facts import (
    RunSnapshot,
    alone,
    entries,
    of_folder,
)
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.lists import Readable
from services.orchestrator.tasks import finish_despite_cancel
from shared.errors import HoneError
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import Finding, FindingList, JobRecord

if TYPE_CHECKING:  # FastAPI, which `hone doctor RUN_FOLDER` does not need
    from shared.http.service import Service

Check = Callable[[RunSnapshot], Iterator[Finding]]

OF_RUN: tuple[Check, ...] = (
    checks.steps_skipped,
    checks.updates,
    checks.no_update,
    checks.mismatch,
    checks.reward_fell,
    checks.held_out_falls,
    reward_hacking.reward_hacks,
    checks.no_signal,
    checks.reward_constant,
    checks.by_metric,
    checks.evaluation_ignored,
    checks.own_reward,
    checks.too_few_steps,
)
"""Checks of what the run's files say. `checks.state` is of the job at this moment."""

LEVELS = ("problem", "warning", "notice")

MAX_KNOWN = 8
"""Jobs whose last findings are kept, with their rows of metrics: some megabytes each."""


def diagnose(facts: RunSnapshot) -> tuple[Finding, ...]:
    """Returns the findings, the worst first. Findings of equal level are in the order of
    findings.toml: what blocks a run, what ruins it, then consequences."""
    return _worst_first(run_checks((checks.state, *OF_RUN), facts))


def diagnose_run(folder: RunFolder, job: Job) -> tuple[Finding, ...]:
    """Returns the findings of a run folder. Reads its rows and its newest batch."""
    return diagnose(of_folder(folder, job))


def run_checks(which: Sequence[Check], facts: RunSnapshot) -> list[Finding]:
    """Returns what the checks find. One that fails is logged and finds nothing."""
    found: list[Finding] = []
    for check in which:
        try:
            found += list(check(facts))
        except Exception as error:  # the other checks may still say what is wrong
            get_logger().error(
                "a check of the run failed", check=check.__name__, reason=repr(error)
            )
    return found


def _worst_first(found: Sequence[Finding]) -> tuple[Finding, ...]:
    order = [entry.code for entry in entries().values()]
    return tuple(sorted(found, key=lambda one: (LEVELS.index(one.level), order.index(one.code))))


def findings_of(facts: RunSnapshot, record: JobRecord, found: Sequence[Finding]) -> FindingList:
    """Returns the findings as the API has them."""
    return FindingList(
        job_id=record.id,
        status=record.status,
        step=facts.rows[-1].step if facts.rows else 0,
        well=all(finding.level == "notice" for finding in found),
        findings=_worst_first(found),
    )


class Findings:
    """What is wrong with the jobs of a store, for the API. Several pages ask for the same job's
    findings every few seconds, and reading a run takes seconds: one request reads it again, once
    its files have changed."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._known: dict[str, tuple[object, RunSnapshot, list[Finding]]] = {}

    async def of(self, job_id: str) -> FindingList:
        """Returns the job's findings. Raises NotFound."""
        record = await self._store.get(job_id)
        newest = await self._store.newest_events(job_id, None, 1)
        async with self._reading.setdefault(job_id, asyncio.Lock()):
            facts, found = await finish_despite_cancel(asyncio.to_thread(self._look, record))
        last_event_at = newest[0].time if newest else None
        facts = replace(facts, record=record, last_event_at=last_event_at, now=time.time())
        return findings_of(facts, record, [*run_checks([checks.state], facts), *found])

    def _look(self, record: JobRecord) -> tuple[RunSnapshot, list[Finding]]:
        """Returns the run's facts without its batches, and what its files say now."""
        folder = RunFolder(Path(record.run_dir))
        state = folder.stamp(), record.job
        known = self._known.pop(record.id, None)
        if known is None or known[0] != state:
            facts = of_folder(folder, record.job)
            found = run_checks(OF_RUN, facts)
            known = state, replace(facts, newest=None, syncs=()), found
        self._known[record.id] = known
        for oldest in [*self._known][:-MAX_KNOWN]:
            self._known.pop(oldest, None)
        return known[1], known[2]


def add_routes(service: Service, store: Readable) -> None:
    known = Findings(store)

    @service.app.get("/v1/jobs/{job_id}/findings")
    async def findings(job_id: str) -> FindingList:
        """What is wrong with the job, or probably is, the worst first; empty if nothing is."""
        return await known.of(job_id)


def main() -> None:
    try:
        facts, record = alone(Path(sys.argv[1]))
    except HoneError as error:
        sys.stderr.write(error.detail)
        sys.exit(2)
    sys.stdout.write(findings_of(facts, record, diagnose(facts)).model_dump_json())


if __name__ == "__main__":
    main()
