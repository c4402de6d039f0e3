"""Runs services in the containers, under the supervisor of `hone up`, with their logs on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import local
from hone.client import Client
from shared.errors import Unavailable
from shared.host.logs import get_logger
from shared.http import client as shared_client
from shared.job import Job
from shared.settings.environment import load_settings
from shared.wire import TERMINAL, VersionInfo

FOLDER = Path("/tmp/hone-stack")
LOOK_S = 5.0

START_S = 1800
"""Seconds for a container to start: a new machine pulls an image of 10 GB."""

AWAKE_S = 600
"""Seconds that the trainer's container, with its GPUs, waits for services. They answered before it
was called."""


Sleep = Callable[[float], None]


def start(services: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Starts these services of the container, and returns their URLs once all are ready. A service
    that ends is started again. `environment` is added to this process's."""
    os.environ.update(environment)
    urls = local.up(FOLDER, services=services)["urls"]
    subprocess.Popen(["sh", "-c", "exec tail -qn +1 -F logs/*.log"], cwd=FOLDER)
    return urls


def stop() -> None:
    """Stops the services. Running jobs go on when the services are started again."""
    local.down(FOLDER)


@contextlib.contextmanager
def stack(services: Sequence[str], environment: Mapping[str, str]) -> Generator[Client]:
    """Runs these services in the block, and yields a client of their orchestrator."""
    urls = start(services, environment)
    try:
        with Client(urls["orchestrator"], token=load_settings().bearer()) as client:
            yield client
    finally:
        stop()


def why_away(urls: Sequence[str], deadline_s: float) -> str | None:
    """Returns None once all these services answer, or names one that did not in time. A container
    with GPUs then ends without an error: after an error Modal would start and bill it again."""
    try:
        asyncio.run(wake(urls, deadline_s))
    except Unavailable as error:
        get_logger().error("a service does not answer", reason=error.detail)
        return error.detail
    return None


async def wake(urls: Sequence[str], deadline_s: float = START_S) -> None:
    """Returns once all these services answer. A Server that nobody called has no container yet, and
    a job would think that it is away. Raises Unavailable naming a service that does not answer."""
    token = load_settings().bearer()

    async def ask(url: str) -> None:
        async with shared_client.Client(url, url, token=token, patience_s=deadline_s) as client:
            await client.get("/version", VersionInfo, deadline_s=deadline_s)

    await asyncio.gather(*map(ask, urls))


def work_until_idle(client: Client, idle_s: float, sleep: Sleep = time.sleep) -> None:
    """Returns once no job has waited or run for `idle_s` seconds."""
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < idle_s:
        if any(client.list(1, status=status).jobs for status in ("queued", "running")):
            idle_since = time.monotonic()
        sleep(LOOK_S)


def train(client: Client, job: Job, key: str, sleep: Sleep = time.sleep) -> dict[str, Any]:
    """Returns how the job ended, or that it paused and needs a person. With the same key it is the
    same job: a paused one goes on."""
    id = client.submit(job, key=key).id
    if client.get(id).status == "paused":
        client.resume(id)
    while (record := client.get(id)).status not in {*TERMINAL, "paused"}:
        sleep(LOOK_S)
    return record.model_dump(mode="json", include={"id", "status", "error", "summary"})
