"""Fixtures of the reward tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.reward.grading.registry import GraderTools
from shared.wire import Execution
from tests.support.reward_helpers import ScriptedSandbox, tools_of
from tests.support.reward_service import running_service


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Where a reward service answers, a process of its own with one slot."""
    with running_service(HONE_SANDBOX_SLOTS="1") as service:
        yield service.url


@pytest.fixture
def scripted_tools() -> GraderTools:
    """Graders' tools with a sandbox that evaluates everything to 8."""
    return tools_of(ScriptedSandbox(Execution(verdict="ok", value=8)))
