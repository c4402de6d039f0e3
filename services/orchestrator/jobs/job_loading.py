"""Loads a job into trainer and sampler, and reports what takes long there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from services.orchestrator.jobs.progress import Doing
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.syncing import sync_weights
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.journal import Journal
from services.orchestrator.tasks import all_of, stop
from shared.errors import HoneError
from shared.host import tracing
from shared.wire import JobRecord, TrainerState

LOOK_AT_LOADING_S = 2.0
"""Seconds between two questions to trainer and sampler: what do you do, while you load?"""

Ask = Callable[[], Coroutine[Any, Any, str | None]]
"""Returns what a service does at present; None if it does not say."""


@dataclass(frozen=True)
class Loading:
    """The loading of one attempt. `colocate`: trainer and sampler take turns on one GPU."""

    record: JobRecord
    services: Services
    folder: RunFolder
    journal: Journal
    doing: Doing
    colocate: bool

    async def __call__(self) -> TrainerState:
        """Loads the job into trainer and sampler, and makes the sampler serve the trainer's last
        step."""
        trace = tracing.begin("load job", job=self.record.id)
        with trace.within():
            state = await self._load()
        trace.end()
        return state

    async def _load(self) -> TrainerState:
        self.services.new_epoch()
        self.doing.begin("loading the model", "its weights go to the sampler")
        await self.journal.log("loading the model into the trainer and the sampler")
        state = await self._load_both()
        self.doing.begin("bringing the weights to the sampler", f"step {state.step + 1}")
        job = self.record.job
        await sync_weights(self.services, self.folder, job, state.step, self.journal)
        await self.journal.loaded(state)
        return state

    async def _load_both(self) -> TrainerState:
        """Loads both at once, or one after the other if the trainer is on a GPU. The sampler may be
        on the same GPU: while it starts it measures free memory, and would count memory that the
        trainer takes meanwhile as its own."""
        in_turn = self.colocate or (await self.services.trainer_state()).gpu is not None
        watching = asyncio.create_task(self._watch())
        try:
            if in_turn:
                await self.services.put_model()
                await self.services.free_gpu()
                return await self.services.put_job()
            state, _ = await all_of([self.services.put_job(), self.services.put_model()])
            assert state is not None, "the first is the trainer's"
            return state
        finally:
            await stop(watching)

    async def _watch(self) -> None:
        """Reports in the job's events what takes trainer and sampler long."""

        async def trainer_doing() -> str | None:
            return (await self.services.trainer_state()).doing

        asked: dict[str, Ask] = {"trainer": trainer_doing, "sampler": self.services.sampler_doing}
        await asyncio.gather(*(self._watch_one(name, ask) for name, ask in asked.items()))

    async def _watch_one(self, service: str, ask: Ask) -> None:
        """Ignores errors: the watched call meets the same error, and decides about it."""
        while True:
            await asyncio.sleep(LOOK_AT_LOADING_S)
            with contextlib.suppress(HoneError):
                doing, said = await ask(), self.doing.details.get(service)
                if doing and doing != said:
                    await self.journal.log(f"the {service} is {doing}")
                self.doing.details |= {service: doing} if doing else {}
