"""A stack whose jobs are played by agents of other packages, each in an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hone
from deploy.machine import on_free_ports
from deploy.tool_model import write_task
from tests.compat.game import SAMPLES
from tests.compat.packages import ROOT

STEPS = 8
WAIT_S = 900.0


@dataclass
class AgentStack:
    """A stack with the tiny model of the guessing game in `folder`/game."""

    folder: Path
    environment: dict[str, str]
    url: str = ""

    def hone(self, *words: str) -> str:
        command = [sys.executable, "-m", "hone.cli", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def job(self, name: str, **data: str) -> dict[str, Any]:
        """Returns the job of `examples/openai_agent.toml`, with the game's rows or other `data`."""
        job = tomllib.loads((ROOT / "examples/openai_agent.toml").read_text())
        rows = {key: str(self.folder / path) for key, path in job["data"].items()} | data
        model = str(self.folder / job["model"])
        job["evaluation"]["samples"] = SAMPLES
        return job | {"name": name, "model": model, "data": rows, "steps": STEPS}

    def learned(self, job: dict[str, Any], python: Path, *agent: str) -> dict[str, float]:
        """Trains the job with a worker of this interpreter, and returns the last step's metrics and
        the held-out reward before the first, as "before"."""
        with hone.Client(self.url) as client, (self.folder / "work.log").open("w") as log:
            record = client.submit(job)
            words = ["-m", "hone.cli", "work", "--job", record.id, "-o", "json", *agent]
            worker = subprocess.Popen(
                [str(python), *words],
                env=self.environment | {"HONE_ORCHESTRATOR_URL": self.url},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                ended = client.wait(record.id, timeout_s=WAIT_S)
                told = worker.communicate(timeout=120)[0]
            finally:
                worker.kill()
                worker.wait()
            assert ended.status == "succeeded", self.log()
            assert json.loads(told)["failed"] == 0, self.log()
            rows = client.metrics(record.id)
            return rows[-1].metrics | {"before": rows[0].metrics["eval/reward"]}

    def log(self) -> str:
        return (self.folder / "work.log").read_text()[-3000:]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def agent_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentStack]:
    folder = tmp_path_factory.mktemp("agents")
    write_task(folder / "game", 0)
    given = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    given |= on_free_ports() | {"HONE_TOOL_PARSER": "hermes", "PYTHONPATH": str(ROOT)}
    given |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    stack = AgentStack(folder, given)
    try:
        stack.url = json.loads(stack.hone("up", "-o", "json"))["urls"]["orchestrator"]
        yield stack
    finally:
        with contextlib.suppress(AssertionError):
            stack.hone("down")
