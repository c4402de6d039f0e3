"""Aiohttp's connections below httpx: what is sent, what comes back, and that what goes wrong is
called as httpx calls it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.samplers import transport as transport_module
from services.orchestrator.samplers.transport import Transport, transport_to
from shared.host.processes import free_port

PIECE = b"p" * 65_536
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(handler: Handler, **limits: float | None) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a server that does `handler` with each connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    timeout = httpx.Timeout(**{"connect": 5.0, "read": 5.0, "write": 5.0, "pool": None} | limits)
    transport = Transport(ssl.create_default_context())
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=timeout
        ) as client:
            yield client
    finally:
        server.close()


async def request_of(reader: asyncio.StreamReader) -> tuple[list[str], bytes]:
    """Returns the lines of the head and the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    length = next((line for line in head if line.lower().startswith("content-length")), "0:0")
    return head, await reader.readexactly(int(length.partition(":")[2]))


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def pieces(count: int) -> AsyncGenerator[bytes]:
    for _ in range(count):
        yield PIECE


def always(given: bytes, seen: list[tuple[list[str], bytes]] | None = None) -> Handler:
    """Answers each request with what is given, and notes it in `seen`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await request_of(reader)
            if seen is not None:
                seen.append(request)
            writer.write(given)

    return handler


async def deaf(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def test_a_request_goes_as_httpx_made_it_and_its_answer_comes_back_decoded_once() -> None:
    seen: list[tuple[list[str], bytes]] = []
    given = answer(gzip.compress(b"fine"), "content-encoding: gzip", "x-it: a", "x-it: b")
    async with served(always(given, seen)) as client:
        sent = client.build_request("POST", "/v1/a%2Fb?c=%20d", content=b"body")
        first = await client.send(sent)
        second = await client.get("/again", headers={"cookie": "own=1"})
    assert first.content == second.content == b"fine"
    assert first.headers.get_list("x-it") == ["a", "b"]
    (head, body), (again, nothing) = seen
    assert head[0] == "POST /v1/a%2Fb?c=%20d HTTP/1.1" and body == b"body"
    assert {line.lower() for line in head[1:]} == {
        f"{name}: {value}".lower() for name, value in sent.headers.items()
    }
    assert nothing == b"" and not any("content-" in line.lower() for line in again)


async def test_one_connection_serves_one_request_after_another() -> None:
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await request_of(reader)
            writer.write(answer(b"fine"))

    async with served(handler) as client:
        for _ in range(3):
            assert (await client.post("/", content=b"x")).text == "fine"
    assert connections == 1


async def test_neither_a_redirect_is_followed_nor_a_cookie_kept() -> None:
    seen: list[tuple[list[str], bytes]] = []
    given = answer(b"", "location: /there", "set-cookie: theirs=1", status="303 See Other")
    async with served(always(given, seen)) as client:
        assert (await client.get("/")).headers["location"] == "/there"
        client.cookies.clear()
        await client.get("/")
    assert not any(line.lower().startswith("cookie") for head, _ in seen for line in head)


async def test_a_large_body_goes_in_pieces_with_its_length() -> None:
    seen: list[tuple[list[str], bytes]] = []
    async with served(always(answer(b"fine"), seen), write=0.5) as client:
        length = {"content-length": str(40 * len(PIECE))}
        await client.put("/", content=pieces(40), headers=length)
    ((head, body),) = seen
    assert body == 40 * PIECE
    assert not any("transfer-encoding" in line.lower() for line in head)


async def test_an_answer_may_come_before_the_body_was_sent() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"too large", "connection: close", status="413 Content Too Large"))
        await writer.drain()
        await asyncio.sleep(0.5)

    async with served(handler, write=0.2) as client:
        length = {"content-length": str(400 * len(PIECE))}
        response = await client.put("/", content=pieces(400), headers=length)
    assert (response.status_code, response.text) == (413, "too large")


async def test_what_goes_wrong_is_called_as_httpx_calls_it() -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer(b"whole")[:-2])

    async def gone(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await request_of(reader)

    async with served(silent, read=0.1) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/")
    async with served(deaf, write=0.2) as client:
        length = {"content-length": str(400 * len(PIECE))}
        with pytest.raises(httpx.WriteTimeout, match=r"nothing of the request .* for 0\.2 s"):
            await client.put("/", content=pieces(400), headers=length)
    for handler in (cut, gone):
        async with served(handler) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/", content=b"x")
    async with httpx.AsyncClient(transport=Transport(ssl.create_default_context())) as client:
        with pytest.raises(httpx.ConnectError, match="Connect call failed"):
            await client.get(f"http://127.0.0.1:{free_port()}/")


async def test_a_body_in_one_piece_has_the_time_for_writing_too() -> None:
    seen: list[tuple[list[str], bytes]] = []
    content = random.Random(0).randbytes(9_000_001)
    async with served(deaf, write=0.2) as client:
        with pytest.raises(httpx.WriteTimeout):
            await client.post("/", content=content)
    async with served(always(answer(b"fine"), seen)) as client:
        await client.post("/", content=content)
    ((head, body),) = seen
    assert body == content
    assert not any("transfer-encoding" in line.lower() for line in head)


async def test_a_host_that_does_not_answer_in_time_is_no_matter_of_writing() -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await request_of(reader)
        await asyncio.sleep(30)

    async with served(silent, read=0.2, write=20) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.put("/", content=PIECE * 2)


def test_a_proxy_that_the_environment_names_is_left_to_httpx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example.org")
    assert transport_to("https://trainer.example.org") is None
    for url in (
        "http://trainer.example.org",
        "https://inside.example.org",
        "https://trainer:8002",
        "https://127.0.0.1:8002",
    ):
        assert isinstance(transport_to(url), Transport)


async def test_an_answer_that_is_left_before_its_end_leaves_no_connection() -> None:
    ended = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async with served(endless) as client:
        async with client.stream("GET", "/") as response:
            async for piece in response.aiter_bytes():
                assert piece.startswith(b"x")
                break
        await asyncio.wait_for(ended.wait(), 60)


async def test_a_name_that_is_not_found_in_time_is_a_host_not_connected_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread waits for it, for all callers and calls, and none of the pool."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    is_found, looked_up = threading.Event(), list[str]()

    def hang(host: str, *_: Any, **__: Any) -> list[Any]:
        looked_up.append(host)
        is_found.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    transport = Transport(ssl.create_default_context())
    timeout = httpx.Timeout(10.0, connect=0.2)
    try:
        async with httpx.AsyncClient(transport=transport, timeout=timeout) as client:
            began = time.monotonic()
            for _ in range(2):
                both = [client.get("http://trainer.test:8002/") for _ in range(2)]
                errors = await asyncio.gather(*both, return_exceptions=True)
                assert [type(error) for error in errors] == [httpx.ConnectTimeout] * 2
            assert await asyncio.to_thread(lambda: "the pool is free") == "the pool is free"
            assert time.monotonic() - began < 25
    finally:
        is_found.set()
    assert looked_up == ["trainer.test"]


async def test_a_name_leads_to_its_host() -> None:
    async with served(always(answer(b"fine"))) as client:
        port = client.base_url.port
        assert (await client.get(f"http://localhost:{port}/")).text == "fine"


async def test_the_time_for_connecting_is_for_all_addresses_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        # Addresses for documentation (RFC 5737): nothing answers there.
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (f"192.0.2.{n}", port))
            for n in range(1, 9)
        ]

    async def silent(*_: Any, **__: Any) -> None:
        await asyncio.sleep(30)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", silent)
    transport = Transport(ssl.create_default_context())
    timeout = httpx.Timeout(10.0, connect=0.3)
    async with httpx.AsyncClient(transport=transport, timeout=timeout) as client:
        began = time.monotonic()
        with pytest.raises(httpx.ConnectTimeout):
            await client.get("http://trainer.test:8002/")
    assert time.monotonic() - began < 8 * 0.3


async def test_a_request_waits_for_a_free_connection_however_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "MAX_CONNECTIONS", 1)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            await asyncio.sleep(0.5)
            writer.write(answer(b"fine"))

    async with served(slow, connect=0.2) as client:
        answers = await asyncio.gather(client.get("/"), client.get("/"))
    assert [each.text for each in answers] == ["fine", "fine"]


async def test_requests_that_fail_or_are_left_make_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "MAX_CONNECTIONS", 1)

    async def by_path(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await request_of(reader)
        if "fail" in head[0]:
            return
        if "slow" in head[0]:
            await asyncio.sleep(30)
        writer.write(answer(b"f" * 1_000_000))

    async with asyncio.timeout(60), served(by_path) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/fail")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get("/slow")
        async with client.stream("GET", "/left") as response:
            await anext(response.aiter_raw())
        assert (await client.get("/")).status_code == 200
