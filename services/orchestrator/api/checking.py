"""Where the checks of submitted jobs (`looking.py`) run: in threads of their own, so that the
orchestrator's other work in threads is not delayed. Work that asks the Hub runs in processes, which
can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, TypeVar

from services.orchestrator.api import looking
from services.orchestrator.api.lengths import prompt_lengths
from services.orchestrator.api.looking import ELSEWHERE, Looked
from services.orchestrator.api.round_robin import RoundRobin
from services.orchestrator.data.allowed import named_model_folder
from services.orchestrator.data.apart import NotInTime, apart
from services.orchestrator.data.hub import fetch_model, hub_url, is_cached
from services.orchestrator.data.sources import FETCH_S, asks_hub
from services.orchestrator.data.tables import ended
from services.orchestrator.seams import Extensions
from shared.errors import Failed, HoneError
from shared.host.processes import in_own_thread
from shared.http.gate import caller
from shared.job import Job
from shared.plan.gpus import CpuRates, GpuGroup
from shared.plan.planning import planned_gpus
from shared.settings import Settings
from shared.weights.model_folder import hub_is_offline
from shared.wire import PromptLengths

NUM_THREADS = 4
"""Checks at a time: more than the two or three processors that they use, so that a quick check is
done beside slow ones."""

MAX_FETCHES = 4
"""Processes at a time that read data sets from the Hub, and as many that fetch models. Each takes a
few hundred MiB."""

MODEL_S = 20.0
"""Seconds that fetching a model's configuration and tokenizer from the Hub may take: some MiB."""

AWAY_S = 60.0
"""Seconds that an unreachable Hub is not asked for another model."""

LENGTHS_S = 10.0
"""Seconds that counting the prompts' tokens for a plan may take."""

T = TypeVar("T")


class Checks:
    """The checks of one orchestrator, and the devices that its plans are for. When its caller has
    gone, a check ends: a process at once, a thread at its next row. Raises Busy if too many checks
    wait."""

    def __init__(
        self,
        settings: Settings,
        extensions: Extensions,
        cpu_rates: CpuRates | None = None,
    ) -> None:
        self._settings, self.extensions = settings, extensions
        self._cpu_rates, self._measuring = cpu_rates or CpuRates(), asyncio.Lock()
        self._threads = RoundRobin(NUM_THREADS)
        self._fetches = RoundRobin(MAX_FETCHES)
        self._models = RoundRobin(MAX_FETCHES)
        self._away: tuple[float, str] | None = None

    async def look(self, job: Job, *, showing: bool = False) -> Looked:
        """Returns the findings about the job's data and models, as `looking.look`."""
        jobs = looking.of_each_model(job)
        for each in jobs:
            # makes no request
            await asyncio.to_thread(named_model_folder, each.model, self._settings)
        why_not = [await self._fetched_model(each) for each in jobs]
        found = await self._run(job, looking.look, job, self._settings, why_not, showing)
        warning = await asyncio.to_thread(self.extensions.warn_of, job)
        return replace(found, warnings=(*found.warnings, warning)) if warning else found

    async def look_at_held_out(self, job: Job) -> None:
        """Raises as `load_held_out`."""
        await self._run(job, looking.look_at_held_out, job, self._settings)

    async def lengths(self, job: Job) -> PromptLengths:
        """Returns the lengths of the job's prompts; why not, if that takes more than `LENGTHS_S` or
        too many checks wait."""
        if not job.trains:
            return PromptLengths()
        settings = self._settings
        try:
            async with asyncio.timeout(LENGTHS_S):
                size_bytes, work = len(job.model_dump_json()), lambda: prompt_lengths(job, settings)
                return await _in_thread(self._threads, size_bytes, work)
        except TimeoutError:
            return PromptLengths(why_not=f"the data was not read within {LENGTHS_S:g} s")
        except HoneError as error:
            return PromptLengths(why_not=error.detail)

    async def planned_gpus(self) -> tuple[GpuGroup, ...]:
        """Returns the devices that plans are for. The first plan for a CPU measures it for two
        seconds, in one thread of its own however many requests wait for the result."""
        async with self._measuring:
            pools = planned_gpus(self._settings)
            return await in_own_thread(lambda: self._cpu_rates.pools(pools))

    @property
    def hub_is_away(self) -> bool:
        """Whether the Hub could not be reached a moment ago."""
        return self._away is not None and time.monotonic() < self._away[0]

    async def _run(self, job: Job, work: Callable[..., T], *args: Any) -> T:
        size_bytes = len(job.model_dump_json())
        if await asyncio.to_thread(asks_hub, job, self._settings):
            if self._away and self.hub_is_away:
                raise Failed(f"the job's data cannot be fetched: {self._away[1]}; {ELSEWHERE}")
            who = (looking.on_behalf_of, caller.get())
            return await _apart(self._fetches, size_bytes, *who, work, *args, deadline_s=FETCH_S)
        return await _in_thread(self._threads, size_bytes, lambda: work(*args))

    async def _fetched_model(self, job: Job) -> str | None:
        """Returns why the Hub's model cannot be checked; None for a folder, and once this machine's
        cache has the necessary files. Raises BadRequest for a model that the Hub does not have."""
        if await asyncio.to_thread(is_cached, job.model, job.model_revision):
            return None
        if hub_is_offline():
            return "it is not in the Hugging Face cache here, and HF_HUB_OFFLINE is set"
        if self._away and self.hub_is_away:
            return self._away[1]
        asked = (fetch_model, job.model, job.model_revision)
        try:
            why_not = await _apart(self._models, 0, *asked, deadline_s=MODEL_S)
        except NotInTime:
            why_not = f"{hub_url()} did not answer in {MODEL_S:g} s"
        self._away = (time.monotonic() + AWAY_S, why_not) if why_not else None
        return why_not


@contextlib.asynccontextmanager
async def _turn(turns: RoundRobin, size_bytes: int) -> AsyncGenerator[None]:
    who = _who()
    began = await turns.begin(who, size_bytes)
    try:
        yield
    finally:
        turns.end(who, began)


async def _apart(
    turns: RoundRobin, size_bytes: int, work: Callable[..., T], *args: Any, deadline_s: float
) -> T:
    async with _turn(turns, size_bytes):
        return await apart(work, *args, deadline_s=deadline_s)


async def _in_thread(turns: RoundRobin, size_bytes: int, work: Callable[[], T]) -> T:
    """Returns the work's result. The work keeps its turn until its thread has ended."""
    who = _who()
    began = await turns.begin(who, size_bytes)
    context, end = contextvars.copy_context(), threading.Event()
    context.run(ended.set, end)
    running = asyncio.ensure_future(in_own_thread(lambda: context.run(work)))
    running.add_done_callback(lambda _: turns.end(who, began))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        end.set()
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


def _who() -> str | None:
    key = caller.get()
    return key.name if key else None
