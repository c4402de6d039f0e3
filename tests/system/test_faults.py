"""A few of the faults of `make faults`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.system, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


def test_a_job_of_four_faults_is_as_undisturbed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--faults", "4"]
    command += ["--out", str(tmp_path / "results.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert json.loads(done.stdout.splitlines()[-1])["ok"], said
