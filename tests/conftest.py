"""What every layer of tests needs: settings that read no environment, a real Redis."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import fastapi.routing
import httpx2._transports.default
import hypothesis
import pytest
import structlog
from fastapi.routing import APIRoute, APIRouter
from starlette.routing import compile_path

from shared.host import nvidia
from shared.settings import Settings
from tests.support.running import running_redis

pytest_plugins = ["tests.compat.versions"]

# Threads that spin while they wait take the cores of every other process of a test, and torch reads
# this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that begins the tests in the background lets them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of what a property is shown for.
hypothesis.settings.register_profile(
    "hone", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("hone")

# A machine with GPUs may have the packages of a laptop.
nvidia.hide_from_cpu_build()


class LazyRoute(APIRoute):
    """A route that is built when an attribute other than its path is first read. An application
    has hundreds of routes, a test makes up to four applications and calls a few routes of each, and
    making a route takes most of the time of making one."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path, (self.path_regex, _, _) = path, compile_path(path)
        self._make = functools.partial(super().__init__, path, endpoint, **options)

    def __getattr__(self, name: str) -> Any:
        if "_make" not in vars(self):
            raise AttributeError(name)
        vars(self).pop("_make")()
        return getattr(self, name)


APIRouter.__init__.__kwdefaults__["route_class"] = LazyRoute
# The model of an answer is the same in every application, and its schema is built once.
fastapi.routing.create_model_field = functools.cache(fastapi.routing.create_model_field)
# Reading the source of each route, for messages of FastAPI, takes as long as a call of it.
fastapi.routing._extract_endpoint_context = lambda _: fastapi.routing.EndpointContext()

# Clients that the tests make read the certificates of the machine once.
httpx2._transports.default.create_ssl_context = functools.cache(httpx2.create_ssl_context)

# No test depends on what the Hub has, or waits for it; it is read when its library is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FIRST_FILES = ("test_demo.py", "test_rollout_engine.py", "test_loop.py", "test_trainer_resume.py")
"""Minutes each: they begin first, so that no worker is left alone with one at the end. The one test
of the demo is given out with the next file but one: the two that run a whole stack follow each
other on one worker, for two stacks at a time on two cores take more than twice as long."""

SOAK_TIMEOUT_S = 3600.0
"""Of a soak test that names none itself: an hour is several times what the longest of them takes
alone on two cores."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Freezes what is imported and collected, which lives to the end: the garbage collector would
    visit half a million objects repeatedly, for half of the time of collecting, and 0.5 s each time
    during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {name: place for place, name in enumerate(FIRST_FILES)}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the settings of the person who runs it."""
    for name in list(os.environ):
        if name.startswith("HONE_"):
            monkeypatch.delenv(name)


def drop_requests(_logger: Any, _method: str, line: structlog.typing.EventDict) -> Any:
    """Drops the log line of each request, which would be shown only for a failed test."""
    if line["event"] == "request":
        raise structlog.DropEvent
    return line


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A test that sets up logging, onto a stream that ends with it, sets it up for itself only."""
    handlers = logging.root.handlers[:]
    # By default a traceback shows all local variables, which takes up to 20 s of processor time.
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    others = structlog.get_config()["processors"][:-1]
    structlog.configure(processors=[drop_requests, *others, plain])
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.root.handlers[:] = handlers


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    folders = {"runs_dir": tmp_path / "runs", "shm_dir": tmp_path / "shm"}
    # The services that stand in for the real ones have one job at a time.
    return Settings(**folders, rollout_adapters=1, log_level="warning")


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_redis(tmp_path / "redis") as url:
        yield url
