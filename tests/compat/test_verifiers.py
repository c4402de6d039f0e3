"""A taskset and harness of `verifiers`, unmodified, by Hone's adapter and the package's own
environment server."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.compat.conftest import AgentStack, write_rows
from tests.compat.packages import ROOT, python_with

pytestmark = [pytest.mark.compat, pytest.mark.system, pytest.mark.timeout(1500)]
PACKAGE = "verifiers"

AGENT = """
from hone.agents.verifiers import environment

run = environment(
    taskset={"id": "verifiers-guess"}, agent={"runtime": {"type": "subprocess"}}
)
"""


def test_a_taskset_learns_with_its_own_harness(agent_stack: AgentStack) -> None:
    python = python_with("verifiers")
    env = agent_stack.environment
    env = env | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/compat'}"}
    stack = AgentStack(agent_stack.folder, env, agent_stack.url)
    made = subprocess.run(
        [str(python), "-m", "hone.agents.verifiers", "verifiers-guess"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(rows) == 64 and rows[3]["task"]["idx"] == 3
    agent = stack.folder / "agent.py"
    agent.write_text(AGENT)
    job = stack.job(
        "verifiers",
        train=write_rows(stack.folder / "tasks.jsonl", rows[16:]),
        eval=write_rows(stack.folder / "held_out.jsonl", rows[:16]),
    )
    found = stack.learned(job, python, "-c", "32", str(agent))
    assert found["eval/reward"] > found["before"] + 0.1
    assert found["agent/mean_guesses"] > 1 and found["environment_failures"] == 0
