"""Locks of compiled extensions: kept while a process holds them, removed after it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from services.trainer.processes.extensions import remove_stale_locks

HOLD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_goes_once_the_process_that_held_it_was_killed(tmp_path: Path) -> None:
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
