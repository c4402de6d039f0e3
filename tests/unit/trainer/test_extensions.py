"""Compiled extensions: a folder for each Python environment, a sentence while one is compiled, and
locks that are kept while a process holds them and removed after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.trainer.processes import launcher
from services.trainer.processes.launcher import (
    compiling,
    extensions_folder,
    rank_environment,
    remove_stale_locks,
)
from shared.settings import Settings

HOLD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_lock_continuesce_the_process_that_held_it_was_killed(tmp_path: Path) -> None:
    lock = tmp_path / "torch_extensions" / "py311_cpu" / "some_extension" / "lock"
    lock.parent.mkdir(parents=True)
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        remove_stale_locks(environment)
        assert lock.exists()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert lock.exists(), "torch leaves it"
    remove_stale_locks(environment)
    assert not lock.exists()


def test_without_a_cache_there_is_nothing_to_remove(tmp_path: Path) -> None:
    remove_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "none")})


def test_a_lock_that_another_took_between_two_looks_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second look, too, is over before the other process is seen."""
    lock = tmp_path / "some_extension" / "lock"
    lock.parent.mkdir()
    lock.touch()

    sleep = time.sleep

    def another_takes_it(_seconds: float) -> None:
        sleep(0.05)  # the clock of files goes by ticks
        lock.unlink()
        lock.touch()

    monkeypatch.setattr(launcher.time, "sleep", another_takes_it)
    monkeypatch.setattr(launcher, "_is_open", lambda _file: False)
    remove_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert lock.exists()


def test_each_python_environment_compiles_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (own,) = extensions_folder().values()
    assert Path(own).parent == tmp_path / "torch_extensions"
    assert rank_environment(Settings())["TORCH_EXTENSIONS_DIR"] == own
    monkeypatch.setattr(sys, "prefix", "/another/.venv")
    assert extensions_folder()["TORCH_EXTENSIONS_DIR"] != own
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/given")
    assert rank_environment(Settings())["TORCH_EXTENSIONS_DIR"] == "/given"


def test_it_is_said_what_is_compiled_once_that_takes_long(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    lock = tmp_path / "cpu_adam" / "lock"
    assert compiling(environment) is None
    lock.parent.mkdir()
    lock.touch()
    assert compiling(environment) is None, "as it is whenever one is loaded"
    begun = time.time() - 3
    os.utime(lock, (begun, begun))
    assert compiling(environment) == "compiling DeepSpeed's cpu_adam (once, about two minutes)"
