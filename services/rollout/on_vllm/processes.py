"""Finds models and starts vLLM for them; the environment, logs, causes of death and end of vLLM's
processes. The event loop does not wait for it, and vLLM is imported only when it is needed."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pydantic import ValidationError

from services.rollout.engine import Engine
from shared.errors import BadRequest, Failed
from shared.host import nvidia
from shared.host.processes import run_in_thread
from shared.settings import Settings
from shared.weights.folders import stored_tensors
from shared.weights.model_folder import check_hub, model_folder
from shared.wire import EngineSpec, Sampling

if TYPE_CHECKING:
    from services.rollout.on_vllm.engine import VllmEngine


SERVICE_PID = "ROLLOUT_SERVICE_PID"
"""The variable with the process that vLLM's processes must not outlive: see
`inside_executors.py`."""

NOISY = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.model_executor.models.utils")
"""Loggers that warn at each reload of modules without weights and of tensors with another dtype.
Hone compares the tensors before it loads them."""


SWEEPING = "ignore::UserWarning:multiprocessing.resource_tracker"
"""Python's tracker warns of each semaphore that it removes for a process, also after a graceful end
of vLLM."""

STAGES = {
    "Starting to load model": "reading the weights",
    "Loading weights took": "allocating its cache",
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
        # the folder never exists without its owner's lock
        (self._path / "lock.new").rename(self._path / "lock")
        return self._path

    def remove(self) -> None:
        if self._path and self._lock:
            shutil.rmtree(self._path, ignore_errors=True)
            self._lock.close()


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another service is making it, or it belongs to another user
        return False
    return True


def set_environment(folder: Path) -> tuple[Path, Path]:
    """Prepares the environment that vLLM reads at import. Returns the files into which its
    processes write their errors and the progress of their start."""
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
    """Excludes all present objects, half a million of vLLM and torch, from garbage collection,
    which would visit them repeatedly while an engine samples, for half a second each time. Objects
    that were frozen earlier and are no longer used are collected first."""
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
    # it logs a traceback for each malformed call
    loggers["vllm.tool_parsers"] = {"level": "CRITICAL"}
    loggers["vllm"] = {"handlers": ["stderr", "errors"], "level": "WARNING", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": formatters,
        "handlers": handlers,
        "loggers": loggers,
    }


class VllmStarter:
    """Starts engines. Must exist before anything imports vLLM: vLLM reads its environment at
    import."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = TemporaryFolder()
        self._errors, self._progress = set_environment(self._folder.make())

    async def preload(self) -> None:
        """Imports vLLM, so that the first engine starts in half the time. Raises Failed if it
        cannot be imported."""
        try:
            await run_in_thread(lambda: importlib.import_module("services.rollout.on_vllm.engine"))
        except ImportError as error:
            raise Failed(f"vLLM cannot be imported: {error}") from error

    async def find_model(self, spec: EngineSpec) -> Path:
        """Returns the folder of the model's config.json. Raises BadRequest if there is no such
        model."""
        folder = model_folder(spec.model)
        return folder or await run_in_thread(lambda: _hub_folder(spec))

    async def start(self, spec: EngineSpec, folder: Path) -> Engine:
        """Returns a started engine. Raises Failed with the first error of any of its processes."""
        self._errors.unlink(missing_ok=True)
        self._progress.unlink(missing_ok=True)
        try:
            engine = await run_in_thread(lambda: self._start(spec, folder))
            await engine.find_gpus()
            # A model that it cannot run fails here, not in a job's step.
            await engine.sample([0], Sampling(max_tokens=1), owner="", salt="")
            return engine
        except (BadRequest, asyncio.CancelledError):
            stop_children()
            raise
        except ValidationError as error:
            faults = "; ".join(
                fault["msg"].removeprefix("Value error, ") for fault in error.errors()
            )
            raise BadRequest(
                f"vLLM refuses to serve {spec.model!r} with max_model_len "
                f"{spec.max_model_len or 'of the model'} and dtype {spec.dtype}: {faults}"
            ) from error
        except Exception as error:  # vLLM, torch and the model's code raise any class
            stop_children()
            cause = (
                root_cause(self._errors)
                or f"{type(error).__name__}: {' '.join(str(error).split())}"
            )
            raise Failed(f"the engine for {spec.model!r} did not start: {cause}") from error

    def stage(self) -> str | None:
        return stage_of(self._progress)

    def close(self) -> None:
        stop_children()
        self._folder.remove()

    def _start(self, spec: EngineSpec, folder: Path) -> VllmEngine:
        from services.rollout.on_vllm.engine import VllmEngine

        engine = VllmEngine(spec, folder, self._settings, self._errors)
        if not stored_tensors(folder):
            engine.shut_down()
            raise BadRequest(
                f"model {spec.model!r} has no *.safetensors files, which weight sync compares "
                "against"
            )
        return engine


def _hub_folder(spec: EngineSpec) -> Path:
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(spec.model, "config.json", revision=spec.revision)
    except OSError as error:
        check_hub(spec.model)
        raise BadRequest(
            f"'model': got {spec.model!r}, which is neither a folder here nor a model on the hub: "
            f"{' '.join(str(error).split())}"
        ) from error
    assert config is not None
    return Path(config).parent
