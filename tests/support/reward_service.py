"""A reward service in a process of its own, for tests that need it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.host.processes import free_port
from tests.support.service_command import service_command

ROOT = Path(__file__).parents[2]
START_S = 60.0


@dataclass(frozen=True)
class RunningService:
    process: subprocess.Popen[bytes]
    url: str

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        sent = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), sent, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)


@contextmanager
def running_service(
    port: int | None = None,
    constants: Mapping[str, object] | None = None,
    *,
    prefix: tuple[str, ...] = (),
    until: str = "/readyz",
    **settings: str,
) -> Iterator[RunningService]:
    """Yields the service, with other `constants`, once the path `until` answers with success; kills
    it afterwards. `prefix` is a command that starts it."""
    port = port or free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "HONE_REWARD_PORT": str(port),
        "HONE_LOG_LEVEL": "warning",
    } | settings
    with tempfile.TemporaryFile() as log:
        command = [*prefix, *service_command("services.reward", constants)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
        try:
            service = RunningService(process, f"http://127.0.0.1:{port}")
            end = time.monotonic() + START_S
            while not _answers(service, until):
                log.seek(0)
                assert process.poll() is None and time.monotonic() < end, log.read().decode()
                time.sleep(0.05)
            yield service
        finally:
            process.kill()
            process.wait()


def _answers(service: RunningService, path: str) -> bool:
    with suppress(OSError):
        return bool(service.get(path))
    return False
