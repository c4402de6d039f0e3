"""A real trainer service as its own processes, and what it is given to train: shared by the system
tests of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shared.host.processes import free_port
from shared.http.client import Client
from shared.job import Job
from shared.job.file import parse_job
from shared.wire import (
    Checkpoint,
    CheckpointRequest,
    FolderWeights,
    PublishRequest,
    StepResult,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    WeightsRef,
)
from tests.support.service_command import service_command
from tests.support.trainer_reference import TEMPERATURE

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
"""Long enough for ranks to come back on a busy machine."""


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    shm: Path
    folder: Path
    host: str = "127.0.0.1"

    def call(self, method: str, path: str, body, result):
        return asyncio.run(self._call(method, path, body, result))

    def client(self) -> Client:
        return Client(
            "trainer", f"http://{self.host}:{self.port}", binary=True, patience_s=DEADLINE_S
        )

    async def _call(self, method: str, path: str, body, result):
        async with self.client() as client:
            if body is None:
                return await client.get(path, result, deadline_s=DEADLINE_S)
            return await client.call(method, path, body, result, deadline_s=DEADLINE_S)

    def load(self, job_id: str, job: Job) -> TrainerState:
        return self.call("PUT", "/job", TrainerJob(job_id=job_id, job=job), TrainerState)

    def step(self, job_id: str, step: int, examples) -> StepResult:
        return self.call(
            "POST",
            "/train_step",
            TrainStepRequest(job_id=job_id, step=step, examples=examples),
            StepResult,
        )

    def checkpoint(self, job_id: str, step: int) -> Checkpoint:
        return self.call(
            "POST", "/checkpoints", CheckpointRequest(job_id=job_id, step=step), Checkpoint
        )

    def state(self) -> TrainerState:
        return self.call("GET", "/state", None, TrainerState)

    def publish(self, job_id: str, version: int) -> FolderWeights:
        body = PublishRequest(job_id=job_id, version=version, method="shm")
        ref = self.call("POST", "/publish_weights", body, WeightsRef).root
        assert isinstance(ref, FolderWeights)
        return ref

    def processes(self) -> list[psutil.Process]:
        """Launcher, torchrun, and the ranks in their order."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def wait_until_back(self, restarts: int, within_s: float = DEADLINE_S) -> TrainerState:
        """Waits until the trainer was started again that often and is ready, and returns its
        state."""
        end = time.monotonic() + within_s
        while True:
            if self.state().restarts >= restarts:
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5),
                ):
                    return self.state()
            assert time.monotonic() < end and self.process.poll() is None, (
                "the trainer did not become ready"
            )
            time.sleep(0.1)


@contextlib.contextmanager
def running(
    folder: Path,
    ranks: int,
    module: str = "services.trainer",
    *,
    restarts: int = 0,
    prefix: Sequence[str] = (),
    **settings: str,
) -> Iterator[Service]:
    """A trainer of its own port and folders, and of further `settings`; its log is shown if a test
    fails.

    `prefix` is a command that runs it.
    """
    folder.mkdir(parents=True)
    port = free_port()
    shm = Path("/dev/shm") / f"hone-test-{os.getpid()}-{port}"
    constants = {"services.trainer.processes.launcher.MAX_RESTARTS": restarts}
    own = {
        "HONE_TRAINER_PORT": str(port),
        "HONE_TRAINER_RANKS": str(ranks),
        "OMP_NUM_THREADS": "1",
        "HONE_RUNS_DIR": str(folder / "runs"),
        "HONE_SHM_DIR": str(shm),
        "TMPDIR": str(folder),
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    log = folder / "log"
    with log.open("wb") as output:
        command = [*prefix, *service_command(module, constants)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=clean | own | settings, stdout=output, stderr=output
        )
    try:
        host = settings.get("HONE_HOST", Service.host)
        yield Service(process, port, log, shm, folder, host)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            sys.stdout.write(log.read_text())
            with contextlib.suppress(FileNotFoundError):
                shm.rmdir()


def a_job(
    model: Path,
    *,
    micro_batch_tokens: int = 16384,
    sections: Mapping[str, Any] | None = None,
    **training: object,
) -> Job:
    """A job in float32. `training` are settings of that section, `sections` whole other ones."""
    document = {
        "name": "t",
        "model": str(model),
        "steps": 12,
        "data": {"train": "x"},
        "rewards": [{"grader": "x"}],
        "sampling": {"temperature": TEMPERATURE},
        "training": {"dtype": "float32", "learning_rate": 1e-3, **training},
        "memory": {"micro_batch_tokens": micro_batch_tokens},
    }
    return parse_job(document | dict(sections or {}))


def gone(processes: list[psutil.Process], within_s: float = 15) -> bool:
    """Whether all have ended in time; zombies that no one reaped count as ended."""

    def runs(process: psutil.Process) -> bool:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(runs(process) for process in processes):
                return True
        time.sleep(0.1)
    return False
