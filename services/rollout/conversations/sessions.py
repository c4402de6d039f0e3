"""Sessions: conversations of agents that speak OpenAI's chat API, recorded as the tokens that they
are, so that they can be trained on.

A session belongs to the weights of its first answer: one job, attempt and epoch, of whatever
versions. Its turns are sampled one after another. It is kept in this process only.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from services.rollout.conversations.recording import (
    Recorded,
    json_bytes,
    next_prompt,
    prompt_tokens,
)
from services.rollout.engine import Chat, Overlong
from services.rollout.sampler import Sampler
from shared.errors import BadRequest, Busy, Conflict, NotFound
from shared.host.logs import get_logger
from shared.settings import Settings
from shared.wire import ChatRequest, Fencing, Sampling, ServingWeights, SessionRecord

MAX_FORGOTTEN = 65_536
"""The most forgotten sessions whose reason is kept. Further turns of them are refused, because the
earlier turns would be missing in the record."""


@dataclass
class Session:
    """`weights` sampled its first answer. `last` is the newest request with its answer, for a
    client that sends the request again."""

    weights: ServingWeights
    used_at: float
    conversations: list[Recorded] = field(default_factory=list)
    last: tuple[ChatRequest, dict[str, Any]] | None = None
    last_bytes: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(recorded.num_tokens for recorded in self.conversations)

    @property
    def size_bytes(self) -> int:
        return self.last_bytes + sum(recorded.size_bytes for recorded in self.conversations)

    def answered(self, request: ChatRequest, body: dict[str, Any]) -> None:
        self.last = (request, body)
        self.last_bytes = json_bytes(request.messages) + json_bytes(body)


@dataclass(frozen=True)
class NextTurn:
    """The tokens after which the next answer is sampled: `prompt_token_ids`. Of these, `between`
    are new to the conversation that goes on. If `goes_on` is None, a new conversation begins, and
    `because` says why."""

    prompt_token_ids: list[int]
    goes_on: Recorded | None = None
    between: tuple[int, ...] = ()
    because: str = ""


class Sessions:
    """The sessions of this sampler, by their ids."""

    def __init__(self, sampler: Sampler, settings: Settings) -> None:
        self._sampler = sampler
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self._forgotten: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def size_bytes(self) -> int:
        return sum(session.size_bytes for session in self._sessions.values())

    async def answer(self, id: str, request: ChatRequest, *, again: bool) -> dict[str, Any]:
        """Returns the answer in OpenAI's format, once it is recorded. `again`: the client repeats
        the request, and gets the recorded answer."""
        session = self._open(id)
        session.num_waiting += 1
        try:
            async with session.turn:
                if again and session.last and session.last[0] == request:
                    return session.last[1]
                return await self._next(id, session, request)
        finally:
            session.num_waiting -= 1
            session.used_at = time.monotonic()
            if not session.conversations and not session.num_waiting:
                self._sessions.pop(id, None)

    def record(self, id: str) -> SessionRecord:
        """Returns the session's conversations. Raises NotFound for a session that does not exist
        (any more)."""
        self._forget_idle()
        session = self._sessions.get(id)
        if session is None or not session.conversations:
            raise NotFound(self._forgotten.get(id) or f"there is no session {id!r} here")
        weights = session.weights
        return SessionRecord(
            **weights.model_dump(include={"job_id", *Fencing.model_fields, "replica"}),
            id=id,
            conversations=tuple(recorded.conversation() for recorded in session.conversations),
        )

    def delete(self, id: str) -> None:
        """Forgets the session, if there is one, so that its id can be used again. Raises Conflict
        while a turn of it is under way."""
        session = self._sessions.get(id)
        if session and session.num_waiting:
            raise Conflict(f"a turn of session {id!r} is under way; wait for it, or end it")
        self._sessions.pop(id, None)
        self._forgotten.pop(id, None)

    # --- a turn ----------------------------------------------------------------------------------

    async def _next(self, id: str, session: Session, request: ChatRequest) -> dict[str, Any]:
        if not session.conversations:
            session.weights = self._sampler.serving
        name = f"session {id!r}"
        engine = await self._sampler.engine_with(session.weights, asked_by=name)
        plan = await self._plan(engine.chat, session, request)
        room = engine.max_model_len - len(plan.prompt_token_ids)
        sampling = _sampling(request, room)
        self._check_room(name, session, plan, sampling, engine.max_model_len)
        answer = await self._sampler.answer(
            request, plan.prompt_token_ids, session.weights, asked_by=name
        )
        recorded = plan.goes_on or Recorded(request, plan.prompt_token_ids, plan.because)
        recorded.add(request, plan.between, answer, sampling)
        if plan.goes_on is None:
            session.conversations.append(recorded)
        session.answered(request, answer.body)
        self._make_room()
        if plan.because:
            get_logger().info(
                "session began another conversation", session=id, because=plan.because
            )
        return answer.body

    async def _plan(self, chat: Chat, session: Session, request: ChatRequest) -> NextTurn:
        """Goes on from the latest answer that the request's messages extend. If it is the last
        answer of its conversation, that conversation goes on; else a new one begins with its
        tokens."""
        if not session.conversations:
            return NextTurn(await prompt_tokens(chat, request))
        newest = session.conversations[-1]
        known = [
            (state, recorded)
            for recorded in session.conversations
            if (state := recorded.extended_by(request))
        ]
        if not known:
            return NextTurn(await prompt_tokens(chat, request), because=newest.difference(request))
        state, recorded = max(known, key=lambda each: each[0].num_messages)
        known_ids = recorded.token_ids(state)
        ids, because = await next_prompt(chat, request, state.num_messages, known_ids)
        if because:
            return NextTurn(ids, because=because)
        if state is recorded.states[-1]:
            return NextTurn(ids, goes_on=recorded, between=tuple(ids[len(known_ids) :]))
        return NextTurn(ids, because=recorded.difference(request))

    def _check_room(
        self, name: str, session: Session, plan: NextTurn, sampling: Sampling, max_model_len: int
    ) -> None:
        num_prompt = len(plan.prompt_token_ids)
        if num_prompt + sampling.max_tokens > max_model_len:
            raise Overlong(
                f"{name} has {num_prompt} tokens, and with 'max_tokens' "
                f"{sampling.max_tokens} makes {num_prompt + sampling.max_tokens}; the model holds "
                f"{max_model_len}"
            )
        num_new = len(plan.between) if plan.goes_on else num_prompt
        limit = self._settings.max_session_tokens
        if session.num_tokens + num_new >= limit:
            raise BadRequest(
                f"{name} has {session.num_tokens} tokens and would get {num_new} more "
                f"before its answer; at most {limit} are kept (setting HONE_MAX_SESSION_TOKENS)"
            )
        if session.size_bytes >= self._settings.sessions_mib << 20:
            raise BadRequest(
                f"{name} takes {session.size_bytes / (1 << 20):.1f} MiB, and at most "
                f"{self._settings.sessions_mib} MiB is kept of all (setting HONE_SESSIONS_MIB)"
            )

    # --- how many are kept -----------------------------------------------------------------------

    def _open(self, id: str) -> Session:
        """Returns the session, which is new if it did not exist. Raises NotFound if it was
        forgotten, and Busy if the most sessions that may be kept all have a turn under way."""
        self._forget_idle()
        if id in self._forgotten:
            raise NotFound(self._forgotten[id])
        if id not in self._sessions:
            limit = self._settings.max_sessions
            under_way = [each for each in self._sessions.values() if each.num_waiting]
            mib = self._settings.sessions_mib
            if sum(each.size_bytes for each in under_way) >= mib << 20:
                raise Busy(
                    f"{len(under_way)} sessions with turns under way take all of the {mib} MiB "
                    "that is kept (setting HONE_SESSIONS_MIB)"
                )
            if len(under_way) >= limit:
                raise Busy(
                    f"turns of {limit} sessions are under way, as many as are kept (setting "
                    "HONE_MAX_SESSIONS)"
                )
            self._sessions[id] = Session(self._sampler.serving, time.monotonic())
        return self._sessions[id]

    def _make_room(self) -> None:
        """Forgets the sessions that were idle longest, while there are too many or they take too
        much memory."""
        idle = [id for id, each in self._sessions.items() if not each.num_waiting]
        for id in sorted(idle, key=lambda id: self._sessions[id].used_at):
            if (why := self._too_much()) is None:
                return
            self._forget(id, f"it was idle longest when {why}")

    def _too_much(self) -> str | None:
        """Returns which limit the kept sessions exceed, or None."""
        limit, mib = self._settings.max_sessions, self._settings.sessions_mib
        if sum(bool(each.conversations) for each in self._sessions.values()) > limit:
            return f"another one began, and {limit} are kept (setting HONE_MAX_SESSIONS)"
        if self.size_bytes > mib << 20:
            return f"all took more than {mib} MiB (setting HONE_SESSIONS_MIB)"
        return None

    def _forget_idle(self) -> None:
        idle_s = self._settings.session_idle_s
        for id, session in list(self._sessions.items()):
            if not session.num_waiting and session.used_at < time.monotonic() - idle_s:
                self._forget(id, f"it was idle for {idle_s:g} s (setting HONE_SESSION_IDLE_S)")

    def _forget(self, id: str, why: str) -> None:
        num_tokens = self._sessions.pop(id).num_tokens
        self._forgotten[id] = f"session {id!r} was forgotten: {why}; begin another one"
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        get_logger().warning("session forgotten", session=id, why=why, num_tokens=num_tokens)


def _sampling(request: ChatRequest, room: int) -> Sampling:
    """Returns the answer's sampling. Without `max_tokens` the answer may fill the model's
    length."""
    fields = {"temperature", "top_p", "top_k", "min_p", "stop_token_ids", "seed"}
    given = request.model_dump(include=fields, exclude_none=True)
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop or ()
    max_tokens = request.max_completion_tokens or request.max_tokens or max(room, 1)
    return Sampling(**given, stop=stop, max_tokens=max_tokens)
