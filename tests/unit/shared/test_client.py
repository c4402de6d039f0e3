"""The client of the services, before answers that no service of ours gives."""

from __future__ import annotations

import asyncio

import httpx2 as httpx

from shared import codec
from shared.client import Client
from shared.errors import NotFound
from shared.logs import of_job, of_request
from shared.operations import WAIT_PATH
from shared.wire import NoBody, PauseState, WaitRequest, WaitResult


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

    transport = httpx.MockTransport(answer)
    async with Client("rollout", "http://localhost", transport=transport) as client:
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


async def test_a_service_that_forgot_an_operation_is_there_and_is_asked_anew() -> None:
    """A service is restarted while its last poll hangs for longer than it may be away."""
    requests: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        if request.url.path == WAIT_PATH:
            await asyncio.sleep(0.1)
            raise httpx.ReadError("connection lost")
        if request.url.path == "/operations/a":
            problem = NotFound("no operation 'a'", code="no_operation").problem()
            return httpx.Response(404, json=problem)
        if requests.count("/pause") == 1:
            return httpx.Response(202, headers={"location": "/operations/a"})
        headers = {"content-type": codec.JSON}
        return httpx.Response(200, headers=headers, content=codec.encode(PauseState(paused=True)))

    transport = httpx.MockTransport(answer)
    async with Client("rollout", "http://localhost", transport=transport) as client:
        state = await client.call(
            "POST", "/pause", NoBody(), PauseState, deadline_s=20, patience_s=0.1
        )
    assert state.paused
    assert requests == ["/pause", WAIT_PATH, "/operations/a", "/pause"]


async def test_a_call_carries_the_id_of_the_request_or_job_that_it_is_made_for() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["x-request-id"])
        return httpx.Response(201, json={"paused": True})

    transport = httpx.MockTransport(answer)
    async with Client("rollout", "http://localhost", transport=transport) as client:

        async def call() -> None:
            await client.call("POST", "/pause", NoBody(), PauseState, deadline_s=20)

        await call()
        await call()
        with of_request("abc-1"):
            await call()
        of_job("demo-0k2m")
        await call()
    assert len(set(seen)) == 4 and len(seen[0]) == 16
    assert seen[2] == "abc-1" and seen[3].startswith("demo-0k2m.")
