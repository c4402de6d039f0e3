"""The environment, logs, causes of death and end of vLLM's processes. Imports nothing heavy."""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import IO

from shared.host import nvidia

SERVICE_PID = "ROLLOUT_SERVICE_PID"
"""The variable with the process that vLLM's processes must not outlive: see
`inside/executors.py`."""

NOISY = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.model_executor.models.utils")
"""Loggers that warn at each reload of modules without weights and of tensors with another dtype.
Hone compares the tensors before it loads them."""


SWEEPING = "ignore::UserWarning:multiprocessing.resource_tracker"
"""Python's tracker warns of each semaphore that it removes for a process, also when vLLM ends in
order."""

STAGES = {
    "Starting to load model": "reading the weights",
    "Loading weights took": "making room for its cache",
    "Compile and warming up": "compiling",
    "Warming up model": "warming up",
    "Graph capturing": "recording CUDA graphs",
    "init engine": "sampling for the first time",
}
"""Log lines of vLLM while an engine starts, and the stage that begins with each."""

TELLING = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.model_loader.default_loader",
)
"""The loggers of these lines."""


class TemporaryFolder:
    """A folder for vLLM's files, up to hundreds of MB. `make` also removes the folders of killed
    services: the owner of a folder holds a lock on a file in it."""

    def __init__(self, prefix: str = "hone-vllm-") -> None:
        # A short prefix: a socket's path has at most 107 bytes.
        self._prefix = prefix
        self._path: Path | None = None
        self._lock: IO[str] | None = None

    def make(self) -> Path:
        for other in Path(tempfile.gettempdir()).glob(f"{self._prefix}*"):
            if _is_abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        self._path = Path(tempfile.mkdtemp(prefix=self._prefix))
        self._lock = (self._path / "lock.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self._path / "lock.new").rename(self._path / "lock")  # never there without its owner
        return self._path

    def remove(self) -> None:
        if self._path and self._lock:
            shutil.rmtree(self._path, ignore_errors=True)
            self._lock.close()


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # someone's, being made, or another user's
        return False
    return True


def set_environment(folder: Path) -> tuple[Path, Path]:
    """Prepares the environment that vLLM reads at import. Returns the files that its processes
    write their errors to, and how far their start is."""
    errors, progress = folder / "errors.log", folder / "progress.log"
    logging_config = folder / "logging.json"
    logging_config.write_text(json.dumps(_logging_config(errors, progress)), encoding="utf-8")
    os.environ[SERVICE_PID] = str(os.getpid())
    os.environ.update(nvidia.compilers())
    os.environ.update(
        VLLM_LOGGING_CONFIG_PATH=str(logging_config),
        VLLM_RPC_BASE_PATH=str(folder),  # sockets and other files that vLLM leaves behind
        TMPDIR=str(folder),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # this process has threads, which a fork would freeze
        PYTHONWARNINGS=",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), SWEEPING))),
    )
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Spinning threads of two engines on shared cores cost 10 times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return errors, progress


def root_cause(errors: Path) -> str | None:
    """Returns the first exception that vLLM's processes logged, as one line, or None."""
    if not errors.exists():
        return None
    causes = [
        line
        for line in errors.read_text(errors="replace").splitlines()
        if re.match(r"[\w.]*(Error|Exception)\b: ", line)
    ]
    return causes[0] if causes else None


def stage_of(progress: Path) -> str | None:
    """Returns the stage of an engine that starts, by vLLM's last log lines; None if not known."""
    if not progress.exists():
        return None
    for line in reversed(progress.read_text(errors="replace").splitlines()):
        for begins, stage in STAGES.items():
            if begins in line:
                return stage
    return None


def stop_children() -> None:
    """Kills the processes that this one started through multiprocessing, wherever in their start
    they are."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join(5.0)


def freeze_heap() -> None:
    """Excludes all present objects, half a million of vLLM and torch, from garbage collection. The
    collector would visit all of them again and again while an engine samples, half a second each
    time. Objects that were frozen earlier and are not used any more are collected."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _logging_config(errors: Path, progress: Path) -> dict[str, object]:
    handlers = {
        "stderr": {
            "class": "logging.StreamHandler",
            "stream": "ext://sys.stderr",
            "level": "WARNING",
            "formatter": "short",
        },
        "progress": {
            "class": "logging.FileHandler",
            "filename": str(progress),
            "delay": True,
            "formatter": "bare",
        },
        "errors": {
            "class": "logging.FileHandler",
            "filename": str(errors),
            "delay": True,
            "level": "ERROR",
            "formatter": "bare",
        },
    }
    formatters = {
        "short": {"format": "%(levelname)s %(name)s: %(message)s"},
        "bare": {"format": "%(message)s"},
    }
    loggers: dict[str, object] = {name: {"level": "ERROR"} for name in NOISY}
    loggers |= {name: {"level": "INFO", "handlers": ["progress"]} for name in TELLING}
    loggers["vllm.tool_parsers"] = {"level": "CRITICAL"}  # a traceback for each malformed call
    loggers["vllm"] = {"handlers": ["stderr", "errors"], "level": "WARNING", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": formatters,
        "handlers": handlers,
        "loggers": loggers,
    }
