"""The whole job of `make demo-tiny` on one GPU, with sampler and trainer beside each other on it,
and taking turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("colocate", [False, True], ids=["beside", "in turns"])
def test_demo_tiny_learns_on_one_gpu(colocate: bool) -> None:
    own = {"HONE_COLOCATE": str(int(colocate)), "CUDA_VISIBLE_DEVICES": "0"}
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.demo", "--tiny", "--seed", "2"],
        cwd=ROOT,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        try:
            stdout, stderr = demo.communicate()
        finally:
            demo.terminate()
    assert demo.returncode == 0, stdout[-3000:] + stderr[-3000:]
    summary = json.loads((ROOT / "runs/demo-tiny/summary.json").read_text())
    print(f"accuracy {summary['eval_before']:.2f} to {summary['eval_after']:.2f}; seconds a step:")
    print({name: round(value, 3) for name, value in summary["seconds_per_step"].items()})
    assert "vllm" in summary["versions"]["rollout"], "this was not vLLM with CUDA"
    assert summary["eval_before"] <= 0.45 and summary["eval_after"] >= 0.8
