"""A server of the package `mcp`, unmodified, as a process of its own: a model learns with its
tool."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.host.processes import free_port
from tests.compat.game import game_stack, write_job
from tests.compat.packages import ROOT

pytestmark = [pytest.mark.compat, pytest.mark.system, pytest.mark.timeout(1200)]

STEPS = 6

FOUND = """
def found(completions, **columns):
    return [float("correct" in told(messages)[:8]) for messages in completions]

def told(messages):
    return [each["content"] for each in messages if each["role"] == "tool"]
"""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(ROOT / "tests/compat/mcp_game.py"), str(port)])
    try:
        deadline = time.monotonic() + 180
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and process.poll() is None, "it did not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_a_model_learns_with_the_tool_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text(FOUND)
    rewards = [{"file": str(tmp_path / "found.py"), "function": "found"}]
    with serving() as url:
        environment = {"kind": "tools", "mcp": [url]}
        write_job(tmp_path, "mcp", environment, steps=STEPS, rewards=rewards)
        with game_stack(tmp_path) as stack:
            stack.hone("run", "job.toml")
            summary = stack.summary("mcp")
    print(f"held out {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}")
    assert summary["steps"] == STEPS
    assert summary["eval_after"] > summary["eval_before"] + 0.1, summary
