"""Tinker's SDK, unmodified: a program trains and samples a model here, also while what serves it is
killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.tiny_model import write_task
from tests.compat.conftest import AgentStack
from tests.compat.packages import ROOT, python_with

pytestmark = [pytest.mark.compat, pytest.mark.system, pytest.mark.timeout(900)]
PACKAGE = "tinker"


def played(stack: AgentStack, model: Path, meanwhile: Callable[[str], None]) -> dict[str, Any]:
    """Runs the program, and returns what it printed last. `meanwhile` is called where it waits."""
    environment = stack.environment | {"TINKER_BASE_URL": stack.url, "TINKER_API_KEY": "tml-none"}
    command = [str(python_with("tinker")), str(ROOT / "tests/compat/tinker_program.py"), str(model)]
    with (
        (stack.folder / "tinker.log").open("w") as log,
        subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as program,
    ):
        assert program.stdin and program.stdout
        last = ""
        for line in program.stdout:
            last = line
            if line.strip().isdigit():
                meanwhile(line.strip())
                program.stdin.write("\n")
                program.stdin.flush()
        assert program.wait() == 0, (stack.folder / "tinker.log").read_text()[-3000:]
    return json.loads(last)


def kill(stack: AgentStack, module: str) -> None:
    """Kills the stack's processes that run the module."""
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
            is_ours = (process / "cwd").readlink().is_relative_to(stack.folder)
        except OSError:
            continue
        if module in command and is_ours:
            os.kill(int(process.name), signal.SIGKILL)
            killed += 1
    assert killed, module


def test_a_program_learns_and_no_death_changes_what_it_learns(agent_stack: AgentStack) -> None:
    write_task(agent_stack.folder / "sums", 3)
    model = agent_stack.folder / "sums/model"
    undisturbed = played(agent_stack, model, lambda _: None)
    assert undisturbed["losses"][-1] < undisturbed["losses"][0] / 4
    assert undisturbed["right"] > 0.5
    # in bfloat16, where a CPU computes in it, sampler and trainer round otherwise
    assert undisturbed["first_scored"] is None and undisturbed["apart"] < 0.03
    assert undisturbed["top_has_own"] and undisturbed["top_is_best"]
    assert undisturbed["num_top"][0] == 0 and {*undisturbed["num_top"][1:]} == {3}
    assert undisturbed["merged"] == [pytest.approx(400), 1200]
    # the ratio is 1 but for the engines' rounding: the loss is minus the sum of advantages
    assert undisturbed["importance_loss"] == pytest.approx(-undisturbed["advantages"], rel=0.01)
    assert undisturbed["sequence_loss"] == pytest.approx(-undisturbed["advantages"], rel=0.01)
    assert undisturbed["wide_is_the_same"] < 0.03
    assert undisturbed["path"].endswith("/weights/end")
    assert undisturbed["twins_are_equal"], "a model from its checkpoint continues as the first does"

    victims = {"4": "services.trainer", "8": "services.orchestrator"}
    disturbed = played(agent_stack, model, lambda at: kill(agent_stack, victims[at]))
    assert disturbed["losses"] == undisturbed["losses"]
