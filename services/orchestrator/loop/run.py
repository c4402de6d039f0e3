"""One attempt at one job: everything around the pipeline. Prepare, go on from where the trainer is,
and after a failure decide what becomes of the job (decisions.py).

A job is resumed by what is there already: the trainer says which step it is at, the run folder has
the scored batches and the rows of finished steps, and prompts are a function of the step. A step
that was trained but not recorded is asked for again and answered from the trainer's memory. So an
orchestrator that died costs nothing but time. A trainer that came back from a checkpoint is no
other case: the steps since are replayed from the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from services.orchestrator.data.difficulty import History
from services.orchestrator.loop.after_step import AfterStep, Ended
from services.orchestrator.loop.batches import Batches
from services.orchestrator.loop.colocation import check_colocation
from services.orchestrator.loop.costs import price_for
from services.orchestrator.loop.decisions import (
    MAX_RECOVERIES,
    PAUSES_S,
    Action,
    MustPause,
    TooDear,
    decide,
)
from services.orchestrator.loop.doing import Doing
from services.orchestrator.loop.job_loading import Loading
from services.orchestrator.loop.outcome import Outcome, found_end
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.pipeline import Pipeline
from services.orchestrator.loop.prompts import Prompts, load_prompts
from services.orchestrator.loop.stopping import Spent, reason_to_stop
from services.orchestrator.loop.tasks import stop, to_disk, to_the_end
from services.orchestrator.loop.waits import watch
from services.orchestrator.queue.connection import StoreUnavailable
from services.orchestrator.queue.leases import Lease, LeaseLost
from services.orchestrator.queue.store import Store
from services.orchestrator.record.folder import RunFolder
from services.orchestrator.record.journal import Journal
from services.orchestrator.record.progress import Progress
from services.orchestrator.record.summary import summarize
from services.orchestrator.record.tracking import Tracker
from shared.config import Settings
from shared.errors import BadRequest, HoneError, StateLost, Unavailable
from shared.logs import get_logger, of_job
from shared.plan.prices import Price
from shared.wire import JobRecord, Prompt, TrainerState

LOOK_AT_IDLE_S = 2.0
"""Seconds between two times that services without work are asked whether they are there."""

NOTE_SPENT_S = 60.0
"""Seconds between two notes in the run folder of what the job has taken."""

FILTER_ROOM = 2.0
"""How much longer than at its submission a job's filter may take: it was accepted, and the same
work takes longer on a busy machine."""


class Run:
    def __init__(self, record: JobRecord, lease: Lease, store: Store, settings: Settings) -> None:
        self._record = record
        self._job = record.job
        self._settings = settings
        self._folder = RunFolder(Path(record.run_dir))
        self._journal = Journal(store, lease)
        self._store = store
        self._peers = Peers(
            record.job,
            settings,
            record.id,
            lease.attempt,
            self._journal.presence,
            store.samplers.urls,
        )
        self._tracker = Tracker(record.job, record.id, self._folder.path)
        self._spent: Spent | None = None
        self._after: AfterStep | None = None
        self._began = 0.0
        self._furthest = record.step
        self._recoveries = record.recoveries
        self._in_a_row = 0
        self._trying: asyncio.Task[None] | None = None
        self._doing = Doing()
        self._loading = Loading(
            record, self._peers, self._folder, self._journal, self._doing, settings.colocate
        )

    async def run(self) -> Outcome:
        """Returns what became of the job. Raises LeaseLost if it is another worker's, and
        StoreUnavailable."""
        of_job(self._record.id)
        if ended := await asyncio.to_thread(found_end, self._folder):
            return ended
        self._tracker.start()
        outcome: Outcome | None = None
        try:
            while outcome is None:
                outcome = await self._try()
            return outcome
        finally:
            await self._end_trying()
            await to_the_end(self._note_spent())
            await self._tracker.finish(outcome is not None and outcome.status == "succeeded")

    def doing(self) -> str:
        """Returns what the job is at, for its followers."""
        return self._doing.line(self._peers.waits, self._peers.away())

    async def close(self) -> None:
        """Ends what the sampler still does for the job, and the connections."""
        try:
            await self._peers.abort()
        finally:
            await to_the_end(self._peers.close())

    async def _try(self) -> Outcome | None:
        """Returns what became of the job, or None if it is to be tried again."""
        try:
            summary = await self._watched()
            return Outcome("succeeded", summary.get("stopped"), summary)
        except Exception as error:  # the last resort: decided here, whatever it is
            decision = decide(error, self._in_a_row, has_run=self._furthest > 0)
            if decision.action is Action.STOP:
                raise _stopped(self._record.id, error) from None
            get_logger().warning(
                "job interrupted",
                job=self._record.id,
                action=decision.action.value,
                reason=decision.why,
                exc_info=None if isinstance(error, HoneError) else error,
            )
            if decision.action is not Action.RECOVER:
                if decision.action is Action.FAIL:
                    return Outcome("failed", decision.why)
                if decision.action is Action.GIVE_BACK:
                    return Outcome("queued", decision.why)
                lost_services = isinstance(error, Unavailable | StateLost)
                return Outcome("paused", decision.why, lost_services=lost_services)
            why = decision.why
        await self._recovering(why)
        return None

    async def _watched(self) -> dict[str, Any]:
        """Trains, while the services are watched, and whether anything moves."""
        peers = self._peers
        stall_s, tell = self._settings.stall_s, self._journal.stalled
        peers.waits.progress_at = time.monotonic()
        work = asyncio.create_task(self._train())
        watching = asyncio.create_task(watch(peers.waits, stall_s, peers.under_way, tell))
        looking = asyncio.create_task(self._look())
        noting = asyncio.create_task(self._keep_spent_noted())
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else watching.result() or {}
        finally:
            await stop(work, watching, looking, noting)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AT_IDLE_S)
            await self._peers.look()

    async def _recovering(self, why: str) -> None:
        wait_s = PAUSES_S[self._in_a_row]
        self._in_a_row += 1
        self._recoveries += 1
        await self._journal.recovering(
            f"{why}; loading the job again (recovery {self._in_a_row} of {MAX_RECOVERIES})",
            self._recoveries,
        )
        self._doing.begin(f"waiting {wait_s:g} s", "the model is loaded again")
        await asyncio.sleep(wait_s)

    async def _train(self) -> dict[str, Any]:
        after = self._after = self._after or await self._begin()
        state = await self._loading()
        if state.step > self._job.steps:  # it was paused before that step was recorded
            raise MustPause(
                f"the trainer has done step {state.step}, and steps is {self._job.steps}; expected "
                f"{state.step} or more: `hone resume JOB --set steps={state.step}`"
            )
        pipeline = self._pipeline(after.prompts)
        done = await to_disk(self._folder.start_at, state.step)
        if done is not None:
            (row, *_) = await asyncio.to_thread(self._folder.metrics, done - 1)
            await after.say_again(row)
        elif state.step <= 1:
            self._doing.begin("evaluating the model as it is", "step 1")
            await after.start()
        last = await self._last_step(done, state)
        rows = await asyncio.to_thread(self._folder.metrics)
        after.spent.go_on_from(rows)
        self._began = self._began or time.monotonic()
        is_recorded = state.step <= last  # else there is no going back to the last row's weights
        ended = Ended(why=after.why_ended(rows[-1]) if rows and is_recorded else None)
        if ended.why is None:
            ended = await self._steps(pipeline, last, after) or ended
        train_s = time.monotonic() - self._began
        if ended.why:
            await self._journal.log(ended.why)
        rows = await asyncio.to_thread(self._folder.metrics)
        number = rows[-1].step if ended.why else self._job.steps
        checkpoint = ended.checkpoint
        if checkpoint is None:
            checkpoint = await after.end_at(number)
            rows = await asyncio.to_thread(self._folder.metrics)
        versions = await self._peers.versions()
        summary = summarize(self._record, rows, checkpoint, train_s, versions, ended.why)
        await to_disk(self._folder.write_summary, summary)
        return summary

    async def _steps(self, pipeline: Pipeline, last: int, after: AfterStep) -> Ended | None:
        """Trains the steps after `last`. Returns what came of the one that was the last; None if
        there was none left."""
        progress = Progress(last, self._job.steps)
        ended: Ended | None = None
        async with contextlib.aclosing(pipeline.steps(last)) as steps:
            after.begin()
            self._doing.begin(f"step {last + 1} of {self._job.steps}")
            async for step in steps:
                number = step.batch.step
                self._doing.begin(f"recording step {number} of {self._job.steps}")
                eta_s = progress.eta_s(number, replayed=step.replayed)
                ended = await after(step, eta_s)
                self._note_progress(number)
                if ended.why:
                    break
                self._doing.begin(f"step {number + 1} of {self._job.steps}")
        return ended

    async def _last_step(self, done: int | None, state: TrainerState) -> int:
        """Returns the step to go on after: the last one recorded. The trainer remembers one step
        after that; where it is further, rows were lost, and training goes on without them."""
        last, first_possible = done or 0, state.step - 1
        if last < first_possible:
            await self._journal.warn(
                f"metrics.jsonl has no rows of steps {last + 1} to {first_possible}, which the "
                "trainer has done; the job goes on without them"
            )
        return max(last, first_possible)

    async def _begin(self) -> AfterStep:
        """Makes the run folder, and checks what the job names: its data and its rewards."""
        check_colocation(self._job, self._settings)
        await to_disk(self._folder.create, self._job, self._record.data, self._store.identity)
        await to_disk(self._folder.write_note, await self._store.note(self._record.id))
        spent = await self._begin_spending()
        self._doing.begin("checking data and rewards", "the model is loaded")
        with self._peers.waits.on("data", "reading the prompts"):
            history = History(await asyncio.to_thread(self._folder.verdicts))
            cpu_s = FILTER_ROOM * self._settings.filter_cpu_s
            settings = self._settings.model_copy(update={"filter_cpu_s": cpu_s})
            prompts = await asyncio.to_thread(
                load_prompts, self._job, settings, self._record.data, history
            )
            first = await asyncio.to_thread(prompts.for_step, 1)
        await self._peers.validate_rewards(prompts.columns, first)
        if not self._record.step:
            self._trying = asyncio.create_task(self._try_rewards(first))
        return AfterStep(
            self._job,
            prompts,
            self._peers,
            self._folder,
            self._journal,
            self._tracker,
            spent,
            self._settings.max_missing_rewards,
        )

    async def _begin_spending(self) -> Spent:
        """From now on what the attempt takes counts. Raises TooDear for a job that has cost what it
        may and has more to do."""
        rows = await asyncio.to_thread(self._folder.metrics)
        if self._spent is None:
            hours = await asyncio.to_thread(self._folder.hours)
            cost = await asyncio.to_thread(self._folder.cost)
            self._spent = Spent(rows, hours, self._price(), cost)
        has_more = not rows or (
            rows[-1].step < self._job.steps and reason_to_stop(rows[-1], self._job.stop) is None
        )
        if has_more and (why := self._spent.beyond(self._job.stop)):
            raise TooDear(why)
        return self._spent

    def _price(self) -> Price | None:
        try:
            return price_for(self._job, self._settings)
        except BadRequest as error:  # it was known when the job was submitted
            raise MustPause(error.detail) from error

    async def _try_rewards(self, prompts: tuple[Prompt, ...]) -> None:
        """Says what the rewards give answers that are known, beside the loading of the model."""
        found = await self._peers.try_rewards(prompts)
        if found is None:
            return
        await self._journal.log(found.summary)
        for warning in found.warnings:
            await self._journal.warn(warning)

    def _pipeline(self, prompts: Prompts) -> Pipeline:
        peers, folder = self._peers, self._folder
        max_missing = self._settings.max_missing_rewards
        warn = self._journal.warn
        batches = Batches(self._record.id, self._job, prompts, peers, folder, max_missing, warn)
        return Pipeline(self._job, batches, peers, folder, self._journal)

    async def _end_trying(self) -> None:
        """What it came to matters to nothing: it may have lost the lease, or the store."""
        if self._trying:
            await stop(self._trying)
            await asyncio.gather(self._trying, return_exceptions=True)

    async def _keep_spent_noted(self) -> None:
        """So an attempt that is killed loses no more than NOTE_SPENT_S of what it has taken."""
        while True:
            await asyncio.sleep(NOTE_SPENT_S)
            await self._note_spent()

    async def _note_spent(self) -> None:
        """An attempt that recorded no row has taken its time, too."""
        if (spent := self._spent) is None:
            return
        try:
            await to_disk(self._folder.write_spent, spent.hours, spent.cost)
        except (HoneError, OSError, ValueError) as error:  # what becomes of the job matters more
            get_logger().warning("hours not noted", job=self._record.id, reason=str(error))

    def _note_progress(self, step: int) -> None:
        """Counts recoveries from 0 again once the job has got further than before."""
        if step > self._furthest:
            self._furthest, self._in_a_row = step, 0


def _stopped(job_id: str, error: Exception) -> Exception:
    """Returns how the worker is told of an error that stops it."""
    if isinstance(error, LeaseLost | StoreUnavailable):
        return error
    return LeaseLost(f"{job_id}: {error}")
