"""One attempt at one job: everything around the pipeline. It prepares, continues from the trainer's
step, and after a failure decides what happens to the job (decisions.py). A job waits for missing
needs (needs.py).

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
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from services.orchestrator.data.difficulty import History
from services.orchestrator.data.sources import asks_of, fetch
from services.orchestrator.errors import MustPause, TooDear
from services.orchestrator.grpo.batches import Batches
from services.orchestrator.grpo.comparison import Comparison
from services.orchestrator.grpo.pipeline import Pipeline
from services.orchestrator.grpo.prompts import Prompts, load_prompts
from services.orchestrator.jobs.after_step import AfterStep, Ended
from services.orchestrator.jobs.decisions import (
    LIMITS,
    PAUSES_S,
    Action,
    Decision,
    Outcome,
    decide,
    found_end,
)
from services.orchestrator.jobs.job_loading import Loading
from services.orchestrator.jobs.needs import DataFiles, Needs, check_colocation
from services.orchestrator.jobs.progress import Doing, Progress
from services.orchestrator.jobs.stopping import Spent, price_for, reason_to_stop
from services.orchestrator.jobs.summary import summarize, summarize_evaluation
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.syncing import sync_weights
from services.orchestrator.samplers.waits import watch
from services.orchestrator.seams import NO_EXTENSIONS, Extensions, Program
from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.journal import Journal
from services.orchestrator.store.leases import Lease, LeaseLost
from services.orchestrator.store.store import Store
from services.orchestrator.store.writable import ANSWERS_WITHIN_S
from services.orchestrator.tasks import stop, to_disk, to_the_end
from shared.errors import (
    BadRequest,
    Conflict,
    Failed,
    Forbidden,
    HoneError,
    Unauthorized,
    Unavailable,
)
from shared.host.logs import get_logger, of_job
from shared.host.processes import Look
from shared.settings import Settings
from shared.wire import JobRecord, Prompt, TrainerState

LOOK_AT_IDLE_S = 2.0
"""Seconds between two checks that idle services are there."""

LOOK_AT_MISSING_S = 2.0
"""Seconds between two checks whether missing needs are back."""

NOTE_SPENT_S = 60.0
"""Seconds between two notes of the job's hours and cost in the run folder."""

FILTER_ROOM = 2.0
"""Factor on a job's filter time at its submission. The job was accepted, and the same work takes
longer on a busy machine."""


class Run:
    """One attempt at the job of `record`, under `lease`; `needs` are its trainer's.
    `num_queued` returns how many jobs wait."""

    def __init__(
        self,
        record: JobRecord,
        lease: Lease,
        store: Store,
        settings: Settings,
        needs: Needs,
        extensions: Extensions = NO_EXTENSIONS,
        num_queued: Callable[[], int] = lambda: 0,
    ) -> None:
        self._record = record
        self._job = record.job
        self._settings = settings
        self._folder = RunFolder(Path(record.run_dir))
        self._journal = Journal(store, lease)
        self._store = store
        self._services = Services(
            record.job,
            settings,
            record.id,
            lease.attempt,
            self._journal.aside,
            store.samplers.urls,
            identity=store.identity,
            grading_waits=True,
            beside=lease.beside,
            weight=record.weight,
            key=record.submitted_by,
            extensions=extensions,
        )
        self._extensions = extensions
        self._num_queued = num_queued
        self._needs = needs
        self._data = DataFiles(record.job, settings)
        tracker_of = extensions.tracker_of
        self._tracker = tracker_of and tracker_of(record.job, record.id, self._folder.path)
        self._spent: Spent | None = None
        self._noting = Look[str | None](ANSWERS_WITHIN_S)
        self._after: AfterStep | None = None
        self._began = 0.0
        self._furthest = record.step
        self._recoveries = record.recoveries
        self._in_a_row = 0
        self._tries = lease.tries
        self._stuck_since: float | None = None
        self._trying: asyncio.Task[None] | None = None
        self._doing = Doing()
        self._loading = Loading(
            record, self._services, self._folder, self._journal, self._doing, settings.colocate
        )

    async def run(self) -> Outcome:
        """Returns the job's outcome. Raises LeaseLost if another worker has the job, and
        StoreUnavailable."""
        of_job(self._record.id)
        with self._extensions.attending(self._record.id):
            return await self._run()

    async def _run(self) -> Outcome:
        if ended := await asyncio.to_thread(found_end, self._folder):
            return ended
        if self._tracker:
            self._tracker.start()
        outcome: Outcome | None = None
        try:
            while outcome is None:
                outcome = await self._try()
            return outcome
        finally:
            if self._trying:  # its result is ignored: it may have lost the lease, or the store
                await stop(self._trying)
                await asyncio.gather(self._trying, return_exceptions=True)
            await to_the_end(self._note_spent())
            succeeded = outcome is not None and outcome.status == "succeeded"
            tracked = await self._tracker.finish(succeeded) if self._tracker else None
            if tracked and outcome:
                await self._journal.aside(tracked.message, warning=not tracked.complete)

    def doing(self) -> str:
        """Returns the job's state in a line, for its followers."""
        return self._doing.line(self._services.waits, self._services.away())

    def waits(self) -> str | None:
        """Returns what the job needs and lacks; None if it lacks nothing."""
        return self._doing.waits(self._services.away())

    async def close(self) -> None:
        """Ends the sampler's work for the job, and closes the connections."""
        try:
            await self._services.abort()
        finally:
            self._extensions.forget(self._record.id)
            await to_the_end(self._services.close())

    async def _try(self) -> Outcome | None:
        """Returns the job's outcome, or None if it must be tried again."""
        try:
            summary = await self._watched()
            return Outcome("succeeded", summary.get("stopped"), summary)
        except Exception as error:  # the last resort: every error is decided here
            decision = await self._decide(error)
            if decision.action is Action.STOP:
                raise _stopped(self._record.id, error) from None
            get_logger().warning(
                "job interrupted",
                job=self._record.id,
                action=decision.action.value,
                reason=decision.why,
                exc_info=None if isinstance(error, HoneError) else error,
            )
            is_gone = isinstance(error, HoneError) and error.code == "run_folder_gone"
            if is_gone and decision.action is Action.PAUSE:
                await self._journal.error(decision.why)
        if decision.action is Action.GIVE_BACK:
            why = f"{decision.why}; does another stack use the same trainer or samplers?"
            return Outcome("queued", why)
        if decision.action is Action.PAUSE:
            return Outcome("paused", decision.why)
        # Without these checks another orchestrator could soon take the trainer and the samplers.
        looking = asyncio.create_task(self._look())
        try:
            return await self._recovering(decision)
        finally:
            await stop(looking)

    async def _decide(self, error: Exception) -> Decision:
        if isinstance(error, HoneError) and error.code == "run_folder_gone":
            away = await self._needs.look()  # all run folders may be away
            error = Unavailable(away) if away else error
        return decide(error, self._in_a_row)

    async def _watched(self) -> dict[str, Any]:
        """Trains or evaluates. Watches meanwhile whether the services are there and the job
        moves."""
        services = self._services
        stall_s, tell = self._settings.stall_s, self._journal.stalled
        services.waits.progress_at = time.monotonic()
        work = asyncio.create_task(self._train())
        watching = asyncio.create_task(
            watch(services.waits, stall_s, services.pool.under_way, tell)
        )
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
            await self._services.look()

    async def _recovering(self, decision: Decision) -> Outcome | None:
        """Returns None once the job can be loaded again: after a pause, and when everything that it
        needs is there. Otherwise returns its outcome."""
        wait_s = PAUSES_S[min(self._in_a_row, len(PAUSES_S) - 1)]
        self._in_a_row += 1
        self._recoveries += 1
        most = LIMITS.get(decision.action)
        await self._journal.recovering(
            f"{decision.why}; loading the job again "
            f"(recovery {self._in_a_row}{f' of {most}' if most else ''})",
            self._recoveries,
        )
        if self._stuck_since is None:  # grading's wait for the reward service counts
            now = time.time()
            waited_s = now - (self._services.reward_away_since or now)
            self._stuck_since = time.monotonic() - waited_s
        if outcome := await self._until_there(decision.why):
            return outcome
        missing = decision.why if decision.action is Action.WAIT else None
        self._doing.begin(f"waiting {wait_s:g} s", "the model is loaded again", missing)
        await asyncio.sleep(wait_s)
        return None

    async def _until_there(self, why: str) -> Outcome | None:
        """Returns None once the job lacks nothing; its outcome if it stops waiting."""
        began, is_said = time.monotonic(), False
        while (
            missing := await self._needs.look() or await self._data.missing()
        ) or self._is_beyond_limit():
            if self._is_beyond_limit():
                limit = f"for {self._settings.wait_limit_s:g} s, and HONE_WAIT_LIMIT_S is that"
                now = missing or "it is there now"
                return Outcome("paused", f"{why}; it has waited {limit}; {now}")
            is_long = time.monotonic() - began >= self._settings.patience_s
            if missing and is_long and (other := await self._elsewhere()):
                return Outcome("queued", f"{missing}; the job goes to trainer {other}")
            if not is_said:
                await self._journal.warn(f"waits, and continues automatically: {missing}")
            is_said = True
            self._doing.begin("waiting for what it needs", "the model is loaded again", missing)
            await asyncio.sleep(LOOK_AT_MISSING_S)
        if is_said:
            waited_s = time.monotonic() - began
            await self._journal.log(f"all that it needs is there again, after {waited_s:.0f} s")
        return None

    async def _elsewhere(self) -> str | None:
        """Returns another trainer that takes a job now, while this one lacks something; else None.
        A job that has not done a step since it came here stays: it may end its trainers itself."""
        if self._tries > 1 or not await self._needs.look():
            return None
        return await self._needs.another_trainer()

    def _is_beyond_limit(self) -> bool:
        limit_s, since = self._settings.wait_limit_s, self._stuck_since
        return limit_s is not None and since is not None and time.monotonic() - since >= limit_s

    async def _train(self) -> dict[str, Any]:
        if self._job.is_program:
            return await self._drive()
        after = self._after = self._after or await self._begin()
        if not self._job.trains:
            return await self._evaluate(after)
        state = await self._loading()
        if state.step > self._job.steps:  # it was paused before this step was recorded
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
        is_recorded = state.step <= last  # else the last row's weights are gone
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
        versions = await self._services.versions()
        summary = summarize(self._record, rows, checkpoint, train_s, versions, ended.why)
        await to_disk(self._folder.write_summary, summary)
        return summary

    async def _drive(self) -> dict[str, Any]:
        """Does the operations of the job's program until it unloads the model."""
        await self._make_folder()
        state = await self._loading()
        self._doing.begin("doing the program's operations")
        program = Program(
            self._job,
            self._services,
            self._folder,
            self._journal,
            self._note_progress,
            self._num_queued,
            state.step,
        )
        last = await self._extensions.drive(program)
        try:
            checkpoint = (await self._services.checkpoint(last)).path
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
        await to_disk(self._folder.write_summary, summary)
        return summary

    async def _evaluate(self, after: AfterStep) -> dict[str, Any]:
        """Evaluates the models of a job of 0 steps. Each model's scores on a held-out set count as
        a step: new ones reset the count of recoveries."""
        sets, tell = after.prompts.sets, self._doing.begin
        comparison = Comparison(self._job, sets, self._services, self._folder, self._journal, tell)
        self._furthest = max(self._furthest, await comparison.begin())
        while (asked := comparison.next) is not None:
            if why := after.spent.beyond(self._job.stop):
                raise TooDear(why)
            await comparison.evaluate(*asked)
            self._note_progress(self._furthest + 1)
        summary = summarize_evaluation(
            self._record, comparison.report(), await self._services.versions()
        )
        await to_disk(self._folder.write_summary, summary)
        return summary

    async def _steps(self, pipeline: Pipeline, last: int, after: AfterStep) -> Ended | None:
        """Trains the steps after `last`. Returns the end of the last step; None if no step was
        left."""
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
        check_colocation(self._job, self._settings)
        await self._make_folder()
        spent = await self._begin_spending()
        self._doing.begin("checking data and rewards", "the model is loaded")
        with self._services.waits.on("data", "reading the prompts"):
            history = History(await asyncio.to_thread(self._folder.verdicts))
            cpu_s = FILTER_ROOM * self._settings.filter_cpu_s
            settings = self._settings.model_copy(update={"filter_cpu_s": cpu_s})
            with _accepted("data"):
                await fetch(asks_of(self._job, settings, self._record.data).values())
                prompts = await asyncio.to_thread(
                    load_prompts, self._job, settings, self._record.data, history
                )
                first = await asyncio.to_thread(prompts.first)
        with _accepted("rewards"):
            await self._services.validate_rewards(prompts.columns, first)
            await self._services.validate_environment(first)
        if not self._record.step:
            self._trying = asyncio.create_task(self._try_rewards(first))
        return AfterStep(
            self._job,
            prompts,
            self._services,
            self._folder,
            self._journal,
            self._tracker,
            spent,
            self._settings.max_missing_rewards,
            self._store.models_below,
        )

    async def _make_folder(self) -> None:
        await to_disk(
            self._folder.create,
            self._job,
            self._record.data,
            self._store.identity,
            has_begun=self._record.step > 0 or self._record.attempts > 1,
        )
        await to_disk(self._folder.write_note, await self._store.note(self._record.id))

    async def _begin_spending(self) -> Spent:
        """Begins to count the attempt's hours and cost. Raises TooDear for a job that has reached
        its cost limit and has more to do."""
        rows = await asyncio.to_thread(self._folder.metrics)
        if self._spent is None:
            hours, cost = await asyncio.to_thread(self._folder.spent)
            try:
                price = price_for(self._job, self._settings)
            except BadRequest as error:  # the price was known at submission
                raise MustPause(error.detail) from error
            self._spent = Spent(rows, hours, price, cost)
        has_more = self._job.steps > 0 and (
            not rows
            or (rows[-1].step < self._job.steps and not reason_to_stop(rows[-1], self._job.stop))
        )
        if has_more and (why := self._spent.beyond(self._job.stop)):
            raise TooDear(why)
        return self._spent

    async def _try_rewards(self, prompts: tuple[Prompt, ...]) -> None:
        """Reports the rewards' values for known answers, while the model is loaded."""
        found = await self._services.try_rewards(prompts)
        if found is None:
            return
        await self._journal.log(found.summary)
        for warning in found.warnings:
            await self._journal.warn(warning)

    def _pipeline(self, prompts: Prompts) -> Pipeline:
        services, folder, pushed = self._services, self._folder, None
        if self._job.is_pushed:
            pushed = self._extensions.source_of(folder.path, services.waits)
        batches = Batches(
            self._record.id,
            self._job,
            prompts,
            services,
            folder,
            self._settings.max_missing_rewards,
            self._journal.warn,
            pushed,
        )

        async def sync(step: int) -> float | None:
            synced = await sync_weights(services, folder, self._job, step, self._journal)
            return synced.moved

        return Pipeline(self._job, batches, services, sync, folder)

    async def _keep_spent_noted(self) -> None:
        """Notes hours and cost regularly, so that a killed attempt loses at most NOTE_SPENT_S."""
        while True:
            await asyncio.sleep(NOTE_SPENT_S)
            await self._note_spent()

    async def _note_spent(self) -> None:
        """Notes hours and cost, also of an attempt that recorded no row."""
        if (spent := self._spent) is None:
            return

        def write() -> str | None:
            try:
                self._folder.write_spent(spent.hours, spent.cost)
            except (HoneError, OSError, ValueError) as error:
                return str(error)
            return None

        if why := await self._noting.at(write, "its disk hangs"):  # what becomes of the job
            get_logger().warning("hours not noted", job=self._record.id, reason=why)  # matters more

    def _note_progress(self, step: int) -> None:
        """Resets the count of recoveries once the job has done a new step."""
        if step > self._furthest:
            self._furthest, self._in_a_row, self._tries = step, 0, 1
            self._stuck_since = None


@contextlib.contextmanager
def _accepted(what: str) -> Generator[None]:
    """Raises Failed instead of BadRequest, because the job passed these checks when it was
    submitted. Slow checks are waited for: only the job's own reward code may hang, and the reward
    service ends that by itself, with an error."""
    try:
        yield
    except (Unauthorized, Forbidden):
        raise
    except Unavailable as error:
        if error.code != "deadline":
            raise
        raise Unavailable(error.detail) from error
    except BadRequest as error:
        raise Failed(
            f"its {what} were accepted when it was submitted, and are refused now: {error.detail}"
        ) from error


def _stopped(job_id: str, error: Exception) -> Exception:
    """Returns the exception that tells the worker of an error that stops the run."""
    if isinstance(error, LeaseLost | StoreUnavailable):
        return error
    return LeaseLost(f"{job_id}: {error}")
