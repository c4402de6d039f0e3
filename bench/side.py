"""The sides of a bench, each in a process of its own, which says what it measured as JSON: a line
for each thing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

BEGINNINGS = ('{"', '["', '"')


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts a side, with its stdin and stdout here."""
    return subprocess.Popen(
        command(module, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        **options,
    )


def told(side: subprocess.Popen[str]) -> Any | None:
    """Returns what the side says next, None at its end. vLLM may print other lines."""
    assert side.stdout
    for line in iter(side.stdout.readline, ""):
        if line.startswith(BEGINNINGS):
            return json.loads(line)
    return None


def run(module: str, *arguments: str, limit_s: float) -> dict[str, Any]:
    """Returns what a side says last. Raises RuntimeError if it fails."""
    line = command(module, *arguments)
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
