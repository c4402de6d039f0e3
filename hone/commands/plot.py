"""`hone plot`: a job's learning curve, in the terminal or as a picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hone.shell import JobArgument, Output, OutputOption, command, connect, show
from hone.view import text_curve
from shared.errors import Failed
from shared.wire import MetricsList


@command
def plot(
    job: JobArgument,
    png: Annotated[Path | None, typer.Option("--png", help="writes a picture to this file")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Show a job's learning curve.

    It is the reward of the job's steps, and of held-out problems."""
    with connect() as client:
        record = client.get(job)
        metrics = client.metrics(record.id)
    if png is not None:
        _draw(metrics, png, record.name)
    show(output, metrics, lambda: f"wrote {png}" if png else text_curve(metrics.rows, record.id))


def _draw(metrics: MetricsList, png: Path, title: str) -> None:
    """Draws in a process of its own: the command imports no plotting library."""
    command = [sys.executable, "-m", "deploy.plot", "-", "--out", str(png), "--title", title]
    drawn = subprocess.run(
        command, input=metrics.model_dump_json(), text=True, capture_output=True, check=False
    )
    if drawn.returncode:
        why = (drawn.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise Failed(f"{str(png)!r} was not drawn: {why}; without --png it is shown here")
