"""`make gpu`: runs the tests here and writes gpu_report.txt, the one file to send back: the
machine, `hone doctor`, the packages, and every figure that a test prints, without secrets.

    python -m tests.gpu [--report gpu_report.txt] [OPTIONS OF PYTEST]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from shared.settings import secret_variables

ROOT = Path(__file__).parents[2]
REPORT = Path("gpu_report.txt")
SECRETS = {"HF_TOKEN", "WANDB_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"}
"""Variables of other programs, beside Hone's own."""

FIELDS = "name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current,pstate"
LOOKS: tuple[tuple[str, Sequence[str]], ...] = (
    ("commit", ("git", "log", "-1", "--format=%H %cI")),
    ("changes", ("git", "status", "--short", "--untracked-files=no")),
    ("GPUs", ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv")),
    ("links between GPUs", ("nvidia-smi", "topo", "-m")),
    ("CPU", ("sh", "-c", "lscpu | grep -E '^(CPU\\(s\\)|Model name|NUMA)'")),
    ("memory", ("free", "-g")),
    ("disk", ("df", "-h", ".", "/dev/shm", "/tmp")),
    ("packages", (sys.executable, "-m", "uv", "pip", "list", "--python", sys.executable)),
    ("hone doctor", (sys.executable, "-m", "hone.cli", "doctor")),
)


class Report:
    """A file, and what is written to it on the screen too, line by line; secrets are left out."""

    def __init__(self, file: TextIO, secrets: Iterable[str]) -> None:
        self._file = file
        self._secrets = sorted(secrets, key=len, reverse=True)

    def write(self, line: str) -> None:
        for secret in self._secrets:
            line = line.replace(secret, "***")
        for stream in (self._file, sys.stdout):
            stream.write(line)
            stream.flush()

    def run(self, title: str, command: Sequence[str]) -> int:
        """Writes what the command prints, and returns its exit code; 127 if there is none."""
        self.write(f"\n== {title}\n")
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except OSError as error:
            self.write(f"{command[0]}: {error.strerror}\n")
            return 127
        assert process.stdout
        with process:
            for line in process.stdout:
                self.write(line)
        return process.returncode


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Returns the values that are left out of the report."""
    names = SECRETS | {*secret_variables().values()}
    return {value for name, value in environment.items() if name in names and value}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--report", type=Path, default=REPORT, help=f"default: {REPORT}")
    arguments, others = parser.parse_known_args()
    tests = ("-m", "pytest", "-m", "gpu", "-s", "-v", "--durations", "0")
    with arguments.report.open("w") as file:
        report = Report(file, secrets_of(os.environ))
        for title, command in LOOKS:
            report.run(title, command)
        code = report.run("tests", (sys.executable, *tests, *(others or ["tests/gpu"])))
        report.write(f"\nTo send back: {arguments.report.resolve()}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
