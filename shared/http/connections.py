"""How long a request may take to arrive. Without these limits connections that send nothing would
add up."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 10.0
"""How long a request's headers may take, from the connection or the request's first byte on.
Between two requests a connection may be idle for longer."""

BODY_S = 30.0
"""How long a body may take to begin, and how far it may fall behind `MIN_BODY_BYTES_PER_S`."""

MIN_BODY_BYTES_PER_S = 100_000


class Deadlines(asyncio.Protocol):
    """Closes a connection whose request headers are late. A mixin before one of uvicorn's
    protocols. `Gate` keeps the body's deadline, because it can answer."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        protocol: Any = self  # uvicorn's two protocols have these in common, and no base class
        request = protocol.cycle
        if request is not None and not request.response_complete:
            self._unwatch()
        elif self._late is None and not protocol.transport.is_closing():
            self._late = protocol.loop.call_later(HEADERS_S, protocol.transport.close)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Connection(Deadlines, AutoHTTPProtocol):
    """One connection of a service."""
