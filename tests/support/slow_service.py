"""A service in a process of its own whose operation takes long in its first life and no time in the
next: `python -m tests.support.slow_service <port> <folder>`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from shared.http.service import Service
from shared.settings import Settings
from shared.wire import Checkpoint, CheckpointRequest

LONG_S = 20.0


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    first_life = not (folder / "lives").exists()
    with (folder / "lives").open("a") as lives:
        lives.write(f"{os.getpid()}\n")

    async def work(request: CheckpointRequest) -> Checkpoint:
        (folder / "working").touch()
        try:
            await asyncio.sleep(LONG_S if first_life else 0.0)
        finally:
            (folder / "ended").touch()
        return Checkpoint(step=request.step, path="/x", size_bytes=os.getpid())

    service = Service("trainer", Settings(log_level="warning"))
    service.operation("POST", "/checkpoints", work)

    service.run(port)


if __name__ == "__main__":
    main()
