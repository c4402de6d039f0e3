"""A worker: takes episodes of jobs with `[environment] kind = "worker"` by lease, runs an agent for
each, and reports what it earned. READ FIRST.

Leases are renewed in an event loop of their own, so that an agent that blocks its loop loses no
episode. Nothing here is kept: a worker that is killed loses its episodes to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hone import stack
from hone.async_client import AsyncClient
from hone.client import Background
from shared.errors import (
    BadRequest,
    Forbidden,
    HoneError,
    NotFound,
    Unauthorized,
    Unavailable,
    first_line,
)
from shared.explain import elide
from shared.http.retry import Retry
from shared.wire import TERMINAL, EpisodeResult, JobRecord, LeasedEpisode

Agent = Callable[[dict[str, Any], str, str], Any]
"""Called with the row, a base URL and an API key, of OpenAI's shape. Returns the reward, or a
coroutine of it."""

WAIT_S = 10.0
"""Seconds that a request for episodes waits for one."""

END_S = 3.0
"""Seconds that cancelled agents have to end."""


@dataclass
class Progress:
    """What a worker has done: episodes `done` with a result, `failed` of them without a reward
    because the agent failed, and those `lost` to another worker or a deadline, or whose result was
    refused. `why` is the newest failure."""

    done: int = 0
    failed: int = 0
    lost: int = 0
    running: int = 0
    rewarded: int = 0
    total_reward: float = 0.0
    why: str = ""

    @property
    def mean_reward(self) -> float | None:
        return self.total_reward / self.rewarded if self.rewarded else None

    def as_json(self) -> dict[str, Any]:
        """Returns all of it, for programs."""
        names = ("done", "failed", "lost", "mean_reward", "why")
        return {name: getattr(self, name) for name in names}

    def sentence(self) -> str:
        """Returns all of it, for people."""
        mean = "none" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        lost = f", {self.lost} lost" if self.lost else ""
        failed = f", {self.failed} failed: {self.why}" if self.failed else ""
        return (
            f"{self.done} episodes done, {self.running} running, mean reward {mean}{lost}{failed}"
        )


def work(
    agent: Agent,
    *,
    job: str | None = None,
    concurrency: int = 8,
    url: str | None = None,
    token: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Runs `agent` for episodes, `concurrency` at a time, until it is interrupted; of one job, also
    until that has ended. Returns what was done. Without `url` the orchestrator is the commands':
    HONE_ORCHESTRATOR_URL, or the stack of this folder. `tell` gets a sentence when the orchestrator
    is unreachable or takes no result, and when the job is paused or has ended; `progress` gets the
    numbers after each episode. Raises BadRequest."""
    if concurrency < 1:
        raise BadRequest(f"'concurrency' is {concurrency}; expected 1 or more")
    found, found_token = stack.orchestrator() if url is None else (url, None)
    playing, asking = Background(), Background()

    async def run() -> Progress:
        async with AsyncClient(found, token=token or found_token) as client:
            worker = Worker(agent, client, playing, concurrency, tell, progress)
            return await worker.run(job)

    try:
        return asking.run(run())
    finally:
        asking.close()
        with contextlib.suppress(KeyboardInterrupt):  # of someone in a hurry
            playing.run(_ended())
        playing.close()


async def _ended() -> None:
    """Waits for agents that were cancelled and clean up."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=END_S)


@dataclass
class Worker:
    """Leases episodes from `client`, and runs up to `concurrency` agents in the loop `playing`.
    `tell` receives messages for the operator, `note` the progress after each change."""

    agent: Agent
    client: AsyncClient
    playing: Background
    concurrency: int
    tell: Callable[[str], None]
    note: Callable[[Progress], None]
    progress: Progress = field(default_factory=Progress)
    _name: str = field(default_factory=lambda: f"{_host()}-{os.getpid()}-{secrets.token_hex(3)}")
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    _lease_s: float = WAIT_S
    _is_away: bool = False
    _is_paused: bool = False

    async def run(self, job: str | None) -> Progress:
        """Works until cancelled, or until `job` has ended. Raises BadRequest."""
        job_id = None if job is None else await self._id_of(job)
        renewing = asyncio.create_task(self._renew_forever())
        try:
            while not await self._has_ended(job_id):
                await self._take(job_id)
            return self.progress
        finally:
            renewing.cancel()
            await self._give_back()

    async def _id_of(self, job: str) -> str:
        """Returns the job's id. Raises BadRequest for a job that has no episodes for workers."""
        record: JobRecord = await self._until_answered(self.client.get, job)
        environment = record.job.environment
        if environment is None or environment.kind != "worker":
            has = f'environment.kind "{environment.kind}"' if environment else "no [environment]"
            raise BadRequest(
                f"job {record.id!r} has {has}, so its rollouts are not played by workers; expected "
                'a job with environment.kind "worker"'
            )
        return record.id

    async def _take(self, job_id: str | None) -> None:
        """Begins episodes, as many as there is room for, as soon as there is any."""
        while len(self._tasks) >= self.concurrency:
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        room = self.concurrency - len(self._tasks)
        leased = await self._until_answered(
            self.client.lease_episodes, self._name, room, job=job_id, wait_s=WAIT_S
        )
        for episode in leased:
            self._lease_s = episode.lease_s
            task = asyncio.create_task(self._play(episode))
            self._tasks[episode.id] = task
            self._count()

    async def _has_ended(self, job_id: str | None) -> bool:
        if job_id is None or self._tasks:
            return False
        try:
            record: JobRecord = await self._until_answered(self.client.get, job_id)
        except NotFound:
            self.tell(f"job {job_id} was deleted; there are no more episodes")
            return True
        if record.status in TERMINAL:
            self.tell(f"job {job_id} has ended ({record.status}); there are no more episodes")
            return True
        if record.status != "paused":
            self._is_paused = False
        elif not self._is_paused:
            self._is_paused = True
            self.tell(
                f"job {job_id} is paused: {record.error}; waiting for its next episode, after "
                f"`hone resume {job_id}`"
            )
        return False

    async def _play(self, episode: LeasedEpisode) -> None:
        try:
            async with asyncio.timeout(episode.deadline_s):
                result = await self._result(episode)
            await self._report(episode.id, result)
        except (asyncio.CancelledError, TimeoutError):
            self.progress.lost += 1
        except Exception as error:  # reported and counted; another try may succeed
            self.progress.lost += 1
            self.tell(
                f"the orchestrator did not take the result of episode {episode.id!r}: "
                f"{first_line(error)}; its lease is returned, and another try may succeed"
            )
            with contextlib.suppress(HoneError):  # the lease expires
                await self.client.renew_leases(self._name, (), returned=(episode.id,))
        finally:
            self._tasks.pop(episode.id, None)
            self._count()

    async def _result(self, episode: LeasedEpisode) -> EpisodeResult:
        row = {"prompt": episode.prompt, **episode.row}
        called = call_agent(self.agent, row, self.client.url + episode.path, episode.api_key)
        loop = self.playing.loop
        try:
            value = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called, loop))
            return result_of(value)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            return failure(AgentFailed("the agent ended with CancelledError of its own"))
        except Exception as error:  # the agent's own code
            return failure(error)

    async def _report(self, id: str, result: EpisodeResult) -> None:
        """Reports a result. One that is refused, such as rewards that do not fit the answers, is
        reported as a failure."""
        try:
            answer = await self._until_answered(self.client.end_episode, id, result)
        except (Unauthorized, Forbidden):
            raise
        except HoneError as error:
            result = failure(AgentFailed(error.detail))
            answer = await self._until_answered(self.client.end_episode, id, result)
        if not answer.taken:
            self.progress.lost += 1
            return
        self.progress.done += 1
        if result.error:
            self.progress.failed, self.progress.why = self.progress.failed + 1, result.error
        if (reward := _total(result)) is not None:
            self.progress.rewarded += 1
            self.progress.total_reward += reward

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if not self._tasks:
                continue
            try:
                renewed = await self.client.renew_leases(self._name, [*self._tasks])
            except HoneError as error:
                self._says_away(error)
                continue
            for id in renewed.unwanted:
                if task := self._tasks.get(id):
                    task.cancel()

    async def _give_back(self) -> None:
        """Ends the agents, and gives their episodes to other workers."""
        ids, tasks = [*self._tasks], [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)
            with contextlib.suppress(HoneError):  # the leases expire
                await self.client.renew_leases(self._name, (), returned=ids)

    async def _until_answered(
        self, call: Callable[..., Awaitable[Any]], *args: Any, **kw: Any
    ) -> Any:
        """Returns what the call returns, however long the orchestrator is unreachable."""
        now = time.monotonic()
        retry = Retry("the orchestrator", call.__name__, now, patience_s=math.inf)
        while True:
            try:
                found = await call(*args, **kw)
                if self._is_away:
                    self._is_away = False
                    self.tell("the orchestrator answers again")
                return found
            except Unavailable as error:
                self._says_away(error)
                pause_s = retry.pause_s(error, time.monotonic())
            await asyncio.sleep(pause_s)

    def _says_away(self, error: HoneError) -> None:
        if not self._is_away:
            self._is_away = True
            self.tell(f"{error.detail}; asking again until it answers")

    def _count(self) -> None:
        self.progress.running = len(self._tasks)
        self.note(self.progress)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:60].lstrip("._-") or "worker"


def _total(result: EpisodeResult) -> float | None:
    """Returns the reward as one number, None if there is none."""
    reward = result.reward
    if reward is None or isinstance(reward, int | float):
        return reward
    entries = reward.values() if isinstance(reward, dict) else reward
    numbers = [each for each in entries if each is not None]
    return sum(numbers) if numbers else None


async def call_agent(agent: Agent, row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Returns what the agent returns. Raises AgentFailed for one that exits: its SystemExit would
    end the loop of all agents."""
    try:
        return await _called(agent, row, base_url, api_key)
    except SystemExit as error:
        raise AgentFailed(f"the agent exited: {error}") from error


async def _called(agent: Agent, row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """A plain function runs in a thread of its own, which does not hold up the end of the
    program."""
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
        return await agent(row, base_url, api_key)
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loop = ended.get_loop()

    def tell(error: BaseException | None, value: Any) -> None:
        if not ended.done():
            ended.set_exception(error) if error else ended.set_result(value)

    def run() -> None:
        error, value = None, None
        try:
            value = agent(row, base_url, api_key)
        except BaseException as raised:  # a thread's last resort: the episode failed
            known = isinstance(raised, Exception | SystemExit)
            error = raised if known else RuntimeError(repr(raised))
        with contextlib.suppress(RuntimeError):  # the program ends
            loop.call_soon_threadsafe(tell, error, value)

    threading.Thread(target=run, name="hone-agent", daemon=True).start()
    value = await ended
    return await value if inspect.isawaitable(value) else value


# --- results -------------------------------------------------------------------------------------

MAX_ERROR = 2000
"""Characters of an agent's failure that are reported; its end says most."""

EXPECTED = (
    "expected a number, None, a list with a number per answer of the model, a dict by the ids of "
    'answers, or {"reward": ..., "metrics": {...}}'
)


class AgentFailed(Exception):
    """The agent did, for a reason that its text says."""


def result_of(value: Any) -> EpisodeResult:
    """Returns the result that `value` stands for. Raises AgentFailed for anything else than
    rewards."""
    if isinstance(value, Mapping) and "reward" in value:
        given = dict(cast(Mapping[str, Any], value))
        reward: Any = given.pop("reward")
        metrics: Any = given.pop("metrics", None) or {}
        if given or not isinstance(metrics, Mapping):
            raise AgentFailed(f"the agent returned {elide(cast(Any, value))}; {EXPECTED}")
        named = cast(Mapping[Any, Any], metrics)
        found = {str(name): _number(f"metric {name}", each) for name, each in named.items()}
        return EpisodeResult(reward=_reward(reward), metrics=found)
    return EpisodeResult(reward=_reward(value))


def failure(error: BaseException) -> EpisodeResult:
    """Returns the result of an agent that raised `error`."""
    told = str(error) if isinstance(error, AgentFailed) else f"{type(error).__name__}: {error}"
    return EpisodeResult(error=told[-MAX_ERROR:] or type(error).__name__)


def _reward(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        by_id = cast(Mapping[Any, Any], value)
        return {str(id): _or_none(f"reward of {id}", each) for id, each in by_id.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        turns = cast(Sequence[Any], value)
        return tuple(_or_none(f"reward of answer {n}", each) for n, each in enumerate(turns))
    return _number("reward", value)


def _or_none(what: str, value: Any) -> float | None:
    return None if value is None else _number(what, value)


def _number(what: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        raise AgentFailed(f"the agent's {what} is {elide(value)}; {EXPECTED}") from None
    if not math.isfinite(number):
        raise AgentFailed(f"the agent's {what} is {elide(value)}; expected a finite number")
    return number
