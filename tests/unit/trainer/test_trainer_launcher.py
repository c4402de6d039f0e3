"""`python -m services.trainer` says what is wrong in one sentence and exits with 2, before anything heavy is loaded."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    return subprocess.run(
        [sys.executable, "-m", "services.trainer"], cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"HONE_TRAINER_RANK": "2"}, "unknown setting 'HONE_TRAINER_RANK' in the environment; did you mean 'HONE_TRAINER_RANKS'?"),
        ({"HONE_TRAINER_RANKS": "0"}, "'trainer_ranks': got '0'"),
        ({"HONE_HOST": "0.0.0.0"}, "without a token a service listens on this machine only"),
    ],
)
def test_a_bad_setting_is_one_sentence(environment, sentence):
    done = start(**environment)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        done = start(HONE_TRAINER_PORT=port)
    assert done.returncode == 2
    assert done.stderr.startswith(f"the trainer service cannot listen on 127.0.0.1:{port}")
    assert len(done.stderr.splitlines()) == 1


def test_the_launcher_does_not_import_torch():
    code = "import sys, services.trainer.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
