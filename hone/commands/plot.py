"""`hone plot`: learning curves, in the terminal or as a picture."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from hone.commands.metrics import Compared
from hone.shell import JobsArgument, Output, OutputOption, command, connect, show
from hone.view import compared_curves, text_curve
from shared.errors import Failed


@command
def plot(
    job: JobsArgument,
    png: Annotated[Path | None, typer.Option("--png", help="writes a picture to this file")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Show a job's learning curve, or several jobs' in one picture.

    It is the reward of the job's steps, and of held-out problems; of several jobs, one of the
    two."""
    with connect() as client:
        records = [client.get(each) for each in job]
        metrics = {record.id: client.metrics(record.id) for record in records}
    if len(metrics) == 1:
        (own,), title = metrics.values(), records[0].name
        body, text = own, partial(text_curve, own.rows, records[0].id)
    else:
        body, title = Compared(jobs=metrics), ", ".join(record.name for record in records)
        text = partial(compared_curves, metrics)
    if png is not None:
        _draw(body, png, title)
    show(output, body, lambda: f"wrote {png}" if png else text())


def _draw(metrics: BaseModel, png: Path, title: str) -> None:
    """Draws in a process of its own: the command imports no plotting library."""
    command = [sys.executable, "-m", "deploy.plot", "-", "--out", str(png), "--title", title]
    drawn = subprocess.run(
        command, input=metrics.model_dump_json(), text=True, capture_output=True, check=False
    )
    if drawn.returncode:
        why = (drawn.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise Failed(f"{str(png)!r} was not drawn: {why}; without --png it is shown here")
