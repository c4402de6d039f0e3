"""What is wrong with a run. READ FIRST. Checks are pure functions, or rows of data (`Rule`), over a
run's snapshot (facts.py). Each yields a finding where something is wrong and nothing where all is
well, so page, `hone doctor JOB` and the job's events say the same. The sentences are in
findings.toml, and docs/diagnosis.md has the table of all."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.orchestrator.extensions.diagnosis import reward_hacking, running, samples, training
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot, of_folder
from services.orchestrator.extensions.diagnosis.rules import Rule
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.lists import Readable
from services.orchestrator.tasks import finish_despite_cancel
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import Finding, FindingList, JobRecord

if TYPE_CHECKING:  # FastAPI, which `hone doctor RUN_FOLDER` does not need
    from shared.http.service import Service

Check = Callable[[RunSnapshot], Iterator[Finding]]

OF_STATE: tuple[Check, ...] = (
    running.ended_badly,
    running.waits,
    running.stalled,
    running.recovers_often,
)
"""Checks of the job's state at this moment."""

OF_RUN: tuple[Check, ...] = (
    training.steps_skipped,
    training.updates,
    training.reward_fell,
    reward_hacking.rewarded_copies,
    reward_hacking.rewarded_without_answer,
    samples.no_signal,
    samples.no_update,
    samples.reward_constant,
    samples.rewards_contradict,
    samples.missing_rewards,
    samples.errored_rollouts,
    samples.environment_failures,
    training.held_out_falls,
    training.lengths_collapse,
    training.lengths_at_limit,
    training.one_text,
    samples.truncation,
    samples.overlong_prompts,
    training.spikes,
    training.entropy_collapse,
    training.mismatch,
    training.off_policy,
    samples.evaluation_ignored,
    samples.evaluation_too_small,
    samples.data_exhausted,
    samples.data_repeated,
    samples.own_reward,
    samples.too_few_steps,
    running.slow_stage,
    running.slower,
    running.samplers_wait,
    running.sampler_idle,
)
"""Checks of what the run's files say, and its summary. Of equal level, the state is shown first and
then an earlier check: what holds a run up, then what ruins it, then what follows from that."""

LEVELS = ("problem", "warning", "notice")

MAX_KNOWN = 8
"""Jobs whose last findings are kept, with their rows of metrics: some megabytes each."""


def diagnose(facts: RunSnapshot) -> tuple[Finding, ...]:
    """Returns the findings, the worst first."""
    return _worst_first(run_checks(OF_STATE, facts) + run_checks(OF_RUN, facts))


def diagnose_run(folder: RunFolder, job: Job) -> tuple[Finding, ...]:
    """Returns the findings of a run folder. Reads its rows and its newest batches."""
    return diagnose(of_folder(folder, job))


def run_checks(checks: Sequence[Check], facts: RunSnapshot) -> list[Finding]:
    """Returns what the checks find. One that fails is logged and finds nothing."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += list(check(facts))
        except Exception as error:  # the other checks may still say what is wrong
            name = check.name if isinstance(check, Rule) else check.__name__
            get_logger().error("a check of the run failed", check=name, reason=repr(error))
    return found


def _worst_first(found: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level)))


def findings_of(
    facts: RunSnapshot, record: JobRecord, of_run: Sequence[Finding] | None = None
) -> FindingList:
    """Returns the findings as the API has them. `of_run`: the run's findings; None: unknown."""
    of_run = run_checks(OF_RUN, facts) if of_run is None else of_run
    found = _worst_first([*run_checks(OF_STATE, facts), *of_run])
    return FindingList(
        job_id=record.id,
        status=record.status,
        step=facts.rows[-1].step if facts.rows else 0,
        well=all(finding.level == "notice" for finding in found),
        findings=found,
    )


@dataclass(eq=False)
class _Run:
    """What was found of a run in the state that `read` names. `facts` are without the batches."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    read: tuple[object, ...] = ()
    facts: RunSnapshot | None = None
    found: list[Finding] = field(default_factory=list[Finding])

    def look(self, record: JobRecord) -> RunSnapshot:
        """Returns the run's facts. `found` is what its files say now."""
        folder = RunFolder(Path(record.run_dir))
        state = folder.stamp(), record.job, record.summary
        if self.facts is None or self.read != state:
            facts = of_folder(folder, record.job)
            self.found = run_checks(OF_RUN, replace(facts, record=record))
            self.facts, self.read = replace(facts, batches=(), syncs=()), state
        return self.facts


class Findings:
    """What is wrong with the jobs of a store, for the API. Several pages ask for the same job's
    findings every few seconds, and reading a run takes seconds: one request reads it again, once
    its files have changed."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    async def of(self, job_id: str) -> FindingList:
        """Returns the job's findings. Raises NotFound."""
        record = await self._store.get(job_id)
        newest = await self._store.newest_events(job_id, None, 1)
        run = self._run(job_id)
        async with run.lock:
            facts = await finish_despite_cancel(asyncio.to_thread(run.look, record))
            found = run.found
        facts = facts.about(record, newest[0].time if newest else None, time.time())
        return findings_of(facts, record, found)

    def _run(self, job_id: str) -> _Run:
        run = self._runs[job_id] = self._runs.pop(job_id, None) or _Run()
        for other in [*self._runs][: max(len(self._runs) - MAX_KNOWN, 0)]:
            if not self._runs[other].lock.locked():
                del self._runs[other]
        return run


def add_routes(service: Service, store: Readable) -> None:
    known = Findings(store)

    @service.app.get("/v1/jobs/{job_id}/findings")
    async def findings(job_id: str) -> FindingList:
        """What is wrong with the job, or probably is, the worst first; empty if nothing is."""
        return await known.of(job_id)
