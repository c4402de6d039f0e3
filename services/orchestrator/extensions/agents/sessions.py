"""Sessions: rollouts of agents that have their own loop and call the model by OpenAI's API or
another one. Each request is a turn, sampled by the job's weights and recorded as tokens. READ
FIRST.

    open       by who plays the rollout; the agent gets a URL and the session's key
    answer     each request of the agent, once, however often its client sends it
    rollout    what was recorded, as a group of one
    close      later requests are refused

Sessions live in this process. When it dies, their groups are sampled again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import PydanticSerializationError

from services.orchestrator.extensions.environments.conversation import (
    SEEDS_PER_TURN,
    failed_group,
    with_info,
)
from services.orchestrator.extensions.environments.recording import (
    Recording,
    Turn,
    TurnRequest,
    digest,
    read_fields,
)
from services.orchestrator.samplers.services import AnswerOptions, Services
from shared.errors import BadRequest, Conflict, Failed, Gone, HoneError, Malformed
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import ChatRequest, RolloutGroup, Sampling
from shared.wire.packed import TokenIds

KEY = "sk-hone-"
"""The prefix of the keys of sessions."""

MAX_CLOSED = 65_536
"""How many of the newest closed sessions are remembered, to refuse their keys with a reason."""

MAX_BODY_BYTES = 16 << 20
"""Largest request of an agent: some megabytes of text are more than any model's window."""

FULL = "context_length_exceeded"
"""The error code of a turn that does not fit the context."""


@dataclass(eq=False)
class _Call:
    """A request under way or answered. `taken`: a client has received the answer. `num_waiting`
    clients wait for it now."""

    name: str
    work: asyncio.Task[Turn]
    num_waiting: int = 0
    taken: bool = False


@dataclass(eq=False)
class Session:
    """One rollout of `job`, by weights of at least `min_version`. `sampling.max_tokens` bounds the
    tokens of each of its rows. The session calls `closed` with itself once it is closed. `api_key`
    is a secret for the agent alone."""

    services: Services
    job: Job
    id: str
    min_version: int
    sampling: Sampling
    closed: Callable[[Session], None]

    def __post_init__(self) -> None:
        self.job_id = self.services.caller.job_id
        self.api_key = KEY + secrets.token_urlsafe(32)
        self.recording = Recording()
        self._is_closed = False
        self._calls: list[_Call] = []
        self._keys: dict[str, _Call] = {}
        self._num_begun = 0
        self._full = ""
        self._lost: HoneError | None = None
        self._agent = _Stopwatch()

    @staticmethod
    def asked(request: ChatRequest) -> TurnRequest:
        """Returns the turn that is requested. Raises BadRequest for values that are not JSON."""
        messages = tuple(map(read_fields, request.messages))
        try:
            name = request.model_copy(update={"messages": messages}).model_dump_json()
        except PydanticSerializationError as error:  # nested too deeply
            raise BadRequest(f"the request cannot be recorded: {error}") from error
        return TurnRequest(
            name=digest(name),
            messages=messages,
            options=AnswerOptions(
                tools=request.tools or (),
                tool_choice=request.tool_choice or "auto",
                parallel_tool_calls=request.parallel_tool_calls,
                json_schema=request.json_schema,
                template_args=request.chat_template_kwargs or {},
            ),
            max_tokens=request.max_tokens,
            stop=(request.stop,) if isinstance(request.stop, str) else request.stop or (),
            stop_token_ids=request.stop_token_ids or (),
        )

    async def turn(
        self, asked: TurnRequest, *, key: str | None = None, again: bool = False
    ) -> Turn:
        """Returns the answer to messages, a text or token ids, once it is recorded. A client that
        sends the same request `again`, or under the same `key`, gets the same answer. So does a
        client that sends it after the first caller disconnected without receiving the answer.
        Raises BadRequest with code FULL if no tokens are left for an answer, and Gone if the
        session is closed."""
        if self._is_closed:
            raise closed_error(self.id)
        call = self._same(asked.name, key, again) or self._begin(asked, key)
        call.num_waiting += 1
        try:
            answer = await asyncio.shield(call.work)
        except asyncio.CancelledError:
            if call.work.cancelled():
                raise closed_error(self.id) from None
            raise
        finally:
            call.num_waiting -= 1
        call.taken = True
        self.recording.taken.add(answer)
        return answer

    @property
    def is_full(self) -> bool:
        """Whether the turn that was requested last did not fit the context."""
        return bool(self._full)

    @property
    def num_turns(self) -> int:
        return len(self.recording.turns)

    @property
    def num_under_way(self) -> int:
        return sum(not call.work.done() for call in self._calls)

    def answers(self) -> dict[str, int]:
        """Returns the ids of the rollout's answers, row by row, its own row last, each with its
        time: a number that grows from answer to answer."""
        rows = self.recording.rows()
        return {turn.id: turn.ended for _, _, own in rows for turn in own}

    def rollout(self) -> RolloutGroup:
        """Returns the recorded rollout as a group of one: its newest row, with the others as
        branches; a failed rollout if the agent made no call. Raises the error of the services with
        which the last turn ended, for which the agent is not to blame."""
        if self._lost:
            raise self._lost
        if not self.recording.leaves():
            return failed_group("the agent received no answer of the model")
        return self.recorded()

    def recorded(self) -> RolloutGroup:
        """Returns the rollout so far, up to the answers that a client has received."""
        group = self.recording.group("length" if self._full else None)
        last = group.rollouts[0].finish_reason
        turns = [turn for _, _, own in self.recording.rows() for turn in own]
        info: dict[str, Any] = {
            "ended": self._full or ("stop" if last == "stop" else "max_tokens"),
            "turns": len(turns),
            "completion_ids": [turn.id for turn in turns],
            "turn_times": [turn.ended for turn in turns],
            "tool_calls": sum(len(turn.tool_calls) for turn in turns),
            "environment_s": self._agent.seconds,
            "forks": len(group.rollouts[0].branches),
        }
        return with_info(group, info)

    def close(self) -> None:
        """Ends the turns under way, and refuses later ones."""
        if self._is_closed:
            return
        self._is_closed = True
        for call in self._calls:
            call.work.cancel()
        self.closed(self)

    # --- a turn ----------------------------------------------------------------------------------

    def _same(self, name: str, key: str | None, again: bool) -> _Call | None:
        """Returns the call that the request repeats; None for a new request. Raises Conflict for a
        key that came with another request."""
        if key and (call := self._keys.get(key)):
            if call.name != name:
                raise Conflict(
                    f"Idempotency-Key {key!r} was used before with another body",
                    code="body_differs",
                )
            return call
        for call in reversed(self._calls):
            if call.name == name and (again or not (call.taken or call.num_waiting)):
                return call
        return None

    def _begin(self, asked: TurnRequest, key: str | None) -> _Call:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        work = asyncio.create_task(self._next(asked, number))
        call = _Call(asked.name, work)
        work.add_done_callback(lambda _: self._forget_failed(call, key))
        self._calls.append(call)
        if key:
            self._keys[key] = call
        return call

    def _forget_failed(self, call: _Call, key: str | None) -> None:
        """Forgets a call that failed, so that it can be repeated."""
        if call.work.cancelled() or call.work.exception():
            self._calls.remove(call)
            if key:
                self._keys.pop(key, None)

    async def _next(self, asked: TurnRequest, number: int) -> Turn:
        began = self.recording.tick()
        self._agent.stop()
        try:
            parent = self.recording.before(asked)
            because = self.recording.why(asked, parent)
            if parent and asked.messages:  # as recorded, whatever form the client sends
                known = (*parent.asked.messages, parent.message)
                asked = replace(asked, messages=(*known, *asked.messages[len(known) :]))
            sampling = self._limited(asked, parent, number)
            group = await self._sampled(asked, parent, sampling, number)
        except (BadRequest, asyncio.CancelledError):
            raise
        except HoneError as error:
            self._lost = error
            raise
        finally:
            self._agent.start()
        self._check(group)
        turn = self.recording.add(
            f"{self.id}-{number}", asked, parent, group, began=began, because=because
        )
        self._full, self._lost = "", None
        if turn.because:
            get_logger().info("session forked", session=self.id, because=turn.because)
        return turn

    def _limited(self, asked: TurnRequest, parent: Turn | None, number: int) -> Sampling:
        """Returns the turn's sampling options: the job's, within the limits of `asked`. Raises
        BadRequest if no tokens are left for an answer."""
        own, spec = self.sampling, self.job.environment
        num_others = self.num_turns + self._agent.num_turns - 1
        if spec and num_others >= spec.max_turns:
            raise self._refused("max_turns", f"it has {num_others} answers, or they are under way")
        room = own.max_tokens - (parent.num_tokens if parent else 0)
        if room < 1:
            raise self._refused(
                "max_tokens", f"the conversation has all of its {own.max_tokens} tokens"
            )
        most = (room, asked.max_tokens, spec.max_answer_tokens if spec else None)
        return own.model_copy(
            update={
                "n": 1,
                "max_tokens": min(limit for limit in most if limit is not None),
                "stop": (*own.stop, *(text for text in asked.stop if text not in own.stop)),
                "stop_token_ids": (*own.stop_token_ids, *asked.stop_token_ids),
                "seed": None if own.seed is None else own.seed + number * SEEDS_PER_TURN,
            }
        )

    async def _sampled(
        self, asked: TurnRequest, parent: Turn | None, sampling: Sampling, number: int
    ) -> RolloutGroup:
        key = f"{self.id}:{number}"
        if asked.token_ids is not None or asked.text is not None:
            prompt = TokenIds(asked.token_ids or ()) if asked.text is None else asked.text
            return await self.services.samplers.complete(
                prompt, self.min_version, key=key, sampling=sampling
            )
        return await self.services.samplers.answer(
            asked.messages,
            self.min_version,
            key=key,
            options=asked.options,
            known=parent and parent.known,
            sampling=sampling,
        )

    def _check(self, group: RolloutGroup) -> None:
        """Raises BadRequest for a prompt that the sampler refused, or after which no tokens are
        left for an answer, and Failed if it went wrong."""
        rollout = group.rollouts[0]
        if group.overlong:
            raise self._refused("window", rollout.error or "the model's length is full")
        if rollout.went_wrong and not group.prompt_token_ids:
            # nothing was sampled after the prompt
            raise BadRequest(f"session {self.id!r}: {rollout.error or 'the prompt was refused'}")
        if rollout.went_wrong:
            raise Failed(rollout.error or f"the answer ended with {rollout.finish_reason!r}")

    def _refused(self, ended: str, why: str) -> BadRequest:
        """Returns the error, and marks the rollout as cut off unless another answer follows."""
        self._full = ended
        # agents and litellm recognize the error by the status, code and wording of OpenAI and vLLM
        return Malformed(
            f"This model's maximum context length is {self.sampling.max_tokens} tokens after the "
            f"prompt in session {self.id!r}, which has no room for another answer: {why}",
            code=FULL,
        )


class _Stopwatch:
    """Seconds between turns, in which the agent or its environment worked. `num_turns` are under
    way."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_turns = 0
        self._since: float | None = None

    def stop(self) -> None:
        self.num_turns += 1
        if self._since is not None:
            self.seconds += time.monotonic() - self._since
            self._since = None

    def start(self) -> None:
        self.num_turns -= 1
        if not self.num_turns:
            self._since = time.monotonic()


class Sessions:
    """The open sessions of this process, by key and by name."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._by_name: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def open(
        self,
        services: Services,
        job: Job,
        *,
        id: str,
        min_version: int,
        sampling: Sampling,
    ) -> Session:
        """Returns a new session with the name `id`; an open session of the same name is closed. The
        keys of requests to samplers contain the id, so no two sessions may share one."""
        if before := self._by_name.get(id):
            before.close()
        session = Session(services, job, id, min_version, sampling, self._forget)
        self._by_key[session.api_key] = self._by_name[id] = session
        self._closed.pop(id, None)
        return session

    def leave(self, job_id: str) -> None:
        """Closes the sessions of a job that no longer runs here."""
        for session in [*self._by_key.values()]:
            if session.job_id == job_id:
                session.close()

    def find(self, *, api_key: str | None = None, name: str | None = None) -> Session | None:
        """Returns the session with this key, or else with this name; None if there is none. Raises
        Gone for a closed session, and for a session key that is unknown here."""
        for value, open_ones in ((api_key, self._by_key), (name, self._by_name)):
            if value in open_ones:
                return open_ones[value]
            if value and value in self._closed:
                raise closed_error(name if value == name else None)
        if api_key and api_key.startswith(KEY):
            raise closed_error(None)
        return None

    def _forget(self, session: Session) -> None:
        del self._by_key[session.api_key]
        del self._by_name[session.id]
        for known in (session.id, session.api_key):
            self._closed[known] = None
        while len(self._closed) > 2 * MAX_CLOSED:
            self._closed.popitem(last=False)


def closed_error(name: str | None) -> Gone:
    """Returns the error for a closed session; `name` None: for the session of the caller's key."""
    which = "the session of this key" if name is None else f"session {name!r}"
    return Gone(
        f"{which} is closed: its rollout has ended, or the orchestrator was restarted; "
        "another rollout has another session"
    )
