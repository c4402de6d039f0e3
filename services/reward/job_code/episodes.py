"""Episodes of all jobs' own environments, in which agents act: opened, stepped and closed, each
request once. An episode is a call of its file's worker.

    open      a process of its own, forked from the worker of the job's file: makes the environment
              of a row, resets it
    step      calls tools; turn after turn
    close     returns the environment's own reward; the process ends

A mistake of the job's file is BadRequest. A failure of one episode (an exception in `reset`, a late
answer, a process that ended, a restart of this service) is EpisodeLost: nothing of it is kept but
the reason, and an `open` with its id begins again. A tool that fails is neither: the model is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from services.reward.job_code.workers import Call, CallLost, JobFile, JobWorkers
from services.reward.sandbox.base import SlotDied
from services.reward.sandbox.inside.zygote import UNSAFE_FOLDER
from services.reward.sandbox.verdicts import DecodeError, decode
from shared.errors import BadRequest, Busy, Conflict
from shared.job import EnvironmentSpec
from shared.wire import (
    CloseEpisode,
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOf,
    EpisodeOpened,
    EpisodeStepped,
    OpenEpisode,
    StepEpisode,
    ToolCall,
    ToolResult,
    ValidateEnvironment,
)

KEEP_S = 600.0
"""How long the results of an episode that is over are kept, for requests that come again."""

MAX_EPISODES = 256
"""Open episodes of one worker. Beyond it the answer is 429."""

MAX_ANSWER_ITEMS = 1 << 18
MAX_CHARS = 1000


class EpisodeLost(Conflict):
    """The episode cannot continue, and another one can be opened in its place."""

    default_code = "episode_lost"


def environment_file(environment: EnvironmentSpec, owner: str) -> JobFile:
    """Returns the file of a job's own environment."""
    return JobFile(
        owner=owner,
        file=PurePath(environment.file).name if environment.file else "environment.py",
        source=environment.source,
        named="the environment",
        serve="services.reward.job_code.inside_play",
        options={"folder": f"{UNSAFE_FOLDER}{os.getpid()}-"},
        processes=4 * MAX_EPISODES,
    )


@dataclass
class _Episode:
    """`over`: why it takes no more requests, "" while it does."""

    digest: str
    step_s: float
    idle_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    call: Call | None = None
    opened: EpisodeOpened | None = None
    next_turn: int = 0
    last_calls: tuple[ToolCall, ...] = ()
    last: EpisodeStepped | None = None
    closed: EpisodeClosed | None = None
    over: str = ""
    over_since: float = 0.0
    idle: asyncio.TimerHandle | None = None


class Episodes:
    def __init__(self, workers: JobWorkers, *, allowed: bool) -> None:
        self._workers = workers
        self._allowed = allowed
        self._known: dict[tuple[str, str], _Episode] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def num_open(self) -> int:
        return self._workers.num_calls()

    async def open_episode(self, request: OpenEpisode) -> EpisodeOpened:
        """Makes an environment of the job's own and resets it for a row. The same answer for an
        id that is open."""
        self._check(request.environment)
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        self._forget_old()
        episode = self._known.get((request.job_id, request.id))
        if episode is None or (episode.over and not episode.closed):
            spec = request.environment
            episode = _Episode(digest, step_s=spec.step_s, idle_s=spec.episode_s)
            self._known[request.job_id, request.id] = episode
        if episode.digest != digest:
            raise Conflict(
                f"episode {request.id!r} was opened with another row or environment",
                code="body_differs",
            )
        async with episode.lock:
            if episode.opened is None:
                async with self._asking(episode, "open", request.environment.boot_s):
                    episode.opened = await self._open(episode, request)
            return episode.opened

    async def step_episode(self, request: StepEpisode) -> EpisodeStepped:
        """Calls tools of an open episode, one after the other. The previous turn again gives the
        same answer, and is not run again."""
        episode = self._found(request)
        async with episode.lock:
            if episode.last is not None and request.turn == episode.next_turn - 1:
                if request.calls != episode.last_calls:
                    raise Conflict(
                        f"turn {request.turn} of episode {request.id!r} had other calls",
                        code="body_differs",
                    )
                return episode.last
            if request.turn != episode.next_turn:
                raise Conflict(
                    f"got turn {request.turn} of episode {request.id!r}, expected "
                    f"{episode.next_turn}",
                    code="out_of_order",
                )
            async with self._asking(episode, f"turn {request.turn}", episode.step_s) as call:
                calls = [{"name": call.name, "arguments": call.arguments} for call in request.calls]
                answer = await _asked(call, {"step": calls}, episode.step_s)
                episode.last = _stepped(answer, request.calls)
            episode.last_calls = request.calls
            episode.next_turn += 1
            return episode.last

    async def close_episode(self, request: CloseEpisode) -> EpisodeClosed:
        """Ends an episode, and returns its own reward. Without `rewarded` it ends at once, known or
        not, whatever it does."""
        if not request.rewarded:
            if episode := self._known.get((request.job_id, request.id)):
                self._end(episode, "it was closed")
            return EpisodeClosed()
        episode = self._found(request)
        async with episode.lock:
            if episode.closed is None:
                async with self._asking(episode, "get_reward", episode.step_s) as call:
                    asked = {"close": {"attributes": request.attributes}}
                    answer = await _asked(call, asked, episode.step_s)
                    episode.closed = _closed(answer)
                self._end(episode, "it was closed")
            return episode.closed

    async def validate_environment(self, request: ValidateEnvironment) -> EnvironmentValidated:
        """Says whether an environment can be made and reset for a row; 422 with a sentence, file
        and line if not."""
        self._check(request.environment)
        spec = request.environment
        file = environment_file(spec, request.job_id or f"request {secrets.token_hex(8)}")
        wanted = _wanted(spec, request.row)
        try:
            async with self._opening(file) as call:
                try:
                    answer = await _asked(call, wanted, spec.boot_s)
                    return EnvironmentValidated.model_validate(_opened(answer))
                finally:
                    await call.end()
        except TimeoutError as error:
            raise BadRequest(
                f"the environment was not made and reset within {spec.boot_s:g} s (boot_s)"
            ) from error
        except (EpisodeLost, ValidationError) as error:
            raise BadRequest(f"the environment cannot be reset: {error}") from error
        finally:
            if request.job_id is None:
                await self._workers.release(file)

    async def close(self) -> None:
        """Ends all episodes, with their workers."""
        for episode in self._known.values():
            if episode.idle:
                episode.idle.cancel()
        await self._workers.close()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _check(self, spec: EnvironmentSpec) -> None:
        if not self._allowed:
            raise BadRequest(
                "the environment is the job's own code, which this service does not run "
                "(HONE_ALLOW_JOB_CODE=false)"
            )
        if spec.source is None:
            raise BadRequest(
                f"environment: the text of {spec.file!r} must be sent along as 'source'"
            )

    def _found(self, request: EpisodeOf) -> _Episode:
        episode = self._known.get((request.job_id, request.id))
        if episode is None:
            raise EpisodeLost(
                f"episode {request.id!r} is not known here: it was never opened, it ended long "
                "ago, or the service was restarted since"
            )
        return episode

    async def _open(self, episode: _Episode, request: OpenEpisode) -> EpisodeOpened:
        spec = request.environment
        wanted = _wanted(spec, request.row)
        async with self._opening(environment_file(spec, request.job_id)) as call:
            episode.call = call
            told = _opened(await _asked(call, wanted, spec.boot_s))
        del told["has_reward"]
        return EpisodeOpened.model_validate(told)

    @contextlib.asynccontextmanager
    async def _opening(self, file: JobFile) -> AsyncGenerator[Call]:
        """Yields a new call of the file's worker, which does not end meanwhile."""
        async with self._workers.using(file) as entry:
            try:
                worker = await self._workers.worker(entry)
            except SlotDied as error:
                raise EpisodeLost(f"its worker ended while it was loaded: {error}") from error
            if worker.num_calls() >= MAX_EPISODES:
                raise Busy(
                    f"the job has {MAX_EPISODES} open episodes of this environment, the most"
                )
            yield worker.open()

    @contextlib.asynccontextmanager
    async def _asking(self, episode: _Episode, what: str, limit_s: float) -> AsyncGenerator[Call]:
        """Ends the episode if anything but success leaves the block: its state is unknown. Yields
        its call, None before it is opened."""
        if episode.over:
            raise EpisodeLost(episode.over)
        if episode.idle:
            episode.idle.cancel()
        try:
            yield episode.call  # pyright: ignore[reportReturnType]
            if episode.over:
                raise EpisodeLost(episode.over)
        except TimeoutError as error:
            reason = f"{what} was not done within {limit_s:g} s"
            self._end(episode, reason)
            raise EpisodeLost(reason) from error
        except ValidationError as error:
            self._end(episode, f"{what}: its process sent something that is not an answer")
            raise EpisodeLost(episode.over) from error
        except BaseException as error:  # raised again: whatever it was, the episode is over
            self._end(episode, str(error)[:MAX_CHARS] or f"{what} was given up")
            raise
        episode.idle = asyncio.get_running_loop().call_later(
            episode.idle_s, self._end, episode, f"no request came for {episode.idle_s:g} s"
        )

    def _end(self, episode: _Episode, reason: str) -> None:
        """Takes no more requests of the episode, and has its process ended."""
        if not episode.over:
            episode.over, episode.over_since = reason, time.monotonic()
        if episode.idle:
            episode.idle.cancel()
        if episode.call is not None:
            task = asyncio.create_task(episode.call.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _forget_old(self) -> None:
        before = time.monotonic() - KEEP_S
        for key, episode in [*self._known.items()]:
            if episode.over and episode.over_since < before:
                del self._known[key]


def _wanted(spec: EnvironmentSpec, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the message that opens an episode of the row. Raises BadRequest for a row that names
    none of a table's classes."""
    if spec.kind == "tools":
        return {"open": {"kind": "tools", "tools": spec.tools}}
    try:
        name = spec.class_of(row)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    names = [name]
    if not isinstance(spec.name, str):
        names = list(dict.fromkeys(spec.name.values()))
        row = {column: value for column, value in row.items() if column != "environment"}
    return {"open": {"kind": "class", "names": names, "name": name, "row": row}}


async def _asked(call: Call, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """Returns the answer of the episode's process. Raises TimeoutError, and EpisodeLost for
    anything but a table of plain data."""
    try:
        text = str(await call.ask(message, deadline_s))
        value = decode(text.encode(), max_items=MAX_ANSWER_ITEMS)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
    except CallLost as error:
        raise EpisodeLost(str(error)) from error
    except SlotDied as error:
        raise EpisodeLost(f"the worker of its environment ended: {error}") from error
    except (DecodeError, UnicodeError) as error:
        raise EpisodeLost(f"its process answered with something unreadable: {error}") from error
    if not isinstance(value, dict):
        raise EpisodeLost("its process answered with something that is not a table")
    return value


def _opened(answer: dict[str, Any]) -> dict[str, Any]:
    if "mistake" in answer:
        raise BadRequest(f"the environment cannot be used: {str(answer['mistake'])[:MAX_CHARS]}")
    return {name: _of(answer, name) for name in ("observation", "tools", "has_reward")}


def _stepped(answer: dict[str, Any], calls: tuple[ToolCall, ...]) -> EpisodeStepped:
    told = _of(answer, "results")
    if not isinstance(told, list) or len(told) != len(calls):
        raise EpisodeLost(f"its process did not answer {len(calls)} calls with as many results")
    results = [ToolResult.model_validate(result) for result in told]
    return EpisodeStepped(
        results=tuple(
            result.model_copy(update={"id": call.id})
            for call, result in zip(calls, results, strict=True)
        ),
        done=_of(answer, "done"),
    )


def _closed(answer: dict[str, Any]) -> EpisodeClosed:
    return EpisodeClosed(
        has_reward=_of(answer, "has_reward"),
        reward=_of(answer, "reward"),
        attributes=answer.get("attributes"),
    )


def _of(answer: dict[str, Any], name: str) -> Any:
    """Returns a part of an untrusted answer. Raises EpisodeLost if it is an error, or lacks it."""
    if "error" in answer:
        raise EpisodeLost(str(answer["error"])[:MAX_CHARS])
    if name not in answer:
        raise EpisodeLost(f"its process answered without {name!r}")
    return answer[name]
