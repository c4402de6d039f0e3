"""What has to be in common for one process to read another's memory of a GPU, and how groups are
made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.weights.meeting import ERROR_HANDLING, memory_space, surviving_peers

OWN = "from shared.weights.meeting import memory_space; print(memory_space())"


def space_of(*prefix: str) -> str:
    command = [*prefix, sys.executable, "-c", OWN]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and prefix:
        pytest.skip(f"no namespaces are to be had here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_processes_of_one_host_have_one_memory_space() -> None:
    assert space_of() == memory_space()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (memory_space() or "").startswith(f"{boot}:")


@pytest.mark.parametrize(
    "apart",
    [
        ["unshare", "--pid", "--fork"],
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"],
    ],
    ids=["pids", "/dev/shm"],
)
def test_containers_have_memory_spaces_of_their_own(apart: list[str]) -> None:
    assert space_of(*apart) != memory_space()


@pytest.mark.parametrize("before", [None, "1"])
def test_groups_made_beside_each_other_leave_the_setting_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    if before:
        monkeypatch.setenv(ERROR_HANDLING, before)
    first, second = surviving_peers(), surviving_peers()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ[ERROR_HANDLING] == "2", "the second one's is being made"
    second.__exit__(None, None, None)
    assert os.environ.get(ERROR_HANDLING) == before
