"""What tests run beside themselves: a real Redis, a server, and whether a process lives."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.supervisor import redis_command, redis_socket

if TYPE_CHECKING:
    import uvicorn


@contextlib.contextmanager
def running_redis(folder: Path) -> Generator[str]:
    """A real redis-server with the product's own settings; yields its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(redis_command(folder), stdout=subprocess.DEVNULL)
    path = redis_socket(folder)
    try:
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline and process.poll() is None, (
                "redis-server did not start"
            )
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait()


@contextlib.asynccontextmanager
async def served(server: uvicorn.Server) -> AsyncGenerator[str]:
    """Serves in this event loop; yields the URL."""
    serving = asyncio.create_task(serve(server))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def serve(server: uvicorn.Server) -> None:
    """Serves without taking over the test process's signals."""
    with contextlib.suppress(asyncio.CancelledError):
        await server._serve()


def lives(pid: int) -> bool:
    """Whether the process still does anything; a zombie does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
