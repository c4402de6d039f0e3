"""A link between two processes that can be cut, stand still or be slow, and that sees which
requests pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

Address = int | Path
"""A port of this machine, or a unix socket."""

Seen = Callable[[str, str], None]
"""Hears the path and the idempotency key of each request."""

METHODS = (b"POST ", b"PUT ")
KEY = "idempotency-key:"


def unseen(_path: str, _key: str) -> None:
    pass


class Link:
    """`async with Link(target, at)` forwards connections at one address to the other. `delay_s` is
    added to every answer."""

    def __init__(self, target: Address, at: Address, seen: Seen = unseen) -> None:
        self.delay_s = 0.0
        self._target = target
        self._at = at
        self._seen = seen
        self._is_cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Link:
        if isinstance(self._at, Path):
            self._server = await asyncio.start_unix_server(self._connect, self._at)
        else:
            self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._at)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Breaks every connection, and each new one at once."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Lets no byte come or go, as a network that was cut does: no connection breaks."""
        self._flowing.clear()

    def lead_to(self, target: Address) -> None:
        """Lets new connections go to another address. Those that there are stay where they are."""
        self._target = target

    def mend(self) -> None:
        self._is_cut = False
        self._flowing.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._flowing.wait()
            await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):  # no one is there, or the link ends
            pass
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            return
        if isinstance(self._target, Path):
            there, back = await asyncio.open_unix_connection(self._target)
        else:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, back}
        pumps = [
            asyncio.create_task(self._ask(reader, back)),
            asyncio.create_task(self._answer(there, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers -= {writer, back}
            back.close()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _ask(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._flowing.wait()
            self._look(data)
            sink.write(data)
            await sink.drain()

    async def _answer(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._flowing.wait()
            await asyncio.sleep(self.delay_s)
            sink.write(data)
            await sink.drain()

    def _look(self, data: bytes) -> None:
        if not data.startswith(METHODS):
            return
        first, *headers = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        keys = (line[len(KEY) :].strip() for line in headers if line.lower().startswith(KEY))
        self._seen(first.split(" ")[1], next(keys, ""))
