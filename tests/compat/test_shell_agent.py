"""An agent that is a shell script with curl."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.compat.conftest import AgentStack
from tests.compat.packages import ROOT

pytestmark = [pytest.mark.compat, pytest.mark.system, pytest.mark.timeout(1500)]


def test_a_shell_agent_learns(agent_stack: AgentStack) -> None:
    script = str(ROOT / "tests/compat/shell_agent.sh")
    job = agent_stack.job("shell")
    found = agent_stack.learned(job, Path(sys.executable), "--", "sh", script)
    assert found["eval/reward"] > found["before"] + 0.1
    assert found["conversations/forks"] == 0 and found["conversations/mean_turns"] > 1
