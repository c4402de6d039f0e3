"""What a job has stored: `hone rollouts` shows its rollouts, `hone regrade` grades them by other
rewards, `hone checkpoints` lists its checkpoints, `hone download` fetches one."""

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

from hone import reports
from hone.shell import REWARDS_ONLY, JobArgument, Output, OutputOption, command, connect, err, show
from shared.errors import BadRequest
from shared.job.file import load_job

if TYPE_CHECKING:
    from shared.wire import Checkpoint


@command
def rollouts(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="which step (default: the newest)")] = None,
    limit: Annotated[int, typer.Option("-n", min=1, help="how many")] = 16,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="show held-out completions of the evaluation after the step: the first 64 "
            "problems, two of each",
        ),
    ] = False,
    eval_set: Annotated[str, typer.Option(help="which held-out set (default: data.eval)")] = "",
    output: OutputOption = Output.table,
) -> None:
    """Show a step's prompts, completions and rewards.

    The advantages too, and what each grader said."""
    if eval_set and not held_out:
        raise BadRequest(f"--eval-set {eval_set!r} names a held-out set; add --held-out")
    with connect() as client:
        if held_out:
            listed = client.held_out(job, step, eval_set, limit=limit)
        else:
            listed = client.rollouts(job, step, limit=limit)
    show(output, listed, lambda: reports.rollout_table(listed, held_out=held_out))


# --- other rewards -------------------------------------------------------------------------------


@command
def regrade(
    job: JobArgument,
    step: Annotated[str, typer.Option(help="which steps: 7, or 3:9 for 3 to 9")],
    reward: Annotated[
        Path, typer.Option(help="a TOML with the [[rewards]] to try; a job file will do")
    ],
    limit: Annotated[
        int, typer.Option("-n", help="how many of the rollouts that differ most to show")
    ] = 10,
    output: OutputOption = Output.table,
) -> None:
    """Grade a job's stored rollouts by other rewards.

    Shows how many rewards would change, and how many advantages their sign. The job is
    unchanged."""
    first, last = steps_of(step)
    rewards = load_job(reward, REWARDS_ONLY).rewards
    with connect() as client:
        report = client.regrade(job, first, last, rewards, limit)
    show(output, report, lambda: reports.regrade_table(report))


def steps_of(text: str) -> tuple[int, int]:
    """Returns the first and last step of `A:B`, or of `A` alone."""
    first, separator, last = text.partition(":")
    if not first.isdecimal() or (separator and not last.isdecimal()) or not int(first):
        raise BadRequest(
            f"--step {text!r}: expected a step such as 7, or a range of them such as 3:9; the "
            "first step is 1"
        )
    return int(first), int(last or first)


# --- checkpoints ---------------------------------------------------------------------------------

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
