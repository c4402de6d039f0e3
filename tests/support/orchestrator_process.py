"""The orchestrator as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from shared.host.processes import free_port
from shared.http.client import Client
from shared.settings import Settings
from shared.wire import VersionInfo
from tests.support.service_command import service_command

EXIT_S = 30.0
"""What a process that was told to end may take, of which it gives requests a few seconds."""


@dataclass(frozen=True)
class OrchestratorProcess:
    process: Process
    url: str
    client: Client


async def start(
    redis_url: str,
    *,
    stderr: int | None = None,
    constants: Mapping[str, object] | None = None,
    **environment: str,
) -> Process:
    """Starts the orchestrator and does not wait for it."""
    return await asyncio.create_subprocess_exec(
        *service_command("services.orchestrator", constants),
        env={**os.environ, "HONE_REDIS_URL": redis_url, **environment},
        stderr=stderr,
    )


@contextlib.asynccontextmanager
async def orchestrator_process(
    settings: Settings, redis_url: str, constants: Mapping[str, object] | None = None
) -> AsyncGenerator[OrchestratorProcess]:
    """The orchestrator with what was given to `settings`, and with other `constants`, once it
    answers; ended afterwards, if it has not."""
    port = free_port()
    given = {
        f"HONE_{name.upper()}": str(value)
        for name, value in settings.model_dump(exclude_unset=True).items()
    }
    process = await start(
        redis_url, stderr=None, constants=constants, **given, HONE_ORCHESTRATOR_PORT=str(port)
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with Client("orchestrator", url) as client:
            await client.get("/version", VersionInfo, deadline_s=60)
            yield OrchestratorProcess(process, url, client)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), EXIT_S)
