"""Where the slow checks of submitted jobs run: in threads of their own, so that the orchestrator's
other work in threads is not delayed. Work that asks the Hub runs in processes, which can be killed.
Callers take turns."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from services.orchestrator.data.hub import fetch_model, hub_url, is_cached
from services.orchestrator.data.sources import FETCH_S, needs_hub
from services.orchestrator.data.subprocesses import SubprocessTimeout, run_in_subprocess
from services.orchestrator.data.tables import ended
from services.orchestrator.jobs.prompt_checks import prompt_lengths
from services.orchestrator.seams import NO_EXTENSIONS, Extensions
from shared.errors import Busy, Failed, HoneError, Unavailable
from shared.host.processes import run_in_thread
from shared.http.gate import caller, caller_name
from shared.job import Job
from shared.settings import Settings
from shared.turns import Turn, Turns
from shared.weights.model_folder import hub_is_offline
from shared.wire import ApiKey, PromptLengths

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

MAX_WAITING_BYTES = 64 << 20
"""Most bytes of jobs that wait for a turn: some ten thousand jobs, or 250 of the largest."""

LEAST_BYTES = 4096
"""Bytes that each job counts for at least."""

MAX_RETRY_AFTER_S = 60

ELSEWHERE = (
    "name a file, or a mirror of the Hub by HF_ENDPOINT; with HF_HUB_OFFLINE=1 the orchestrator "
    "takes what is in its Hugging Face cache"
)

T = TypeVar("T")


class CheckExecutor:
    """Does the slow work of the checks of one orchestrator. When its caller has gone, work ends: a
    process at once, a thread at its next row. Raises Busy if too much work waits."""

    def __init__(self, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> None:
        self.settings, self.extensions = settings, extensions
        self._threads = CheckTurns(NUM_THREADS)
        self._fetches = CheckTurns(MAX_FETCHES)
        self._models = CheckTurns(MAX_FETCHES)
        self._away = 0.0, ""

    async def run(self, job: Job, work: Callable[..., T], *args: Any) -> T:
        """Returns the result of work with the job's data. If that asks the Hub, `work` is a
        module's function, and arguments and result can be pickled. Raises Failed if the Hub cannot
        be reached: asking it again at once would not help."""
        try:
            if not await asyncio.to_thread(needs_hub, job, self.settings):
                return await self.in_thread(job, work, *args)
            if why := self.hub_away:
                raise Unavailable(f"the job's data cannot be fetched: {why}")
            turns, size_bytes = self._fetches, len(job.model_dump_json())
            looking = _on_behalf_of, caller.get(), work, *args
            names = (job.data.train, job.data.eval)
            shown = ", ".join(f"{one!r:.100}" for one in names if isinstance(one, str))
            what = f"reading the job's data ({shown or 'of evaluation.sets'})"
            return await _in_process(turns, size_bytes, *looking, deadline_s=FETCH_S, what=what)
        except Busy:
            raise
        except Unavailable as error:
            raise Failed(f"{error.detail}; {ELSEWHERE}") from error

    async def in_thread(self, job: Job, work: Callable[..., T], *args: Any) -> T:
        """Returns the work's result. The work keeps its turn until its thread has ended."""
        turn = await self._threads.take(caller_name(), len(job.model_dump_json()))
        context, end = contextvars.copy_context(), threading.Event()
        context.run(ended.set, end)
        running = asyncio.ensure_future(run_in_thread(lambda: context.run(work, *args)))
        running.add_done_callback(lambda _: self._threads.end(turn))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            end.set()
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def fetched_model(self, job: Job) -> str | None:
        """Returns why the Hub's model cannot be checked; None for a folder, and once this machine's
        cache has the necessary files. Raises BadRequest for a model that the Hub does not have."""
        if await asyncio.to_thread(is_cached, job.model, job.model_revision):
            return None
        if hub_is_offline():
            return "it is not in the Hugging Face cache here, and HF_HUB_OFFLINE is set"
        if self.hub_away:
            return self.hub_away
        asked = (fetch_model, job.model, job.model_revision)
        what = f"fetching the model {job.model!r}"
        try:
            why_not = await _in_process(self._models, 0, *asked, deadline_s=MODEL_S, what=what)
        except SubprocessTimeout:
            why_not = f"{hub_url()} did not answer in {MODEL_S:g} s"
        self._away = time.monotonic() + AWAY_S if why_not else 0.0, why_not or ""
        return why_not

    async def lengths(self, job: Job) -> PromptLengths:
        """Returns the lengths of the job's prompts; why not, if that takes more than `LENGTHS_S` or
        too many checks wait."""
        if not job.trains:
            return PromptLengths()
        try:
            async with asyncio.timeout(LENGTHS_S):
                return await self.in_thread(job, prompt_lengths, job, self.settings)
        except TimeoutError:
            return PromptLengths(why_not=f"the data was not read within {LENGTHS_S:g} s")
        except HoneError as error:
            return PromptLengths(why_not=error.detail)

    @property
    def hub_away(self) -> str | None:
        """Why the Hub could not be reached a moment ago; None if it could."""
        until, why = self._away
        return why if time.monotonic() < until else None


async def _in_process(
    turns: CheckTurns,
    size_bytes: int,
    work: Callable[..., T],
    *args: Any,
    deadline_s: float,
    what: str,
) -> T:
    turn = await turns.take(caller_name(), size_bytes)
    try:
        return await run_in_subprocess(work, *args, deadline_s=deadline_s, what=what)
    finally:
        turns.end(turn)


def _on_behalf_of(who: ApiKey | None, work: Callable[..., T], *args: Any) -> T:
    """Returns the result of `work`, run with the rights of the API key `who`."""
    caller.set(who)
    return work(*args)


class CheckTurns:
    """Serves `num` requests at a time, fairly by caller. A caller never gets the last free place if
    it has all others, so another caller need not wait for slow work. Beyond `MAX_WAITING_BYTES`,
    raises Busy for a caller that has its share of these waiting already, so that no caller keeps
    others out."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._turns = Turns(num, most_of_one=max(num - 1, 1))
        self._bytes: Counter[Hashable] = Counter()  # that wait, by caller
        self._mean_s = 1.0

    async def take(self, who: Hashable, size_bytes: int = 0) -> Turn:
        """Waits for a turn of `who`, which `end` ends."""
        size_bytes = max(size_bytes, LEAST_BYTES)
        share = MAX_WAITING_BYTES / len(self._bytes.keys() | {who})
        is_full = self._bytes.total() + size_bytes > MAX_WAITING_BYTES
        if is_full and self._bytes[who] and self._bytes[who] + size_bytes > share:
            raise self._busy()
        self._bytes[who] += size_bytes
        try:
            return await self._turns.take((who,))
        finally:
            self._bytes -= Counter({who: size_bytes})  # forgets who has none

    def end(self, turn: Turn) -> None:
        self._mean_s += 0.1 * (turn.end() - self._mean_s)

    def _busy(self) -> Busy:
        num = self._turns.num_waiting
        wait_s = math.ceil(num * self._mean_s / self._num)
        return Busy(
            f"{num} jobs wait to be checked, which take {self._bytes.total()} bytes; at most "
            f"{MAX_WAITING_BYTES} are held: ask again",
            retry_after_s=min(max(wait_s, 1), MAX_RETRY_AFTER_S),
        )
