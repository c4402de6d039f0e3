"""The orchestrator with fake services behind it, served on a port by a thread of its own, for tests
that run the `hone` command against it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.orchestrator.app import create_service
from services.orchestrator.store.store import Store
from shared.settings import Settings
from tests.support.fake_services import FakeServices
from tests.support.running import running_redis, served


@dataclass(frozen=True)
class ServedStack:
    url: str
    fakes: FakeServices
    settings: Settings


def quiet_logs() -> None:
    """Keeps what the stack logs out of what a command prints, which the test reads."""
    errors_only = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(
        wrapper_class=errors_only, logger_factory=structlog.PrintLoggerFactory(sys.__stderr__)
    )


@contextlib.contextmanager
def served_stack(folder: Path, **settings: Any) -> Generator[ServedStack]:
    """Yields the stack, whose runs are in `folder`. `settings` may name a real service in place of
    a fake one."""
    with running_redis(folder / "redis") as redis_url:
        own = Settings(
            runs_dir=folder / "runs",
            shm_dir=folder / "shm",
            rollout_adapters=1,
            log_level="error",
            **settings,
        )
        thread = _Thread(FakeServices(own), own, settings, redis_url)
        thread.start()
        try:
            yield thread.stack()
        finally:
            thread.stop()


class _Thread(threading.Thread):
    def __init__(
        self, fakes: FakeServices, settings: Settings, given: dict[str, Any], redis_url: str
    ) -> None:
        super().__init__(daemon=True)
        self._fakes, self._settings, self._given = fakes, settings, given
        self._redis_url = redis_url
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._url = ""

    def stack(self) -> ServedStack:
        assert self._ready.wait(60), "the stack did not start"
        return ServedStack(self._url, self._fakes, self._settings)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self.join(60)

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with self._fakes.running(self._settings) as settings:
            self._settings = settings.model_copy(update=self._given)
            store = Store(self._redis_url)
            await store.open()
            async with served(create_service(self._settings, store).server(0)) as self._url:
                self._ready.set()
                await self._end.wait()
