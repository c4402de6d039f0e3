"""What a service does when it is asked to end: those who wait are told to ask again, and the
service that follows answers them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from fastapi.responses import StreamingResponse

from shared.host.processes import free_port
from shared.http.client import Client
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import Checkpoint, CheckpointRequest
from tests.support.in_process import in_process
from tests.support.running import served

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BODY = {"job_id": "job", "step": 3}


class SlowService:
    """The process of tests/support/slow_service.py, which can be started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.slow_service",
                str(self.port),
                str(self.folder),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def stop(self) -> float:
        """Sends SIGTERM and returns how many seconds the process took to end."""
        assert self.process is not None
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(15)
        return time.monotonic() - start


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SlowService]:
    service = SlowService(tmp_path)
    service.start()
    yield service
    if service.process:
        service.process.kill()
        service.process.wait()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_a_call_cut_off_by_sigterm_is_answered_by_the_next_life(process: SlowService) -> None:
    client = Client("trainer", process.url)
    body = CheckpointRequest.model_validate(BODY)
    call = asyncio.create_task(
        client.call("POST", "/checkpoints", body, Checkpoint, deadline_s=30.0, key="a")
    )
    await until((process.folder / "working").exists)
    seconds = await asyncio.to_thread(process.stop)
    process.start()
    answer = await call
    await client.close()
    assert process.process is not None
    assert answer.step == 3 and answer.size_bytes == process.process.pid
    assert (process.folder / "ended").exists() and seconds < 2.0


class Served:
    """A service in this process, on a real port, whose every answer takes long."""

    def __init__(self, settings: Settings) -> None:
        self.events: list[str] = []
        self.service = Service("trainer", settings)
        self.service.operation("POST", "/checkpoints", self._work)
        self.service.app.get("/slow")(self._slow)
        self.service.app.get("/events")(self._events)
        self.server = self.service.server(0)

    def http(self) -> httpx.AsyncClient:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with served(self.server):
            yield

    async def _work(self, request: CheckpointRequest) -> Checkpoint:
        self.events.append("working")
        try:
            await asyncio.sleep(60)
        finally:
            self.events.append("cancelled")
        raise AssertionError

    async def _slow(self) -> dict[str, str]:
        self.events.append("slow")
        await asyncio.sleep(60)
        return {}

    async def _events(self) -> StreamingResponse:
        async def ticks() -> AsyncGenerator[str]:
            yield "data: tick\n\n"
            await asyncio.sleep(60)

        return StreamingResponse(ticks(), media_type="text/event-stream")


async def test_who_waits_for_an_operation_is_told_at_once(settings: Settings) -> None:
    served = Served(settings)
    async with served.running(), served.http() as http:
        calls = [
            asyncio.create_task(http.post("/checkpoints", json=BODY, headers=headers))
            for headers in ({}, {"prefer": "respond-async, wait=20"})
        ]
        await until(lambda: served.events == ["working", "working"])
        start = time.monotonic()
        served.server.should_exit = True
        for response in await asyncio.gather(*calls):
            served.events.append("answered")
            assert response.status_code == 503 and response.json()["code"] == "draining"
            assert response.headers["content-type"] == "application/problem+json"
        assert time.monotonic() - start < 10
    assert served.events[2:] == ["answered", "answered", "cancelled", "cancelled"]


async def test_a_poll_at_the_end_of_a_service_is_told_so(settings: Settings) -> None:
    served = Served(settings)
    async with served.running(), served.http() as http:
        prefer = {"prefer": "respond-async, wait=0"}
        started = await http.post("/checkpoints", json=BODY, headers=prefer)
        poll = asyncio.create_task(http.get(started.headers["location"], params={"wait": 20}))
        await asyncio.sleep(0.1)
        served.server.should_exit = True
        response = await poll
    assert response.status_code == 503 and response.json()["code"] == "draining"


async def test_a_request_that_outlives_the_grace_is_told_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.http.service.GRACE_S", 0.3)
    served = Served(settings)
    async with served.running(), served.http() as http:
        call = asyncio.create_task(http.get("/slow"))
        await until(lambda: served.events == ["slow"])
        served.server.should_exit = True
        response = await call
    assert response.status_code == 503 and response.json()["code"] == "draining"


async def test_an_event_stream_ends_at_once_and_not_as_if_complete(settings: Settings) -> None:
    served = Served(settings)
    async with served.running(), served.http() as http:
        start = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError):
            async with http.stream("GET", "/events") as response:
                async for line in response.aiter_lines():
                    assert line in ("data: tick", "")
                    served.server.should_exit = True
        assert time.monotonic() - start < 10


async def test_nothing_new_is_begun_while_a_service_drains(settings: Settings) -> None:
    served = Served(settings)
    served.service.draining.begin()
    async with in_process(served.service.app) as http:
        refused = await http.post("/checkpoints", json=BODY)
        ready, alive = await http.get("/readyz"), await http.get("/healthz")
    assert (refused.status_code, refused.json()["code"]) == (503, "draining")
    assert ready.status_code == 503 and "shutting down" in str(ready.json()["dependencies"])
    assert alive.status_code == 200 and served.events == []
