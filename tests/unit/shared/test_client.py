"""The client of the services, before answers that no service of ours gives; when a service is said
to be unreachable, and back; and how several callers wait for one operation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx2 as httpx
import pytest

from services.rollout.rl_routes import PauseState
from shared.errors import Busy, HoneError, Unavailable
from shared.host.logs import bind, of_request
from shared.http import codec
from shared.http.client import Client
from shared.http.connecting import Absence, Poller, Presence, no_notify
from shared.http.rendering import problem
from shared.wire import WAIT_PATH, NoBody, WaitRequest, WaitResult


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a client, none of which takes time."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("shared.http.client.asyncio.sleep", note)
    return pauses


def client_of(answer: Callable[[httpx.Request], Any], name: str = "rollout") -> Client:
    return Client(name, "http://localhost", transport=httpx.MockTransport(answer))


async def test_an_answer_that_cannot_be_decompressed_is_asked_for_again_after_a_pause() -> None:
    """As a proxy makes them that decompresses bodies and keeps their headers."""
    requests: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        if request.url.path == "/pause":
            return httpx.Response(202, headers={"location": "/operations/a"})
        body: WaitResult | PauseState = PauseState(paused=True)
        if request.url.path == WAIT_PATH:
            body = WaitResult(ids=codec.decode(WaitRequest, request.content).ids)
        wrong = {"content-encoding": "gzip"} if requests.count(request.url.path) == 1 else {}
        headers = {"content-type": codec.JSON}
        return httpx.Response(
            200, headers=headers | wrong, stream=httpx.ByteStream(codec.encode(body))
        )

    async with client_of(answer) as client:
        state = await client.call("POST", "/pause", NoBody(), PauseState, deadline_s=20)
    assert state.paused
    assert requests == [
        "/pause",
        WAIT_PATH,
        "/operations/a",
        "/pause",
        WAIT_PATH,
        "/operations/a",
    ]


async def test_a_busy_service_is_asked_again_when_it_said_up_to_the_deadline(
    slept: list[float],
) -> None:
    answers = iter([Busy("full", retry_after_s=7), Busy("full", retry_after_s=3), None])

    def answer(_: httpx.Request) -> httpx.Response:
        if (busy := next(answers)) is None:
            return httpx.Response(200, content=codec.encode(PauseState(paused=True)))
        response = problem(busy)
        return httpx.Response(429, headers=dict(response.headers), content=bytes(response.body))

    async with client_of(answer) as client:
        await client.get("/pause", PauseState, deadline_s=20)
        assert slept == [7, 3]
        answers = iter([Busy("full", retry_after_s=60)])
        with pytest.raises(Busy, match="full") as raised:
            await client.get("/pause", PauseState, deadline_s=20)
    assert raised.value.retry_after_s == 60 and slept == [7, 3], "it is not done by then"


async def test_a_service_that_cannot_say_what_has_ended_is_asked_after_growing_pauses(
    slept: list[float],
) -> None:
    num_fetches = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_fetches
        num_fetches += request.method == "GET"
        if request.url.path == WAIT_PATH:
            return httpx.Response(404)
        if num_fetches < 7:
            return httpx.Response(202, headers={"location": "/operations/a"})
        return httpx.Response(200, content=codec.encode(PauseState(paused=True)))

    async with client_of(answer) as client:
        state = await client.call("POST", "/pause", NoBody(), PauseState, deadline_s=20)
    assert state.paused and slept == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


@pytest.mark.parametrize(("is_back", "code"), [(False, "unreachable"), (True, "deadline")])
async def test_a_deadline_that_passes_during_an_outage_is_not_the_services_slowness(
    is_back: bool, code: str
) -> None:
    """A host that is off refuses no connection: the attempt under way lasts until the deadline."""
    requests: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        if len(requests) == 1:
            raise httpx.ConnectTimeout("no answer")
        if is_back and request.url.path == "/pause":
            return httpx.Response(202, headers={"location": "/operations/a"})
        await asyncio.sleep(60)
        raise AssertionError("it is waited for beyond the deadline")

    async with client_of(answer, "reward") as client:
        with pytest.raises(Unavailable) as raised:
            await client.call("POST", "/pause", NoBody(), PauseState, deadline_s=0.5)
    assert raised.value.code == code


async def test_a_call_carries_the_id_of_the_request_or_job_that_it_is_made_for() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["x-request-id"])
        return httpx.Response(201, json={"paused": True})

    async with client_of(answer) as client:

        async def call() -> None:
            await client.call("POST", "/pause", NoBody(), PauseState, deadline_s=20)

        await call()
        await call()
        with of_request("abc-1"):
            await call()
        bind(job="demo-0k2m")
        await call()
    assert len(set(seen)) == 4 and len(seen[0]) == 16
    assert seen[2] == "abc-1" and seen[3].startswith("demo-0k2m.")


async def test_a_proxy_is_asked_for_names_of_the_world_and_not_for_those_of_a_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Docker sets these variables in every container, from its own configuration."""
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        for variable in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.server_port}")
        for host in ("localhost", "trainer-of-a-stack", "trainer.test"):
            url = f"http://{host}:1"
            async with Client("trainer", url, patience_s=0.1) as client:
                with pytest.raises(HoneError):
                    await client.get("/state", PauseState, deadline_s=0.5)
        proxy.shutdown()
    assert {httpx.URL(url).host for url in asked} == {"trainer.test"}


async def test_an_event_comes_whole_also_with_what_ends_lines_of_other_texts() -> None:
    text = "a\u2028b\u0085c\u2029d"
    stream = f"id: 1-0\nevent: log\ndata: {text}\n\n: waiting\n\ndata: {text}\r\n\r\nid: 2-0\n"
    data = stream.encode()

    class Pieces(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncGenerator[bytes]:
            for position in range(len(data)):
                yield data[position : position + 1]

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Pieces())

    async with client_of(answer, "orchestrator") as client:
        found = [event async for event in client.events("/events")]
    assert found == [("1-0", "log", text), ("", "message", text)]


HUB = "the Hugging Face Hub"


@pytest.fixture
def told() -> list[str]:
    return []


def presence(
    told: list[str], service: str, shared: dict[Presence, Absence], *, reports: bool = True
) -> Presence:
    tell = AsyncMock(side_effect=lambda message, _: told.append(message))
    return Presence(service, tell if reports else no_notify, shared)


async def test_a_clients_answer_does_not_end_what_another_client_waits_for(
    told: list[str],
) -> None:
    shared = dict[Presence, Absence]()
    trainer, sampler = (presence(told, name, shared) for name in ("trainer", "rollout"))
    long_ago = time.monotonic() - 10
    await sampler.missed(time.monotonic(), "starting", HUB)
    for _ in range(3):
        await trainer.missed(long_ago, "no connection", HUB)
        await sampler.heard()
    assert [text.split(":")[0] for text in told] == [told[0].split(":")[0]]
    assert told[0].startswith(f"{HUB} is unreachable since ")
    await trainer.heard()
    assert told[1:] == [f"{HUB} is back after 10 s"] and not shared


async def test_two_clients_without_one_service_tell_it_once(told: list[str]) -> None:
    shared = dict[Presence, Absence]()
    clients = [presence(told, "trainer", shared) for _ in range(2)]
    for client in clients:
        await client.missed(time.monotonic() - 10, "no connection", HUB)
    await clients[0].heard()
    assert len(told) == 1 and len(shared) == 1, "it is away for the other one"
    await clients[1].heard()
    assert told[1:] == [f"{HUB} is back after 10 s"]


async def test_a_client_that_does_not_report_hides_nothing(told: list[str]) -> None:
    shared = dict[Presence, Absence]()
    quiet, loud = (presence(told, "rollout", shared, reports=each) for each in (False, True))
    for client in (quiet, loud):
        await client.missed(time.monotonic() - 10, "no connection")
    assert len(told) == 1 and len(shared) == 2


async def test_a_caller_is_woken_although_another_one_gave_up() -> None:
    class Ends(Poller):
        """Says that the operation has ended, once `over` is set."""

        over = asyncio.Event()

        async def _ask(self, ids: tuple[str, ...]) -> WaitResult:
            await self.over.wait()
            return WaitResult(ids=ids, busy=0)

    poller = Ends(cast(Any, None), 20.0)
    first, second = (asyncio.create_task(poller.ended("/operations/x")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0)
    poller.over.set()
    await asyncio.wait_for(second, 5)
    await poller.close()


async def test_a_service_that_waits_for_another_one_is_back(told: list[str]) -> None:
    shared = dict[Presence, Absence]()
    trainer = presence(told, "trainer", shared)
    await trainer.missed(time.monotonic() - 10, "no connection")
    await trainer.missed(time.monotonic() - 10, "no Hub", HUB)
    await trainer.heard()
    assert told[1:2] == ["the trainer service is back after 10 s"]
    assert told[3:] == [f"{HUB} is back after 10 s"] and not shared
