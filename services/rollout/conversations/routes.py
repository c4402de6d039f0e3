"""The routes of recorded sessions: OpenAI's chat with a session's name in a header, and the records
that come of it."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import RootModel

from services.rollout.conversations.sessions import Sessions
from shared.errors import BadRequest
from shared.http import codec, rendering, streams
from shared.http.service import Service
from shared.wire import ChatRequest, SessionDeleted, SessionRecord

HEADER = "x-hone-session"
"""Names the session that a call of /v1/chat/completions is a turn of. Case does not matter."""

RETRY_HEADER = "x-stainless-retry-count"
"""How often OpenAI's clients have sent this request before."""

CHAT = "/v1/chat/completions"

_ID = re.compile(r"[\w.:-]{1,128}")


class ChatAnswer(RootModel[dict[str, Any]]):
    """OpenAI's chat completion."""


def add_session_routes(service: Service, sessions: Sessions) -> None:
    async def get_session(session_id: str) -> SessionRecord:
        """A session's conversations, as tokens with their mask, log-probs and weight versions."""
        return sessions.record(session_id)

    async def delete_session(session_id: str) -> SessionDeleted:
        """Forgets a session, if there is one; its id can then be used again."""
        sessions.delete(session_id)
        return SessionDeleted(id=session_id)

    async def answer_get(session_id: str, request: Request) -> Response:
        return await rendering.render(await get_session(session_id), request)

    path = "/sessions/{session_id}"
    service.app.add_api_route(
        path,
        answer_get,
        methods=["GET"],
        name=get_session.__name__,
        description=get_session.__doc__ or "",
        responses={200: {"model": SessionRecord}},
    )
    service.app.add_api_route(path, delete_session, methods=["DELETE"])
    service.gauge("sessions", "Recorded sessions that are kept").set_function(lambda: len(sessions))
    service.gauge("session_bytes", "Memory that they take").set_function(
        lambda: sessions.size_bytes
    )


async def answer_turn(service: Service, sessions: Sessions, request: Request) -> Response:
    """Answers a call that names a session. It happens once per Idempotency-Key; a client's own
    retry of what was answered gets the same answer."""
    id = request.headers[HEADER]
    if not _ID.fullmatch(id):
        raise BadRequest(
            f"the header X-Hone-Session is {id!r}; expected 1 to 128 letters, digits and any of "
            "'_.:-'"
        )
    path = request.url.path
    if (request.method, path) != ("POST", CHAT):
        raise BadRequest(
            f"{request.method} {path} with the header X-Hone-Session; sessions record POST {CHAT}"
        )
    data = await request.body()
    body = codec.decode(ChatRequest, data, rendering.media_type(request, data))
    again = request.headers.get(RETRY_HEADER, "0") != "0"
    key = request.headers.get("idempotency-key")
    name = f"POST {CHAT} of session {id}"

    async def work() -> ChatAnswer:
        return ChatAnswer(await sessions.answer(id, body, again=again))

    operation = service.operations.start(
        work, f"{name} {key}" if key else None, hashlib.sha256(data).hexdigest(), name
    )
    if not body.stream:
        return await service.answer(operation, request, ends_with_client=key is None)
    gone = None if key else streams.client_gone(request)
    result = await service.operations.wait(operation, None, gone)
    assert isinstance(result, ChatAnswer), "without a limit the operation has ended"
    with_usage = bool((body.stream_options or {}).get("include_usage"))
    return Response(_stream(result.root, with_usage=with_usage), media_type="text/event-stream")


def _stream(answer: dict[str, Any], *, with_usage: bool) -> str:
    """Returns the answer as the chunks of OpenAI's streams: the message, how it ended, and the
    usage if it was requested."""
    (choice,) = answer["choices"]
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    whole = {"index": 0, "delta": delta, "logprobs": choice.get("logprobs"), "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    head = {name: answer[name] for name in ("id", "created", "model")}
    chunks = [
        {**head, "object": "chat.completion.chunk", "choices": [each]} for each in (whole, ended)
    ]
    if with_usage:
        usage = {"choices": [], "usage": answer["usage"]}
        chunks.append({**head, "object": "chat.completion.chunk", **usage})
    return "".join(f"data: {text}\n\n" for text in (*map(json.dumps, chunks), "[DONE]"))
