"""Calls of tools that vLLM's parser finds, in conversations. The checks are in
`tests/support/vllm_chat_checks.py`: they import vLLM, which takes some 15 s and changes the
process, so they have one of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.system]

ROOT = Path(__file__).parents[2]


def test_calls_of_tools_are_recorded_as_vllms_own_parser_finds_them() -> None:
    checks = "tests/support/vllm_chat_checks.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", checks],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-5000:]
