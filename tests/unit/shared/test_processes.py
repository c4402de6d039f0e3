"""Processes that end with another, with real ones that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.running import lives

ROOT = Path(__file__).parents[3]

STARTS_A_CHILD = """
import subprocess, sys, time
from shared.host.processes import ending_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn={how})
print(child.pid, flush=True)
time.sleep(60)
"""

ASKS_ITSELF = """
import os, subprocess, sys, time
source = "import os, sys, time; from shared.host.processes import {how}; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", source, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
SAY_AND_SLEEP = "(int(sys.argv[1])); print(flush=True)"


@pytest.mark.parametrize(
    "source",
    [
        STARTS_A_CHILD.format(how="ending_with_parent()"),
        ASKS_ITSELF.format(how="end_with_parent; end_with_parent" + SAY_AND_SLEEP),
        ASKS_ITSELF.format(how="die_with; die_with" + SAY_AND_SLEEP),
    ],
    ids=["ending_with_parent", "end_with_parent", "die_with"],
)
def test_a_child_ends_with_a_parent_that_is_killed(source: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert lives(child)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while lives(child):
        assert time.monotonic() < end
        time.sleep(0.01)
    parent.stdout.close()


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    source = (
        "import time; from shared.host.processes import end_with_parent as e; "
        "e(1 << 22); time.sleep(9)"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, timeout=20, check=False)
    assert done.returncode == -signal.SIGTERM
