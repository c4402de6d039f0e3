"""OpenEnv's WebSocket: one connection is one episode. It follows the package `openenv` 0.10: each
message is answered by one message, in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from services.orchestrator.seams import Lost
from shared.wire import Reported

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message that an environment may send."""

CLOSE_S = 5.0
"""Seconds that a server has to end an episode."""

MAX_CHARS = 1000


class Away(Exception):
    """The server cannot be reached."""


class Full(Exception):
    """The server has no room for another episode."""


class Refused(Exception):
    """The server could not read the message, which changed nothing: the message is for the
    model."""


class Seen(BaseModel):
    """What the environment answers a reset and a step with."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    observation: dict[str, Any]
    reward: Reported | None = None
    done: bool = False


class Socket:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._socket = socket
        self._url = url

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Seen:
        """Sends a reset or a step and returns its answer. Raises Full, Refused, or Lost."""
        with contextlib.suppress(aiohttp.ClientError, OSError):  # then an error waits to be read
            await self._socket.send_json({"type": kind, "data": dict(data)})
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            why = f": {received.extra}" if received.extra else f" (code {self._socket.close_code})"
            raise Lost(f"the environment at {self._url} closed the connection{why}")
        return self._read(received.data)

    def _read(self, text: str) -> Seen:
        try:
            frame = json.loads(text)
            if frame["type"] == "observation":
                return Seen.model_validate(frame["data"])
            code, message = frame["data"]["code"], str(frame["data"]["message"])
        except (ValueError, KeyError, TypeError, ValidationError, RecursionError) as error:
            raise Lost(
                f"the environment at {self._url} sent {text[:200]!r}; expected an observation with "
                f"a finite reward, or an error"
            ) from error
        if code == "VALIDATION_ERROR":
            raise Refused(_with_faults(message, frame["data"].get("errors")))
        if code == "CAPACITY_REACHED":
            raise Full(f"the environment at {self._url} has no room: {message[:MAX_CHARS]}")
        raise Lost(f"the environment at {self._url} failed ({code}): {message[:MAX_CHARS]}")

    async def close(self) -> None:
        """Ends the episode. Returns once the server has made room for another one, or is late."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.send_json({"type": "close"})
                while not self._socket.closed:
                    await self._socket.receive()
        await self.drop()

    async def drop(self) -> None:
        """Closes the connection without the server's consent: an answer that is still to come would
        be taken for the answer to the next message."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close()


def _with_faults(message: str, errors: Any) -> str:
    faults = [
        f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}"
        for fault in (errors if isinstance(errors, list) else [])
        if isinstance(fault, dict)
    ]
    return "; ".join([message, *faults])[:MAX_CHARS]
