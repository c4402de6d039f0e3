"""What a service does with connections that send too little, too late, or the same header twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.http import gate
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import Checkpoint, CheckpointRequest
from tests.support.running import served

pytestmark = pytest.mark.slow

BODY = b'{"job_id": "job", "step": 3}'
HEAD = b"POST /checkpoints HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


class Peer:
    """One connection to the service under test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def status(self) -> int:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        self.body = await self.reader.readexactly(length)
        return int(head.split()[1])

    async def closed_after_s(self) -> float:
        start = time.monotonic()
        async with asyncio.timeout(90):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(4096):
                    pass
        return time.monotonic() - start


async def work(request: CheckpointRequest) -> Checkpoint:
    await asyncio.sleep(0.6 if request.step == 9 else 0)
    return Checkpoint(step=request.step, path="/x", size_bytes=1)


@pytest_asyncio.fixture(params=[HttpToolsProtocol, H11Protocol], ids=["httptools", "h11"])
async def port(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncGenerator[int]:
    monkeypatch.setattr(gate, "HEADERS_S", 0.3)
    monkeypatch.setattr(gate, "BODY_S", 0.3)
    service = Service("trainer", settings)
    service.operation("POST", "/checkpoints", work)
    server = service.server(0)
    server.config.http = type("Connection", (gate.Deadlines, request.param), {})
    async with served(server) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize(
    "sent", [b"", b"POST /checkpoints HT", HEAD], ids=["nothing", "a line", "headers"]
)
@pytest.mark.parametrize("first", [False, True], ids=["new", "used before"])
async def test_half_a_request_is_closed_in_time(port: int, sent: bytes, first: bool) -> None:
    peers = [await Peer.to(port) for _ in range(8)]
    for peer in peers:
        if first:
            peer.send(WHOLE)
            assert await peer.status() == 200
        peer.send(sent or b"P" * first)
    await asyncio.gather(*(peer.closed_after_s() for peer in peers))


async def test_headers_that_trickle_are_late_all_the_same(port: int) -> None:
    peer = await Peer.to(port)
    closed = asyncio.create_task(peer.closed_after_s())
    for _ in range(200):
        if closed.done():
            break
        peer.send(b"P")
        await asyncio.sleep(0.05)
    assert closed.done() and await closed < 8


async def test_a_body_that_does_not_arrive_is_answered_and_the_connection_closed(
    port: int,
) -> None:
    peer = await Peer.to(port)
    peer.send(WHOLE[:-1])
    assert await peer.status() == 400
    assert b"the body did not arrive in time: 27 bytes after" in peer.body
    await peer.closed_after_s()


async def test_slow_work_and_an_idle_connection_are_no_fault(port: int) -> None:
    peer = await Peer.to(port)
    for step in (b"9", b"3"):  # 9 takes longer than headers may
        peer.send(WHOLE.replace(b"3}", step + b"}"))
        assert await peer.status() == 200
        await asyncio.sleep(0.6)


async def test_a_header_that_came_twice_is_refused(port: int) -> None:
    for header in (b"Host: evil.example", b"Content-Type: application/msgpack"):
        peer = await Peer.to(port)
        peer.send(HEAD + header + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert b" 400 " in await asyncio.wait_for(peer.reader.readline(), 60)
        await peer.closed_after_s()
