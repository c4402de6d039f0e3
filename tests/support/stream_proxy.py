"""A proxy for unix sockets that can stand still, as a network that was cut: bytes neither come nor
go, and no connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path


class StreamProxy:
    """`async with StreamProxy(target, path)` forwards connections at `path` to `target`."""

    def __init__(self, target: str, path: Path) -> None:
        self.path = path
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        self._flowing.clear()

    def go_on(self) -> None:
        self._flowing.set()

    async def __aenter__(self) -> StreamProxy:
        self._server = await asyncio.start_unix_server(self._connect, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
