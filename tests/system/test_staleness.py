"""`make demo-tiny` with batches sampled ahead: the bound is never broken, and it learns as much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.orchestrator.store.folder import RunFolder

pytestmark = [pytest.mark.soak, pytest.mark.system, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SEED = 2
ACCURACY = 0.90
"""The same as in the test of `make demo-tiny`."""


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_demo_tiny_learns_at_each_staleness_and_never_beyond_it(max_staleness: int) -> None:
    command = [sys.executable, "-m", "deploy.demo", "--tiny", "--seed", str(SEED)]
    command += ["--set", f"max_staleness={max_staleness}"]
    demo = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    check((ROOT / "runs/demo-tiny").resolve(), max_staleness)


def check(path: Path, max_staleness: int) -> None:
    """Raises AssertionError unless the job learned, within the bound."""
    run = RunFolder(path)
    summary = json.loads((path / "summary.json").read_text())
    logged = {row.step: row.metrics["staleness"] for row in run.metrics() if row.step}
    sampled = {step: _staleness(run, step) for step in run.batch_steps()}
    accuracies = summary["eval_before"], summary["eval_after"]
    print(f"max_staleness {max_staleness}: held-out accuracy {accuracies}, {summary['train_s']} s")
    assert [*logged] == [*sampled] == [*range(1, summary["steps"] + 1)]
    assert logged == {step: max(ages) for step, ages in sampled.items()}
    assert all(0 <= age <= max_staleness for ages in sampled.values() for age in ages)
    assert max(logged.values()) == max_staleness, "and it samples as far ahead as it may"
    assert accuracies[0] <= 0.45 and accuracies[1] >= ACCURACY


def _staleness(run: RunFolder, step: int) -> set[int]:
    """Returns how many steps older than those that are trained the weights are, of each token of
    the step's batch."""
    return {
        step - 1 - version
        for group in run.batch(step).groups
        for rollout in group.rollouts
        for version in rollout.versions
    }
