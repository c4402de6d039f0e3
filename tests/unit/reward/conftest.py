"""Fixtures of the reward tests. All tests of a file share an event loop, and so the processes that
its fixtures have started."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from pytest_asyncio import is_async_test

from services.reward.grading.registry import GraderTools
from services.reward.sandbox.local import LocalSandbox
from shared.wire import Execution
from tests.support.reward_helpers import (
    ScriptedSandbox,
    running_sandbox,
    running_tools,
    tools_of,
)
from tests.support.reward_service import running_service


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Where a reward service answers, a process of its own with one slot."""
    with running_service(HONE_SANDBOX_SLOTS="1") as service:
        yield service.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(request: pytest.FixtureRequest) -> AsyncGenerator[LocalSandbox]:
    """An isolated sandbox of the module's `SLOTS`, or of two slots."""
    async with running_sandbox(getattr(request.module, "SLOTS", 2)) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools(request: pytest.FixtureRequest) -> AsyncGenerator[GraderTools]:
    """Graders' tools in a sandbox of the module's `SLOTS`, or of two slots."""
    async with running_tools(getattr(request.module, "SLOTS", 2)) as tools:
        yield tools


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted_tools() -> AsyncGenerator[GraderTools]:
    """Graders' tools with a sandbox that evaluates everything to 8."""
    tools = tools_of(ScriptedSandbox(Execution(verdict="ok", value=8)))
    yield tools
    await tools.limited.close()
