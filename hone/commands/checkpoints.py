"""`hone checkpoints` lists a job's checkpoints, `hone download` fetches one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hone.checkpoint_view import Downloading, checkpoint_table
from hone.shell import JobArgument, Output, OutputOption, command, connect, err, show


@command
def checkpoints(job: JobArgument, output: OutputOption = Output.table) -> None:
    """List a job's checkpoints, oldest first."""
    with connect() as client:
        found = client.checkpoints(job).checkpoints
    show(output, found, lambda: checkpoint_table(found) if found else "no checkpoint yet")


@command
def download(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="which step (default: the newest)")] = None,
    to: Annotated[
        Path | None, typer.Option(help="folder (default: one named after job and step)")
    ] = None,
    state: Annotated[
        bool, typer.Option("--state", help="also what training goes on from, several times larger")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Download a checkpoint, which plain transformers loads. Interrupted, the same command goes on
    where it was."""
    with connect() as client, Downloading(err) as progress:
        found = client.download(job, to, step=step, state=state, progress=progress)
    show(output, found, lambda: Text(f"the checkpoint of step {found.step} is in {found.folder}"))
