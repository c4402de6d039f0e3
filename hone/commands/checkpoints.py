"""`hone checkpoints` lists a job's checkpoints, `hone download` fetches one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from hone.shell import JobArgument, Output, OutputOption, command, connect, err, show

if TYPE_CHECKING:
    from shared.wire import Checkpoint

MIB = 1 << 20


@command
def checkpoints(job: JobArgument, output: OutputOption = Output.table) -> None:
    """List a job's checkpoints, oldest first."""
    with connect() as client:
        found = client.checkpoints(job).checkpoints
    show(output, found, lambda: _table(found) if found else "no checkpoint yet")


@command
def download(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="which step (default: the newest)")] = None,
    to: Annotated[
        Path | None, typer.Option(help="folder (default: one named after job and step)")
    ] = None,
    state: Annotated[
        bool, typer.Option("--state", help="also what training continues from, much larger")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Download a checkpoint, which plain transformers loads. Interrupted, the same command
    continues where it was."""
    with connect() as client, _bars() as progress:
        found = client.download(job, to, step=step, state=state, progress=progress)
    show(output, found, lambda: Text(f"the checkpoint of step {found.step} is in {found.folder}"))


def _table(checkpoints: Iterable[Checkpoint]) -> Table:
    table = Table("step", "MiB", "folder", box=None, pad_edge=False)
    for checkpoint in checkpoints:
        size = f"{checkpoint.size_bytes / MIB:,.1f}"
        table.add_row(str(checkpoint.step), size, checkpoint.path)
    return table


@contextlib.contextmanager
def _bars() -> Generator[Callable[[str, int, int], None]]:
    """Shows a progress bar for each file, on a terminal only. Yields what is called with a file's
    name, the bytes it has so far, and its size."""
    tasks: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bars:

        def progress(name: str, have_bytes: int, size_bytes: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=size_bytes)
            bars.update(tasks[name], completed=have_bytes)

        yield progress
