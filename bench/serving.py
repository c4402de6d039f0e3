"""Services that a bench serves on free ports, and how they are kept quiet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import structlog
import uvicorn

from shared.http.service import Service


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
