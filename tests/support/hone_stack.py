"""A stack that a test starts in a folder as a user does, by `hone up`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from deploy.machine import on_free_ports

ROOT = Path(__file__).parents[2]
LIMIT_S = 800.0
"""Of a command."""


def own_environment(**settings: str) -> dict[str, str]:
    """Returns the environment of a stack on free ports with these settings alone: without the
    HONE_ variables of the test's process."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    return given | on_free_ports() | {"PYTHONPATH": str(ROOT)} | settings


@dataclass
class HoneStack:
    """A stack in `folder`. While it runs, `urls` has the URL of each service, and `launcher` is the
    process that started them."""

    folder: Path
    environment: dict[str, str]
    urls: dict[str, str] = field(default_factory=dict[str, str])
    launcher: int = 0

    @property
    def url(self) -> str:
        return self.urls["orchestrator"]

    def hone(self, *arguments: str) -> str:
        """Returns the output of a command of `hone`, which has to succeed."""
        return self.run(sys.executable, "-m", "hone.cli", *arguments)

    def run(self, *command: str, **environment: str) -> str:
        """Returns the output of a command in the stack's folder, which has to succeed."""
        done = self.attempt(*command, **environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def attempt(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Returns a command in the stack's folder that ended, in whatever way."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    @contextlib.contextmanager
    def running(self) -> Generator[Self]:
        """Starts the stack; stops it at the end."""
        try:
            state = json.loads(self.hone("up", "-o", "json"))
            self.urls, self.launcher = state["urls"], state["pid"]
            yield self
        finally:
            self.hone("down")
