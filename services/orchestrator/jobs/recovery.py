"""Loads a job into its services, and loads it again after an error: decides what happens to the job
(decisions.py), waits for missing needs (needs.py), and counts recoveries without a new step."""

from __future__ import annotations

import asyncio
import time

from services.orchestrator.jobs.decisions import (
    LIMITS,
    PAUSES_S,
    Action,
    Decision,
    Outcome,
    decide,
)
from services.orchestrator.jobs.needs import DataFiles, Dependencies
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.syncing import sync_weights
from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.leases import Journal, LeaseLost
from services.orchestrator.tasks import gather_all, stop
from shared.errors import HoneError, Unavailable
from shared.host import tracing
from shared.host.logs import get_logger
from shared.settings import Settings
from shared.wire import JobRecord, TrainerState

LOOK_AT_SERVICES_S = 2.0
"""Seconds between two looks at the job's services."""

LOOK_AT_MISSING_S = 2.0
"""Seconds between two checks whether missing needs are back."""


class Recovery:
    """Loads the job of one attempt, which its lease says is number `tries` in a row without a new
    step. `furthest` is the last new step. `needs` are the needs of the job's trainer."""

    def __init__(
        self,
        record: JobRecord,
        settings: Settings,
        services: Services,
        folder: RunFolder,
        journal: Journal,
        needs: Dependencies,
        tries: int,
    ) -> None:
        self._record, self._settings = record, settings
        self._services, self._folder = services, folder
        self._journal, self._status = journal, services.status
        self._needs, self._data = needs, DataFiles(record.job, settings)
        self.furthest = record.step
        self._num_recoveries = record.recoveries
        self._in_a_row = 0
        self._tries = tries
        self._stuck_since: float | None = None
        self._restarts: int | None = None

    async def load(self) -> TrainerState:
        """Loads the job into trainer and sampler, and makes the sampler serve the trainer's last
        step."""
        trace = tracing.begin("load job", job=self._record.id)
        with trace.within():
            state = await self._load()
        trace.end()
        return state

    async def _load(self) -> TrainerState:
        self._services.new_epoch()
        self._status.begin("loading the model", "its weights go to the sampler", loads=True)
        await self._journal.log("loading the model into the trainer and the sampler")
        state = await self._load_both()
        if self._restarts is not None and state.restarts > self._restarts and state.last_failure:
            await self._journal.warn(f"the trainer was started again: {state.last_failure}")
        self._restarts = state.restarts
        self._status.begin("bringing the weights to the sampler", f"step {state.step + 1}")
        await sync_weights(self._services, self._folder, state.step, self._journal)
        await self._journal.loaded(state, self.furthest)
        return state

    async def _load_both(self) -> TrainerState:
        """Loads both at once, or one after the other if the trainer is on a GPU. The sampler may be
        on the same GPU: while it starts it measures free memory, and would count memory that the
        trainer takes meanwhile as its own."""
        in_turn = self._settings.colocate or (await self._services.trainer.state()).gpu is not None
        if in_turn:
            await self._services.samplers.load_model()
            await self._services.samplers.free_gpu()
            return await self._services.trainer.load_job()
        state, _ = await gather_all(
            [self._services.trainer.load_job(), self._services.samplers.load_model()]
        )
        assert state is not None, "the first is the trainer's"
        return state

    def note_progress(self, step: int) -> None:
        """Resets the count of recoveries once the job has done a new step."""
        if step > self.furthest:
            self.furthest, self._in_a_row, self._tries = step, 0, 1
            self._stuck_since = None

    async def after(self, error: Exception) -> Outcome | None:
        """Returns the job's outcome after the error; None once the job can be loaded again. Raises
        LeaseLost or StoreUnavailable for an error that stops the attempt without a report."""
        decision = await self._decide(error)
        if decision.action is Action.STOP:
            stops = LeaseLost | StoreUnavailable
            raise (
                error if isinstance(error, stops) else LeaseLost(f"{self._record.id}: {error}")
            ) from None
        get_logger().warning(
            "job interrupted",
            job=self._record.id,
            action=decision.action.value,
            reason=decision.why,
            exc_info=None if isinstance(error, HoneError) else error,
        )
        if decision.action is Action.GIVE_BACK:
            why = f"{decision.why}; does another stack use the same trainer or samplers?"
            return Outcome("queued", why)
        if decision.action is Action.PAUSE:
            if _is_folder_gone(error):
                await self._journal.error(decision.why)
            reason, resumes = decision.pause_reason, decision.resumes
            return Outcome("paused", decision.why, pause_reason=reason, resumes=resumes)
        # Without these checks another orchestrator could soon take the trainer and the samplers.
        looking = asyncio.create_task(keep_looking(self._services))
        try:
            return await self._recover(decision)
        finally:
            await stop(looking)

    async def _decide(self, error: Exception) -> Decision:
        if _is_folder_gone(error) and (away := await self._needs.look()):
            error = Unavailable(away)  # all run folders may be unreachable
        return decide(error, self._in_a_row, self._record.id)

    async def _recover(self, decision: Decision) -> Outcome | None:
        """Returns None once the job can be loaded again: after a pause, and when everything that it
        needs is there. Otherwise returns its outcome."""
        wait_s = PAUSES_S[min(self._in_a_row, len(PAUSES_S) - 1)]
        self._in_a_row += 1
        self._num_recoveries += 1
        most = LIMITS.get(decision.action)
        await self._journal.recovering(
            f"{decision.why}; loading the job again "
            f"(recovery {self._in_a_row}{f' of {most}' if most else ''})",
            self._num_recoveries,
        )
        if self._stuck_since is None:  # grading's wait for the reward service counts
            now = time.time()
            waited_s = now - (self._status.unreachable_since("the reward service") or now)
            self._stuck_since = time.monotonic() - waited_s
        if outcome := await self._until_ready(decision.why):
            return outcome
        missing = decision.why if decision.action is Action.WAIT else None
        self._status.begin(f"waiting {wait_s:g} s", "the model is loaded again", missing)
        await asyncio.sleep(wait_s)
        return None

    async def _until_ready(self, why: str) -> Outcome | None:
        """Returns None once the job lacks nothing; its outcome if it stops waiting."""
        began, is_said = time.monotonic(), False
        while (
            missing := await self._needs.look() or await self._data.missing()
        ) or self._is_beyond_limit():
            if self._is_beyond_limit():
                limit = f"for {self._settings.wait_limit_s:g} s, the limit HONE_WAIT_LIMIT_S"
                now = missing or "it is available now"
                return Outcome("paused", f"{why}; it has waited {limit}; {now}")
            is_long = time.monotonic() - began >= self._settings.patience_s
            if missing and is_long and (other := await self._elsewhere()):
                return Outcome("queued", f"{missing}; the job goes to trainer {other}")
            if not is_said:
                await self._journal.warn(
                    f"waiting for a dependency, then continues automatically: {missing}"
                )
            is_said = True
            self._status.begin("waiting for its dependencies", "the model is loaded again", missing)
            await asyncio.sleep(LOOK_AT_MISSING_S)
        if is_said:
            waited_s = time.monotonic() - began
            await self._journal.log(f"all dependencies are available again, after {waited_s:.0f} s")
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


def _is_folder_gone(error: Exception) -> bool:
    return isinstance(error, HoneError) and error.code == "run_folder_gone"


async def keep_looking(services: Services) -> None:
    """Looks at the services again and again."""
    while True:
        await asyncio.sleep(LOOK_AT_SERVICES_S)
        await services.look()
