"""How a service's process begins and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from shared.host.processes import free_port

ROOT = Path(__file__).parents[3]
SERVES = """
import sys
from shared.http.service import Service
from shared.host.processes import run_main
run_main("reward", lambda settings: Service("reward", settings).run(int(sys.argv[1])))
"""


def test_a_service_that_is_interrupted_ends_without_a_traceback() -> None:
    command = [sys.executable, "-c", SERVES, str(free_port())]
    environment = {name: value for name, value in os.environ.items() if "HONE_" not in name}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        assert b"service started" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
    assert (process.returncode, said.count(b"\n"), b"service stopped" in said) == (130, 1, True)
