"""An agent made with `openai-agents`, unmodified: `examples/openai_agent.py`."""

from __future__ import annotations

import pytest

from tests.compat.conftest import AgentStack
from tests.compat.packages import ROOT, python_with

pytestmark = [pytest.mark.compat, pytest.mark.system, pytest.mark.timeout(1500)]
PACKAGE = "openai-agents"


def test_an_agent_of_the_package_learns(agent_stack: AgentStack) -> None:
    agent = str(ROOT / "examples/openai_agent.py")
    job = agent_stack.job("openai-agent")
    found = agent_stack.learned(job, python_with("openai-agents"), "-c", "16", agent)
    assert found["eval/reward"] > found["before"] + 0.1
    assert found["conversations/forks"] == 0 and found["conversations/mean_turns"] > 1


def test_an_agent_whose_calls_are_forced_learns(agent_stack: AgentStack) -> None:
    text = (ROOT / "examples/openai_agent.py").read_text()
    settings = 'ModelSettings(tool_choice="required"),\n            reset_tool_choice=False'
    agent = agent_stack.folder / "forced_agent.py"
    agent.write_text(text.replace("ModelSettings()", settings))
    job = agent_stack.job("forced-agent")
    found = agent_stack.learned(job, python_with("openai-agents"), "-c", "16", str(agent))
    assert found["eval/reward"] > found["before"] + 0.1 and found["grad_norm"] > 1e-3
    assert found["mismatch/logprob_diff_max"] < 1e-2, "log-probs over what a call may be"
