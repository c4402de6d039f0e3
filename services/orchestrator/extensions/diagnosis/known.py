"""The findings of jobs, for the API. Several pages ask for the same job's findings every few
seconds, and reading a run takes seconds: one request reads it again, once its files have
changed."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.orchestrator.extensions.diagnosis.diagnosing import OF_RUN, findings_of, found_by
from services.orchestrator.extensions.diagnosis.facts import Facts
from services.orchestrator.extensions.diagnosis.gathering import of_folder
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.reading import Readable
from services.orchestrator.tasks import to_the_end
from shared.wire import Finding, FindingList, JobRecord

MAX_KNOWN = 8
"""Jobs whose last findings are kept, with their rows of metrics: some megabytes each."""


@dataclass(eq=False)
class _Run:
    """What was found of a run in the state that `read` names. `facts` are without the batches."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    read: tuple[object, ...] = ()
    facts: Facts | None = None
    found: list[Finding] = field(default_factory=list[Finding])

    def look(self, record: JobRecord) -> Facts:
        """Returns the run's facts. `found` is what its files say now."""
        folder = RunFolder(Path(record.run_dir))
        state = folder.stamp(), record.job, record.summary
        if self.facts is None or self.read != state:
            facts = of_folder(folder, record.job)
            self.found = found_by(OF_RUN, replace(facts, record=record))
            self.facts, self.read = replace(facts, batches=(), syncs=()), state
        return self.facts


class Findings:
    """What is wrong with the jobs of a store."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    async def of(self, job_id: str) -> FindingList:
        """Returns the job's findings. Raises NotFound."""
        record = await self._store.get(job_id)
        newest = await self._store.newest_events(job_id, None, 1)
        run = self._run(job_id)
        async with run.lock:
            facts = await to_the_end(asyncio.to_thread(run.look, record))
            found = run.found
        facts = facts.about(record, newest[0].time if newest else None, time.time())
        return findings_of(facts, record, found)

    def _run(self, job_id: str) -> _Run:
        run = self._runs[job_id] = self._runs.pop(job_id, None) or _Run()
        for other in [*self._runs][: max(len(self._runs) - MAX_KNOWN, 0)]:
            if not self._runs[other].lock.locked():
                del self._runs[other]
        return run
