"""Work in a process of its own, with real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.orchestrator.data.subprocesses import SubprocessTimeout, run_in_subprocess
from shared.errors import Failed
from tests.support.running import lives

ROOT = Path(__file__).parents[3]

ASKS_AND_IS_KILLED = """
import asyncio, os, time
from pathlib import Path
from services.orchestrator.data.subprocesses import run_in_subprocess

async def main():
    asked = asyncio.create_task(run_in_subprocess(time.sleep, 60, deadline_s=100))
    children = Path(f"/proc/self/task/{{os.getpid()}}/children")
    while not (found := children.read_text()):
        await asyncio.sleep(0)
    await asyncio.sleep({seconds})
    print(found, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.parametrize("seconds", [0.02, 2.0], ids=["while it starts", "while it works"])
def test_work_ends_with_its_caller(seconds: float) -> None:
    source = ASKS_AND_IS_KILLED.format(seconds=seconds)
    asked = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False
    )
    child, end = int(asked.stdout), time.monotonic() + 20
    while lives(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def warn_and_exit() -> None:
    os.write(2, b"a warning\nno room on the disk\n\n")
    os._exit(3)


async def test_a_process_that_ends_without_a_result_is_named_with_its_last_line() -> None:
    with pytest.raises(Failed) as raised:
        await run_in_subprocess(warn_and_exit, deadline_s=60, what="fetching the model 'm'")
    assert raised.value.detail == (
        "fetching the model 'm' failed: its process ended with status 3: no room on the disk"
    )


async def test_work_that_takes_too_long_is_named_with_its_deadline() -> None:
    with pytest.raises(
        SubprocessTimeout, match=r"^reading the data 'x' did not finish within 0.1 s$"
    ):
        await run_in_subprocess(time.sleep, 60, deadline_s=0.1, what="reading the data 'x'")
