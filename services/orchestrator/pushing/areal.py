"""AReaL's online routes, for agents that drive themselves. A session is one rollout of a job with
`[environment] kind = "pushed"`: its turns are recorded, and when it ends it is stored with its
reward, before the answer. `sampling.group_size` sessions are a group (`environment.group_by`)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from services.orchestrator.play.conversation import failed
from services.orchestrator.play.group import joined
from services.orchestrator.play.sessions import MAX_BODY_BYTES, Session, Sessions
from services.orchestrator.pool.services import Services
from services.orchestrator.pushing.checking import scored
from services.orchestrator.pushing.groups import Pushing, oldest_version
from services.orchestrator.runs.pushed import Joining
from shared.errors import BadRequest, Busy, Conflict, Gone, HoneError
from shared.host.logs import get_logger
from shared.http import codec, openapi, rendering
from shared.http.gate import given_token
from shared.http.service import Service
from shared.wire import (
    JobRecord,
    NoBody,
    Prompt,
    RewardSet,
    ScoredGroup,
    SessionEnded,
    SessionStarted,
    SetReward,
    StartSession,
)

START, REWARD, END = (f"/v1/rl/{verb}" for verb in ("start_session", "set_reward", "end_session"))

OF_SESSIONS = (REWARD, END)
"""The routes that a session's own key allows."""

MAX_ENDED = 65_536

MAX_OPEN = 1024
"""Open sessions of a job. Each is held in memory with its tokens."""

FULL_S = 10
"""Seconds after which an agent that got no session is to ask again."""

LOOK_S = 10.0
"""Most seconds between two looks at a session whether it is idle, closed or not stored yet."""


@dataclass
class Online:
    """A session that is open: `rewards` has the answers' rewards, by their ids. Once it was idle
    for `idle_s` it ends by itself. `is_ending`: it is being stored."""

    session: Session
    job_id: str
    task: str
    idle_s: float
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    is_ending: bool = False
    expiring: asyncio.Task[None] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until it ends by itself, if nothing is asked of it."""
        if self.session.num_under_way:
            return self.idle_s
        return self.session.used_at + self.idle_s - time.monotonic()


def add_routes(service: Service, pushing: Pushing, sessions: Sessions) -> None:
    areal = Areal(pushing, sessions)

    async def start_session(request: Request, job: str | None = None) -> Response:
        """Opens a session of the job that runs here; `job` names it where several do. 429: the job
        has as many groups as `max_staleness` allows, as many sessions that wait for others of their
        tasks, or as many open sessions as it may."""
        return await _render(await areal.start(job, await _read(request, StartSession)), request)

    async def set_reward(request: Request) -> Response:
        """Sets the reward of an answer. A session's reward is the sum of its answers'."""
        asked = await _read(request, SetReward)
        return await _render(areal.reward(_key(request), asked), request)

    async def end_session(request: Request) -> Response:
        """Ends a session; it is on disk when this answers."""
        await _read(request, NoBody)
        return await _render(await areal.end(_key(request)), request)

    for path, handler, body, answer in (
        (START, start_session, StartSession, SessionStarted),
        (REWARD, set_reward, SetReward, RewardSet),
        (END, end_session, NoBody, SessionEnded),
    ):
        service.body(body, "POST", path)
        service.app.add_api_route(
            path, handler, methods=["POST"], responses=openapi.answers(answer)
        )


class Areal:
    def __init__(self, pushing: Pushing, sessions: Sessions) -> None:
        self._pushing = pushing
        self._sessions = sessions
        self._open: dict[str, Online] = {}
        self._ended: OrderedDict[str, SessionEnded] = OrderedDict()

    async def start(self, job: str | None, asked: StartSession) -> SessionStarted:
        """Returns a new session. Raises Busy while the job has no room for its group, or has
        `MAX_OPEN` sessions."""
        services = self._services(job)
        if asked.api_key in self._open:
            await self.end(str(asked.api_key))
        record = await self._pushing.record(services.job_id)
        await self._pushing.check_session_room(record, asked.task_id)
        environment = record.job.environment
        assert environment is not None, "a job of kind pushed has one"
        self._check_number(record.id, environment.episode_s)
        name = f"{asked.task_id}-{secrets.token_hex(4)}"
        session = self._sessions.open(
            services,
            record.job,
            id=f"{services.owner}:{name}",
            min_version=max(record.step - record.job.max_staleness, 0),
            sampling=services.sampling(None).model_copy(update={"n": 1}),
            name=name,
            api_key=asked.api_key,
        )
        self._ended.pop(session.api_key, None)
        online = Online(session, record.id, asked.task_id, environment.episode_s)
        self._open[session.api_key] = online
        online.expiring = asyncio.create_task(self._expire(session.api_key, online))
        return SessionStarted(session_id=name, api_key=session.api_key)

    def reward(self, key: str, asked: SetReward) -> RewardSet:
        """Sets a reward. Raises BadRequest for an answer that the session does not have."""
        online = self._online(key)
        if online.is_ending:  # it may have been stored without this reward
            raise _not_open()
        ids = [turn.id for turn in online.session.recording().turns]
        id = asked.interaction_id or (ids[-1] if ids else None)
        if id not in ids:
            raise BadRequest(
                f"'interaction_id': got {asked.interaction_id!r}; expected one of the "
                f"{len(ids)} answers of session {online.session.name!r}"
            )
        online.rewards[str(id)] = asked.reward
        online.session.used_at = time.monotonic()
        return RewardSet()

    async def end(self, key: str) -> SessionEnded:
        """Ends the session; ending it again gives the same answer."""
        if key not in self._open and (ended := self._ended.get(key)):
            return ended
        online = self._online(key)
        session, count = online.session, online.session.num_turns
        session.close()
        online.is_ending = True
        if count:
            record = await self._pushing.record(online.job_id)
            await asyncio.to_thread(self._store, record, online)
        self._forget(key, online)
        self._ended[key] = answer = SessionEnded(interaction_count=count)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return answer

    def _check_number(self, job_id: str, idle_s: float) -> None:
        of_job = [online for online in self._open.values() if online.job_id == job_id]
        num_open = sum(not online.session.is_closed for online in of_job)
        if num_open >= MAX_OPEN:
            raise Busy(
                f"job {job_id!r} has {num_open} open sessions, expected fewer than {MAX_OPEN} for "
                f"another one; POST {END} ends one, and one that is idle for {idle_s:g} s "
                "(environment.episode_s) ends by itself",
                retry_after_s=FULL_S,
            )

    async def _expire(self, key: str, online: Online) -> None:
        """Ends the session once it is idle. Its rewards were acknowledged, so it is stored with
        them; without any it would not be trained on, and after its job has left it is dropped. One
        that could not be stored when its agent ended it is stored here."""
        session = online.session
        while not online.is_ending and (left_s := online.left_s) > 0:
            await asyncio.sleep(min(left_s, LOOK_S))
        session.close()
        here = online.job_id in self._sessions.pushed
        while self._open.get(key) is online and (online.is_ending or (online.rewards and here)):
            try:
                await self.end(key)
            except BadRequest:  # the job is no more
                break
            except (HoneError, OSError) as error:
                get_logger().warning("session not stored", session=session.id, reason=str(error))
                await asyncio.sleep(LOOK_S)
        self._forget(key, online)

    def _forget(self, key: str, online: Online) -> None:
        if self._open.get(key) is online:  # a later session may have the same key
            del self._open[key]

    def _store(self, record: JobRecord, online: Online) -> None:
        has_answer = bool(online.session.recording().leaves())
        group = online.session.recorded() if has_answer else failed("it has no answer of the model")
        model, job = self._pushing.model(record.job), record.job
        reward = sum(online.rewards.values()) if online.rewards else None
        text = model.text(group.prompt_token_ids)
        part = ScoredGroup(
            prompt=Prompt(index=0, content=text, row={}), group=group, scores=(scored(reward),)
        )
        by_task = job.environment is None or job.environment.group_by == "task"
        task = online.task if by_task else f"prompts that begin with {group.prompt_token_ids[:1]}"
        joining = Joining(job.sampling.group_size, together, partial(oldest_version, record))
        self._pushing.queue(record).end_session(part, online.session.id, task, joining)

    def _online(self, key: str) -> Online:
        if (found := self._open.get(key)) is None:
            raise _not_open()
        return found

    def _services(self, job: str | None) -> Services:
        """Returns the services of the job that runs here."""
        running = self._sessions.pushed
        if job is None and len(running) == 1:
            return next(iter(running.values()))
        if job is None or job not in running:
            here = ", ".join(map(repr, sorted(running))) or "none"
            raise Conflict(
                f'job: got {job!r}; expected a job of kind "pushed" that runs in this '
                f"orchestrator, which are {here}"
            )
        return running[job]


def _not_open() -> Gone:
    return Gone(
        f"the session of this key is not open here; expected the key that POST {START} gave, "
        "before its session ended, was idle for long, or its job or orchestrator ended"
    )


def together(parts: list[ScoredGroup]) -> ScoredGroup:
    """Returns the group of sessions."""
    group = joined([part.group for part in parts])
    scores = tuple(score for part in parts for score in part.scores)
    return ScoredGroup(prompt=parts[0].prompt, group=group, scores=scores)


M = TypeVar("M", bound=BaseModel)


async def _read(request: Request, kind: type[M]) -> M:
    data = await rendering.body_of(request, MAX_BODY_BYTES)
    return codec.decode(kind, data, rendering.media_type(request, data))


async def _render(answer: BaseModel, request: Request) -> Response:
    return await rendering.render(answer, request)


def _key(request: Request) -> str:
    return given_token(request.headers) or ""
