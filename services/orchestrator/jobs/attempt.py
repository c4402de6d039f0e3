"""One attempt at one job: everything around the pipeline. READ FIRST. It prepares, continues from
the trainer's step, and after a failure recovers (recovery.py).

A job is resumed from existing state: the trainer has its step, the run folder has the scored
batches and the rows of finished steps, and prompts are a function of the step. A step that was
trained but not recorded is asked for again, and the trainer answers from memory. So the death of an
orchestrator costs only time. A trainer that came back from a checkpoint needs no special case: the
steps since are replayed from the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.orchestrator.data.order import History
from services.orchestrator.errors import BudgetExceeded, OperatorActionNeeded
from services.orchestrator.grpo.batches import Batches
from services.orchestrator.grpo.held_out import Comparison
from services.orchestrator.grpo.pipeline import Pipeline
from services.orchestrator.grpo.prompts import Prompts
from services.orchestrator.jobs.after_step import AfterStep, StepEnd
from services.orchestrator.jobs.check_executor import CheckExecutor
from services.orchestrator.jobs.decisions import Outcome, outcome_from_disk
from services.orchestrator.jobs.needs import Dependencies
from services.orchestrator.jobs.preflight import AcceptedData, Preflight
from services.orchestrator.jobs.recovery import Recovery, keep_looking
from services.orchestrator.jobs.results import Spending, summarize, summarize_evaluation
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.status import Caller, watch
from services.orchestrator.samplers.syncing import sync_weights
from services.orchestrator.seams import NO_EXTENSIONS, Extensions, Program
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.leases import Journal, Lease
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import finish_despite_cancel, stop, write_despite_cancel
from shared.errors import Conflict, HoneError
from shared.host.logs import bind
from shared.settings import Settings
from shared.wire import JobRecord, Prompt, TrainerState

CHECKPOINT_TRIES = 3
"""Attempts to write a checkpoint when an operator stops the job. An attempt fails if the step under
way ends meanwhile; the trainer begins no step after that one."""

STATE_DEADLINE_S = 5.0
"""Deadline of the request for the trainer's step when an operator stops the job, and of the retries
of a checkpoint that the trainer cannot write then."""

STALL_S = 600.0
"""Seconds without any answer to a running job (no group sampled or graded, no step, no weights, no
checkpoint) after which its events say which service is waited for. Longer than one call usually
takes, shorter than the deadlines."""


class Attempt:
    """One attempt at the job of `record`, under `lease`; `needs` are its trainer's.
    `num_queued` returns how many jobs wait."""

    def __init__(
        self,
        record: JobRecord,
        lease: Lease,
        store: Store,
        settings: Settings,
        needs: Dependencies,
        extensions: Extensions = NO_EXTENSIONS,
        num_queued: Callable[[], int] = lambda: 0,
    ) -> None:
        self._record = record
        self._job = record.job
        self._settings = settings
        self._folder = RunFolder(Path(record.run_dir))
        self._journal = Journal(store, lease)
        self._store = store
        caller = Caller(
            record.job,
            settings,
            record.id,
            lease.attempt,
            self._journal.aside,
            identity=store.identity,
            beside=lease.beside,
            weight=record.weight,
            key=record.submitted_by,
        )
        self._services = Services.of(caller, store.samplers.urls, extensions, grading_waits=True)
        self._extensions = extensions
        self._num_queued = num_queued
        tracker_of = extensions.tracker_of
        self._tracker = tracker_of and tracker_of(record.job, record.id, self._folder.path)
        self._spending = Spending(record.job, self._folder)
        self._after: AfterStep | None = None
        self._began = 0.0
        self._trying: asyncio.Task[None] | None = None
        self.status = caller.status
        own = record, settings, self._services, self._folder, self._journal
        self._recovery = Recovery(*own, needs, lease.tries)

    async def run(self) -> Outcome:
        """Returns the job's outcome. Raises LeaseLost if another worker has the job, and
        StoreUnavailable."""
        bind(job=self._record.id)
        with self._extensions.attending(self._record.id):
            return await self._run()

    async def _run(self) -> Outcome:
        if ended := await asyncio.to_thread(outcome_from_disk, self._folder):
            return ended
        if self._tracker:
            self._tracker.start()
        outcome: Outcome | None = None
        try:
            while outcome is None:
                try:
                    summary = await self._watched()
                    outcome = Outcome("succeeded", summary.get("stopped"), summary)
                except Exception as error:  # the last resort: every error is decided here
                    outcome = await self._recovery.after(error)
            return outcome
        finally:
            if self._trying:  # its result is ignored: it may have lost the lease, or the store
                await stop(self._trying)
                await asyncio.gather(self._trying, return_exceptions=True)
            await finish_despite_cancel(self._spending.note())
            succeeded = outcome is not None and outcome.status == "succeeded"
            tracked = await self._tracker.finish(succeeded) if self._tracker else None
            if tracked and outcome:
                await self._journal.aside(tracked.message, warning=not tracked.complete)

    async def checkpoint(self) -> None:
        """Writes a checkpoint of the trainer's last step for an operator who stops the job: else
        the steps since the newest one would be trained again. A trainer that does not answer has
        none to write."""
        if self._after is None or not self._job.trains:
            return
        self.status.begin("writing a checkpoint", "the job stops, as was asked for")
        trainer = self._services.trainer
        try:
            for tries_left in reversed(range(CHECKPOINT_TRIES)):
                state = await trainer.state(STATE_DEADLINE_S)
                if state.step == 0 or state.job_id != self._record.id:
                    return
                try:
                    await self._after.checkpoint(state.step, STATE_DEADLINE_S)
                    return
                except Conflict:  # a step that was under way is done now
                    if not tries_left:
                        raise
        except (HoneError, OSError) as error:
            why = error.detail if isinstance(error, HoneError) else error
            await self._journal.warn(
                f"no checkpoint was written: {why}; the steps since the newest one will be trained "
                "again, from the batches on disk"
            )

    async def close(self) -> None:
        """Ends the sampler's work for the job, and closes the connections."""
        try:
            await self._services.abort()
        finally:
            self._extensions.forget(self._record.id)
            await finish_despite_cancel(self._services.close())

    async def _watched(self) -> dict[str, Any]:
        """Trains or evaluates. Watches meanwhile whether the services are there and the job
        moves."""
        services = self._services
        tell = self._journal.aside
        self.status.progress_at = time.monotonic()
        work = asyncio.create_task(self._train())
        watching = asyncio.create_task(
            watch(self.status, STALL_S, services.samplers.pool.under_way, tell)
        )
        looking = asyncio.create_task(keep_looking(services))
        noting = asyncio.create_task(self._spending.keep_noted())
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else watching.result() or {}
        finally:
            await stop(work, watching, looking, noting)

    async def _train(self) -> dict[str, Any]:
        if self._job.is_program:
            return await self._drive()
        after = self._after = self._after or await self._begin()
        if not self._job.trains:
            return await self._evaluate(after)
        state = await self._recovery.load()
        if state.step > self._job.steps:  # it was paused before this step was recorded
            raise OperatorActionNeeded(
                f"the trainer has done step {state.step}, and steps is {self._job.steps}; expected "
                f"{state.step} or more: `hone resume {self._record.id} --set steps={state.step}`"
            )
        pipeline = self._pipeline(after.prompts)
        done = await write_despite_cancel(self._folder.start_at, state.step)
        if done is not None:
            (row, *_) = await asyncio.to_thread(self._folder.metrics, done - 1)
            await after.repeat_events(row)
        elif state.step <= 1:
            self.status.begin("evaluating the untrained model", "step 1")
            await after.start()
        last = await self._last_step(done, state)
        rows = await asyncio.to_thread(self._folder.metrics)
        after.spent.continue_from(rows)
        self._began = self._began or time.monotonic()
        is_recorded = state.step <= last  # else the last row's weights are gone
        ended = StepEnd(why=after.why_ended(rows[-1]) if rows and is_recorded else None)
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
        versions = await self._services.versions()
        summary = summarize(self._record, rows, checkpoint, train_s, versions, ended.why)
        summary["dtype"] = state.dtype
        await write_despite_cancel(self._folder.write_summary, summary)
        return summary

    async def _drive(self) -> dict[str, Any]:
        """Does the operations of the job's program until it unloads the model."""
        await self._make_folder()
        state = await self._recovery.load()
        self.status.begin("doing the program's operations")
        program = Program(
            self._job,
            self._services,
            self._folder,
            self._journal,
            self._recovery.note_progress,
            self._num_queued,
            state.step,
        )
        last = await self._extensions.drive(program)
        try:
            checkpoint = (await self._services.trainer.checkpoint(last)).path
        except Conflict as error:  # a gradient waits for a step that will not come
            checkpoint = None
            await self._journal.warn(f"no last checkpoint: {error.detail}")
        summary = {
            "job": self._record.id,
            "steps": last,
            "checkpoint": checkpoint,
            "wall_s": round(time.time() - self._record.created_at, 3),
            "versions": await self._services.versions(),
        }
        await write_despite_cancel(self._folder.write_summary, summary)
        return summary

    async def _evaluate(self, after: AfterStep) -> dict[str, Any]:
        """Evaluates the models of a job of 0 steps. Each model's scores on a held-out set count as
        a step: new ones reset the count of recoveries."""
        sets = after.prompts.sets
        comparison = Comparison(self._job, sets, self._services, self._folder, self._journal)
        recovery = self._recovery
        recovery.furthest = max(recovery.furthest, await comparison.begin())
        while (asked := comparison.next) is not None:
            if why := after.spent.beyond(self._job.stop):
                raise BudgetExceeded(why)
            await comparison.evaluate(*asked)
            recovery.note_progress(recovery.furthest + 1)
        summary = summarize_evaluation(
            self._record, comparison.report(), await self._services.versions()
        )
        await write_despite_cancel(self._folder.write_summary, summary)
        return summary

    async def _steps(self, pipeline: Pipeline, last: int, after: AfterStep) -> StepEnd | None:
        """Trains the steps after `last`. Returns the end of the last step; None if no step was
        left."""
        self.status.begin_steps(last, self._job.steps)
        ended: StepEnd | None = None
        async with contextlib.aclosing(pipeline.steps(last)) as steps:
            after.begin()
            self.status.begin(f"step {last + 1} of {self._job.steps}")
            async for step in steps:
                number = step.batch.step
                self.status.begin(f"recording step {number} of {self._job.steps}")
                eta_s = self.status.eta_s(number, replayed=step.replayed)
                ended = await after(step, eta_s)
                self._recovery.note_progress(number)
                if ended.why:
                    break
                self.status.begin(f"step {number + 1} of {self._job.steps}")
        return ended

    async def _last_step(self, done: int | None, state: TrainerState) -> int:
        """Returns the last recorded step, after which training continues. The trainer remembers one
        step after it. If the trainer is further, rows were lost, and training continues without
        them."""
        last, first_possible = done or 0, state.step - 1
        if last < first_possible:
            await self._journal.warn(
                f"metrics.jsonl has no rows of steps {last + 1} to {first_possible}, which the "
                "trainer has done; the job continues without them"
            )
        return max(last, first_possible)

    async def _begin(self) -> AfterStep:
        """Makes the run folder, and checks the job's data and rewards."""
        await self._make_folder()
        history = History(await asyncio.to_thread(self._folder.verdicts))
        preflight = Preflight(
            self._job,
            self._settings,
            self._services,
            CheckExecutor(self._settings, self._extensions),
            accepted=AcceptedData(self._record.data, history),
        )
        await preflight.run("settings")
        spent = await self._spending.begin(preflight.price)
        self.status.begin("checking data and rewards", "the model is loaded")
        with self.status.on("data", "reading the prompts"):
            await preflight.run("data")
        await preflight.run("services")
        prompts = preflight.data.prompts
        assert prompts is not None, "an accepted job has prompts"
        if not self._record.step:
            self._trying = asyncio.create_task(self._try_rewards(preflight.data.first))
        return AfterStep(
            self._job,
            prompts,
            self._services,
            self._folder,
            self._journal,
            self._tracker,
            spent,
            self._store.models_below,
        )

    async def _make_folder(self) -> None:
        await write_despite_cancel(
            self._folder.create,
            self._job,
            self._record.data,
            self._store.identity,
            has_begun=self._record.step > 0 or self._record.attempts > 1,
        )
        await write_despite_cancel(self._folder.write_note, await self._store.note(self._record.id))

    async def _try_rewards(self, prompts: tuple[Prompt, ...]) -> None:
        """Reports the rewards' values for known answers, while the model is loaded."""
        found = await self._services.reward.try_rewards(prompts)
        if found is None:
            return
        await self._journal.log(found.summary)
        for warning in found.warnings:
            await self._journal.warn(warning)

    def _pipeline(self, prompts: Prompts) -> Pipeline:
        services, folder, pushed = self._services, self._folder, None
        if self._job.is_pushed:
            pushed = self._extensions.source_of(folder.path, self.status)
        batches = Batches(
            self._record.id,
            self._job,
            prompts,
            services,
            folder,
            self._journal.warn,
            pushed,
        )

        async def sync(step: int) -> float | None:
            return (await sync_weights(services, folder, step, self._journal)).moved

        return Pipeline(self._job, batches, services.trainer, sync, folder)
