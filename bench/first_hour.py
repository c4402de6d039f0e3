"""What a new user waits for: the seconds from `hone run` to the first step, and the longest silence
on the way.

    python -m bench.first_hour [--model FOLDER --data FILE] [--repeats 1]

`hone run job.toml` is started as in a script, with its output in a pipe, in an empty folder without
a stack: it starts one, submits the job and follows it. The time of every line is noted as it comes.
Without `--model`, `deploy/tiny_model.py` makes the model and its problems; with it,
`hone init` writes the job for the model and the data. The first step's line ends the measurement:
the job is cancelled, and the stack stopped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.report import Figure, count, finish, table
from deploy.machine import on_free_ports

MOST_SILENCE_S = 5.0
ROOT = Path(__file__).parents[1]
FIRST_STEP = re.compile(r"step 1/\d+  reward")
ACCEPTED = " accepted; "


@dataclass(frozen=True)
class Line:
    """A line of output, and when it came: seconds since the command was started."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Start:
    """Seconds until the stack was ready and the job accepted, from there to the first step, and the
    longest silence until then, with the line before it."""

    accepted_s: float
    first_step_s: float
    silence_s: float
    before: str


def measured(lines: Sequence[Line]) -> Start:
    """Returns what the lines of a run say, of which the last is the first step's."""
    accepted_s = next(line.at_s for line in lines if ACCEPTED in line.text)
    pairs = itertools.pairwise([Line(0.0, "(the command was started)"), *lines])
    silence_s, before = max((after.at_s - line.at_s, line.text) for line, after in pairs)
    return Start(accepted_s, lines[-1].at_s - accepted_s, silence_s, before)


def hone(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hone.cli", *arguments]


def lines_of(folder: Path, environment: dict[str, str]) -> Iterator[Line]:
    """Yields the lines of `hone run` up to the first step's. Raises RuntimeError if it ends
    before."""
    began = time.monotonic()
    running = subprocess.Popen(
        hone("run", "job.toml"),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout
    try:
        for text in running.stdout:
            yield Line(time.monotonic() - began, text.rstrip())
            if FIRST_STEP.search(text):
                return
        raise RuntimeError(f"`hone run` ended with exit code {running.wait()}")
    finally:
        running.kill()
        running.wait()


def one_start(model: str | None, data: str | None) -> Start:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | on_free_ports() | {"PYTHONPATH": str(ROOT)}
        write_job(folder, model, data, environment)
        lines: list[Line] = []
        try:
            for line in lines_of(folder, environment):
                print(f"{line.at_s:7.1f} s  {line.text}", flush=True)
                lines.append(line)
        finally:
            subprocess.run(hone("down"), cwd=folder, env=environment, check=False)
        return measured(lines)


def write_job(
    folder: Path, model: str | None, data: str | None, environment: dict[str, str]
) -> None:
    if model and data:
        given = ("--model", str(Path(model).resolve()), "--data", str(Path(data).resolve()))
        subprocess.run(hone("init", *given), cwd=folder, env=environment, check=True)
        return
    task = [sys.executable, "-m", "deploy.tiny_model", "--out", str(folder / "task"), "--seed", "3"]
    subprocess.run(task, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    text = (ROOT / "deploy/jobs/demo_tiny.toml").read_text()
    (folder / "job.toml").write_text(text.replace(".hone/demo-tiny/task", "task"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder, with --data (default: demo-tiny's)")
    parser.add_argument("--data", help="a data file")
    parser.add_argument("--repeats", type=count, default=1)
    arguments = parser.parse_args()
    starts = [one_start(arguments.model, arguments.data) for _ in range(arguments.repeats)]
    longest = max(starts, key=lambda start: start.silence_s)
    rows = [
        [f"{start.accepted_s:.1f}", f"{start.first_step_s:.1f}", f"{start.silence_s:.1f}"]
        for start in starts
    ]
    header = ["until accepted, s", "to the first step, s", "longest silence, s"]
    print(f"\n{table(rows, header)}\n\nthe longest silence came after: {longest.before}\n")
    figures = [
        Figure("accepted", median(start.accepted_s for start in starts), "s"),
        Figure("first step", median(start.first_step_s for start in starts), "s"),
        Figure("longest silence", longest.silence_s, "s", MOST_SILENCE_S, "max"),
    ]
    return finish("first_hour", figures, starts=[asdict(start) for start in starts])


if __name__ == "__main__":
    sys.exit(main())
