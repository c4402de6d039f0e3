"""Connections to OpenEnv servers. Jobs name them, so no redirect is followed to another one."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from services.orchestrator.extensions.environments.sockets import MAX_MESSAGE_BYTES, Away, Socket
from services.orchestrator.seams import Lost
from shared.http.connecting import trusted

CONNECT_S = 10.0


def session() -> aiohttp.ClientSession:
    """Returns a client without cookies, a limit of connections, or redirects."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trusted(), limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        middlewares=(_without_redirects,),
    )


async def connect(http: aiohttp.ClientSession, url: str) -> Socket:
    """Returns a connection to `/ws` of the server. Raises Away."""
    try:
        async with asyncio.timeout(CONNECT_S):
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
    except TimeoutError as error:
        raise Away(f"the environment at {url} took no connection in {CONNECT_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        why = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        raise Away(f"the environment at {url} cannot be reached: {why}") from error
    return Socket(socket, url)


async def schema_of_actions(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Returns the JSON Schema of the environment's actions, from `/schema`."""
    try:
        async with http.get(f"{url}/schema") as answer:
            actions = json.loads(await _whole(answer))["action"]
    except (aiohttp.ClientError, OSError, RecursionError, ValueError, KeyError, TypeError) as error:
        raise Lost(
            f"{url}/schema cannot be read ({type(error).__name__}: {error}); expected the schemas "
            "of an OpenEnv server"
        ) from error
    if not isinstance(actions, dict) or not isinstance(actions.get("properties", {}), dict):
        raise Lost(f"{url}/schema has {str(actions)[:200]} as 'action'; expected a JSON Schema")
    return actions


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the body, of which one read gives what has arrived. Raises ValueError for more than
    MAX_MESSAGE_BYTES."""
    found = bytearray()
    while piece := await answer.content.read(MAX_MESSAGE_BYTES):
        found += piece
        if len(found) > MAX_MESSAGE_BYTES:
            raise ValueError(f"it has more than {MAX_MESSAGE_BYTES} bytes")
    return bytes(found)


async def _without_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    answer = await handler(request)
    if 300 <= answer.status < 400:
        where = urlsplit(answer.headers.get("Location", "")).netloc or "another address"
        answer.close()
        raise aiohttp.ClientError(f"it redirects to {where}, which is not followed")
    return answer
