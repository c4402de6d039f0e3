"""The job of `make demo-agent` in another environment, on a stack of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from deploy.machine import on_free_ports
from tests.compat.packages import ROOT

SAMPLES = 16
"""Conversations of each held-out row: their mean differs by 0.02 from run to run, by 0.04 of 4."""


@dataclass
class GameStack:
    """A stack in `folder`. `url` is its orchestrator's, and `pid` its supervisor's process."""

    folder: Path
    environment: dict[str, str]
    url: str = ""
    pid: int = 0

    def hone(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hone.cli", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def summary(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())


@contextlib.contextmanager
def game_stack(folder: Path, **settings: str) -> Iterator[GameStack]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    given |= on_free_ports() | {"HONE_TOOL_PARSER": "hermes", "PYTHONPATH": str(ROOT)} | settings
    stack = GameStack(folder, given)
    try:
        state = json.loads(stack.hone("up", "-o", "json"))
        stack.url, stack.pid = state["urls"]["orchestrator"], state["pid"]
        yield stack
    finally:
        stack.hone("down")


def write_job(
    folder: Path, name: str, environment: dict[str, Any], *, tool: str = "guess", **changes: Any
) -> None:
    """Writes folder/job.toml with its model and rows. The model's calls are of `tool`."""
    from deploy.tool_model import write_task  # takes seconds

    write_task(folder, 0)
    for file in (folder / "model").iterdir():
        if file.suffix == ".json":
            text = file.read_text().replace('\\"name\\": \\"guess\\"', f'\\"name\\": \\"{tool}\\"')
            file.write_text(text)
    job = tomllib.loads((ROOT / "deploy/jobs/demo_agent.toml").read_text())
    job |= {"name": name, "model": str(folder / "model"), **changes}
    job["data"] = {"train": str(folder / "train.jsonl"), "eval": str(folder / "test.jsonl")}
    job["environment"] = {"max_turns": 8, **environment}
    job["evaluation"] |= {"every": job["steps"], "samples": SAMPLES}
    (folder / "job.toml").write_text(tomli_w.dumps(job))
