"""The sides of a bench, each in a process of its own, which says what it measured as JSON: a line
for each thing. And the services that a bench serves on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import structlog
import uvicorn

from shared.http.service import Service

BEGINNINGS = ('{"', '["', '"')


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts a side, with its stdin and stdout here."""
    return subprocess.Popen(
        command(module, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        **options,
    )


def told(side: subprocess.Popen[str]) -> Any | None:
    """Returns what the side says next, None at its end. vLLM may print other lines."""
    assert side.stdout
    for line in iter(side.stdout.readline, ""):
        if line.startswith(BEGINNINGS):
            return json.loads(line)
    return None


def run(module: str, *arguments: str, limit_s: float) -> dict[str, Any]:
    """Returns what a side says last. Raises RuntimeError if it fails."""
    line = command(module, *arguments)
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


@contextlib.asynccontextmanager
async def serving(services: list[Service]) -> AsyncGenerator[list[str]]:
    """Yields the URLs of the services."""
    servers = [service.server(0) for service in services]
    tasks = [asyncio.create_task(_serve(server)) for server in servers]
    while not all(server.started for server in servers):
        await asyncio.sleep(0.01)
    ports = [server.servers[0].sockets[0].getsockname()[1] for server in servers]
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)


async def _serve(server: uvicorn.Server) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await server._serve()  # without its own signal handlers


def quiet() -> None:
    """Errors are logged, and nothing else."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
