"""What every layer of tests needs: settings that read no environment, free ports, a real Redis."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog

from deploy import redis_server
from shared.config import Settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the settings of whoever runs it."""
    for name in list(os.environ):
        if name.startswith("HONE_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A test that sets up logging, onto a stream that ends with it, sets it up for itself only."""
    handlers = logging.root.handlers[:]
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.root.handlers[:] = handlers


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(runs_dir=tmp_path / "runs", shm_dir=tmp_path / "shm", log_level="warning")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_redis(folder: Path) -> Generator[str]:
    """A real redis-server with the product's own settings; yields its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(redis_server.command(folder), stdout=subprocess.DEVNULL)
    path = redis_server.socket_path(folder)
    try:
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline and process.poll() is None, "redis-server did not start"
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_redis(tmp_path / "redis") as url:
        yield url
