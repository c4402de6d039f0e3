"""The routes of agents: which session a call names, and its answer in the caller's dialect.

A session is named by its API key, by the path (`/sessions/{name}/...`), by `X-Hone-Session`, or by
`X-Session-ID`, in this order. The session's key is valid for these routes only. A session that is
named in another way needs the stack's token.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from services.orchestrator.extensions.agents.chat import CHAT, COMPLETIONS, TOKENS
from services.orchestrator.extensions.agents.dialect import Dialect
from services.orchestrator.extensions.agents.messages import MESSAGES
from services.orchestrator.extensions.agents.responses import RESPONSES
from services.orchestrator.extensions.agents.sessions import (
    KEY,
    MAX_BODY_BYTES,
    Session,
    Sessions,
)
from services.orchestrator.extensions.environments.recording import TurnRequest
from shared.errors import BadRequest, Forbidden, NotFound
from shared.http import codec, rendering
from shared.http.gate import AcceptedKeys, given_token
from shared.http.operations import unless_gone
from shared.http.rendering import body_of, media_type, parse_body, render
from shared.http.service import Service
from shared.wire import ApiKey, CallAnswer, CallRequest, SessionRecord

DIALECTS = {each.path: each for each in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENS)}

MODELS = "/v1/models"

NAMED = "/sessions/{name}"

STREAM = "text/event-stream"

RETRY = "x-stainless-retry-count"
"""The header in which OpenAI's and Anthropic's clients count their retries of a request."""

ANSWERS: rendering.Responses = {
    200: {"content": rendering.without_model("", STREAM, schema=rendering.TEXT)["content"]}
}


class SessionKeys:
    """Checks the keys of sessions, and every other key by `others`."""

    def __init__(self, sessions: Sessions, others: AcceptedKeys) -> None:
        self._sessions = sessions
        self._others = others

    async def check(self, secret: str, method: str, path: str) -> ApiKey:
        """Returns the key. A session's key allows its turns, and the list of models."""
        if not secret.startswith(KEY):
            return await self._others.check(secret, method, path)
        session = self._sessions.find(api_key=secret)
        assert session is not None, "find() raises an error for an unknown key of a session"
        own = NAMED.format(name=session.id)
        allowed = {f"{head}{each}" for head in ("", own) for each in (*DIALECTS, MODELS)}
        if path not in allowed:
            raise Forbidden(f"{method} {path} with the key of a session, which allows only turns")
        return ApiKey(name="session", access="full", created_at=0)


def session_of(request: Request, sessions: Sessions, name: str | None = None) -> Session | None:
    """Returns the session that the call names; None if it names none. Raises NotFound for an
    unknown name, and Gone for a closed session."""
    if found := sessions.find(api_key=given_token(request.headers)):
        return found
    given = name or request.headers.get("x-hone-session")
    if found := sessions.find(name=given or request.headers.get("x-session-id")):
        return found
    if given:
        raise _no_session(given)
    return None


def _no_session(name: str) -> NotFound:
    return NotFound(
        f"there is no session {name!r:.200}; a session's job opens it and returns its key"
    )


async def answer_turn(request: Request, session: Session, dialect: Dialect) -> Response:
    """Answers a call of a session. If the client disconnects, its turn continues, and the client's
    retry receives the answer."""
    data = await body_of(request, MAX_BODY_BYTES)
    if media_type(request, data) != codec.JSON:
        raise BadRequest(f"POST {dialect.path}: expected JSON")
    body, asked = await parse_body(len(data), _read, data, dialect, session)
    turn = session.turn(
        asked,
        key=request.headers.get("idempotency-key"),
        again=request.headers.get(RETRY, "0") != "0",
    )
    answer = await unless_gone(turn, request)
    if body.get("stream"):
        return Response(dialect.stream(answer, body), media_type=STREAM)
    return JSONResponse(dialect.body(answer, body))


def _read(data: bytes, dialect: Dialect, session: Session) -> tuple[dict[str, Any], TurnRequest]:
    try:
        body = codec.read_json(data)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error!s:.300}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {body!r:.80}; expected an object")
    return body, dialect.read(body, session)


def add_routes(service: Service, sessions: Sessions) -> None:
    """Adds the routes that only serve sessions. extensions/openai/calling.py has the routes that
    also pass calls on to samplers."""
    for dialect in DIALECTS.values():
        _add_named(service, sessions, dialect)

    @service.app.get(NAMED, responses=rendering.answers(SessionRecord))
    async def get_session(name: str, request: Request) -> Response:
        """The record of an open session."""
        session = sessions.find(name=name)
        if session is None:
            raise _no_session(name)
        record = SessionRecord(
            name=session.id,
            job_id=session.job_id,
            group=session.recorded() if session.recording.leaves() else None,
            waits=session.num_under_way,
        )
        return await render(record, request)

    service.gauge("sessions", "Sessions of agents that are open").set_function(
        lambda: len(sessions)
    )


def _add_named(service: Service, sessions: Sessions, dialect: Dialect) -> None:
    async def turn(name: str, request: Request, beta: bool | None = None) -> Response:
        """A turn of the session of this name."""
        found = session_of(request, sessions, name)
        assert found is not None, "session_of() raises an error for an unknown name"
        return await answer_turn(request, found, dialect)

    add_post(service, NAMED + dialect.path, turn)


def add_post(
    service: Service, path: str, handler: Any, errors: rendering.Responses | None = None
) -> None:
    """Adds a route that is called in a dialect. `errors` are answers beside the usual ones."""
    service.body(CallRequest, "POST", path)
    service.app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_model=CallAnswer,
        responses=ANSWERS | (errors or {}),
    )
