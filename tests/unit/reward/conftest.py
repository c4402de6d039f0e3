"""Fixtures of the reward tests."""

from __future__ import annotations

import pytest

from services.reward.grading.registry import Tools
from shared.wire import Execution
from tests.support.reward_helpers import ScriptedSandbox, tools_of


@pytest.fixture
def scripted_tools() -> Tools:
    """Graders' tools with a sandbox that evaluates everything to 8."""
    return tools_of(ScriptedSandbox(Execution(verdict="ok", value=8)))
