"""An environment of the package `atroposlib`, unmodified, in an environment of its own: it samples
from the stack, pushes what it scored, and a model learns, although the orchestrator is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w

import hone
from deploy.machine import on_free_ports
from services.orchestrator.extensions.pushed.queue import PushedQueue
from services.orchestrator.store.folder import RunFolder
from tests.compat.packages import ROOT, python_with

pytestmark = [pytest.mark.compat, pytest.mark.system, pytest.mark.timeout(1800)]
PACKAGE = "atroposlib"

STEPS, GROUPS, SIZE = 20, 16, 8


@dataclass
class Stack:
    folder: Path
    environment: dict[str, str]
    url: str = ""
    launcher: int = 0

    def hone(self, *words: str) -> str:
        command = [sys.executable, "-m", "hone.cli", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def kill_orchestrator(self) -> None:
        children = Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children.split()}
        (pid,) = [pid for pid, said in commands.items() if "services.orchestrator" in said]
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    stack = Stack(tmp_path, given | on_free_ports() | {"PYTHONPATH": str(ROOT)})
    make = [sys.executable, "-m", "deploy.tiny_model", "--out", str(tmp_path), "--seed", "0"]
    subprocess.run(make, check=True, cwd=ROOT)
    state = json.loads(stack.hone("up", "-o", "json"))
    stack.url, stack.launcher = state["urls"]["orchestrator"], state["pid"]
    try:
        yield stack
    finally:
        stack.hone("down")


class Environment:
    """The environment's process. It gives up once the orchestrator is unreachable for some seconds,
    and is started again then, as its user would do."""

    def __init__(self, stack: Stack, given: dict[str, str]) -> None:
        self._stack = stack
        self._given = given
        self._log = stack.folder / "environment.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        program = str(ROOT / "tests/compat/atropos_countdown.py")
        with self._log.open("a") as log:
            return subprocess.Popen(
                [str(python_with("atropos")), program, "serve"],
                cwd=self._stack.folder,
                env=self._stack.environment | self._given,
                stdout=log,
                stderr=log,
            )

    def ended_with_the_job(self) -> bool:
        """Waits for its end, and returns whether the job's end was the reason: it exits with 0, or
        was started again just then and may not register any more."""
        refused = "Error registering env: 409, message='Conflict'"
        return self.process.wait(120) == 0 or refused in self._log.read_text()

    def log(self) -> str:
        return self._log.read_text()[-3000:]

    def keep_until(self, is_so: Callable[[], bool], seconds: float = 900) -> None:
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(hone.HoneError):  # the orchestrator is coming back
                if is_so():
                    return
            if self.process.poll() is not None:
                self.process = self._start()
            assert time.monotonic() < end, self.log()
            time.sleep(0.5)


def write_job(folder: Path) -> Path:
    """Writes the job of `make demo-tiny`, with pushed groups in place of problems to train on."""
    job = tomllib.loads((ROOT / "deploy/jobs/demo_tiny.toml").read_text())
    job |= {"name": "atropos", "model": str(folder / "model"), "steps": STEPS, "max_staleness": 2}
    job["data"] = {"eval": str(folder / "test.jsonl")}
    job["environment"] = {"kind": "pushed"}
    job["sampling"] |= {"prompts_per_step": GROUPS, "group_size": SIZE}
    job["evaluation"]["every"] = STEPS
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(job))
    return path


def test_a_model_learns_from_an_environment_and_no_group_is_lost(stack: Stack) -> None:
    with hone.Client(stack.url) as client:
        job = client.submit(hone.load_job(str(write_job(stack.folder)))).id
        countdown = {
            "model": str(stack.folder / "model"),
            "train": str(stack.folder / "train.jsonl"),
            "group_size": SIZE,
            "rollout_server_url": f"{stack.url}/v1/jobs/{job}/atropos",
            "base_url": f"{stack.url}/v1",
        }
        environment = Environment(stack, {"COUNTDOWN": json.dumps(countdown)})
        try:
            for step in (4, 10):
                environment.keep_until(lambda step=step: client.get(job).step >= step)
                stack.kill_orchestrator()
                before = accepted(stack, job)
                environment.keep_until(lambda n=before: client.groups(job).accepted > n)
            environment.keep_until(lambda: client.get(job).status != "running")
            assert environment.ended_with_the_job(), environment.log()
        finally:
            environment.process.kill()
            environment.process.wait()
        record, counts = client.get(job), client.groups(job)
    assert record.status == "succeeded" and record.summary
    folder = RunFolder(stack.folder / "runs" / job)
    taken = [p.index for step in range(1, STEPS + 1) for p in folder.batch(step).prompts]
    assert taken == [*range(1, STEPS * GROUPS + 1)]  # each once, none left out
    assert counts.trained == STEPS * GROUPS and counts.dropped == 0
    assert record.summary["eval_after"] > record.summary["eval_before"] + 0.15, record.summary


def accepted(stack: Stack, job: str) -> int:
    """Returns how many groups are on disk, without the orchestrator."""
    return PushedQueue(stack.folder / "runs" / job).look(lambda ledger: ledger.num_accepted)
