"""What runs in the containers: services under the supervisor of `hone up`, their logs on stdout."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import local
from hone.client import Client
from shared.environment import load_settings
from shared.job import Job
from shared.wire import TERMINAL

FOLDER = Path("/tmp/hone-stack")
LOOK_S = 5.0

Sleep = Callable[[float], None]


def start(services: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Starts these services of the container, and returns their URLs once all are ready. Those that
    end are started again. `environment` is added to this process's."""
    os.environ.update(environment)
    urls = local.up(FOLDER, services=services)["urls"]
    subprocess.Popen(["sh", "-c", "exec tail -qn +1 -F logs/*.log"], cwd=FOLDER)
    return urls


def stop() -> None:
    """Stops them. Jobs that run go on when they are started again."""
    local.down(FOLDER)


@contextlib.contextmanager
def stack(services: Sequence[str], environment: Mapping[str, str]) -> Generator[Client]:
    """Has these services run, and yields a client of the orchestrator among them."""
    urls = start(services, environment)
    try:
        with Client(urls["orchestrator"], token=load_settings().bearer()) as client:
            yield client
    finally:
        stop()


def work_until_idle(client: Client, idle_s: float, sleep: Sleep = time.sleep) -> None:
    """Returns once no job has waited or run for `idle_s` seconds."""
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < idle_s:
        if any(client.list(1, status=status).jobs for status in ("queued", "running")):
            idle_since = time.monotonic()
        sleep(LOOK_S)


def train(client: Client, job: Job, key: str, sleep: Sleep = time.sleep) -> dict[str, Any]:
    """Returns how the job ended, or that it paused, which only a person can mend. With the same key
    it is the same job: one that was paused goes on."""
    record = client.submit(job, key=key)
    if client.get(record.id).status == "paused":
        client.resume(record.id)
    while (record := client.get(record.id)).status not in {*TERMINAL, "paused"}:
        sleep(LOOK_S)
    return record.model_dump(mode="json", include={"id", "status", "error", "summary"})
