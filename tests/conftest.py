"""What every layer of tests needs: settings that read no environment, a real Redis."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shared.config import Settings
from tests.support.running import running_redis


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


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_redis(tmp_path / "redis") as url:
        yield url
