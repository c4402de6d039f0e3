"""What a job has measured and stored: `hone metrics` shows its metrics, of several jobs side by
side, `hone rollouts` its rollouts, `hone download` fetches a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hone import reports, view
from hone.shell import JobArgument, JobsArgument, Output, OutputOption, command, connect, err, show
from shared.errors import BadRequest
from shared.wire import MetricsList, MetricsRow

if TYPE_CHECKING:
    from rich.progress import TaskID

    from shared.wire import Checkpoint

COMPARED = ["reward", "eval/reward"]

NO_METRICS = (
    "no metrics: no step is done yet, none is as late as --min-step, or the job has no steps; "
    "`hone ls JOB` shows what it does, and the report of an evaluation"
)


class MetricsComparison(BaseModel):
    """The metrics of each job, by the name that was asked for."""

    jobs: dict[str, MetricsList]


@command
def metrics(
    job: JobsArgument,
    min_step: Annotated[int, typer.Option(help="first step to show")] = 0,
    keys: Annotated[
        str | None, typer.Option(help="which metrics, with commas: reward,time/step")
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="draw the learning curve: rewards, held-out rewards")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Show a job's metrics, one row per step, or its learning curve.

    Metrics of several jobs stand side by side: `reward` and `eval/reward`, or --keys. With --plot
    several jobs are in one picture: their held-out rewards if all have some, else the rewards of
    their steps."""
    if plot and keys is not None:
        raise BadRequest("--plot draws the rewards; expected no --keys with it")
    with connect() as client:
        found = {name: client.metrics(name, min_step - 1) for name in job}
    names = None if keys is None else _names(keys, found)
    if names is not None:
        found = {name: _only(listed, names) for name, listed in found.items()}
    body = MetricsComparison(jobs=found) if len(found) > 1 else found[job[0]]
    show(output, body, lambda: view.learning_curve(found) if plot else _table(found, names))


def _table(found: Mapping[str, MetricsList], names: list[str] | None) -> RenderableType:
    if len(found) > 1:
        return view.side_by_side(found, names or COMPARED)
    (listed,) = found.values()
    columns = (
        {name: name for name in names} if names else view.columns_of(row.metrics for row in listed)
    )
    table = view.metrics_table(listed.rows, columns)
    return table if table.row_count else NO_METRICS


def _names(keys: str, found: Mapping[str, MetricsList]) -> list[str]:
    """Returns the metrics that `keys` names. Raises BadRequest for a metric that no row has."""
    from shared.explain import nearest

    names = [name.strip() for name in keys.split(",") if name.strip()]
    known = sorted({name for listed in found.values() for row in listed for name in row.metrics})
    for name in names if known else []:
        if name not in known:
            hint = nearest(name, known, "the job's metrics")
            raise BadRequest(f"--keys {keys!r}: no metric {name!r}; {hint}")
    return names


def _only(listed: MetricsList, names: list[str]) -> MetricsList:
    rows = (
        MetricsRow(
            step=row.step,
            metrics={name: row.metrics[name] for name in names if name in row.metrics},
        )
        for row in listed
    )
    return MetricsList(rows=tuple(rows))


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
    eval_set: Annotated[
        str, typer.Option(help="the same of this held-out set (default: data.eval)")
    ] = "",
    output: OutputOption = Output.table,
) -> None:
    """Show a step's prompts, completions and rewards.

    The advantages too, and what each grader said."""
    is_held_out = held_out or bool(eval_set)
    with connect() as client:
        if is_held_out:
            listed = client.held_out(job, step, eval_set, limit=limit)
        else:
            listed = client.rollouts(job, step, limit=limit)
    show(output, listed, lambda: reports.rollout_table(listed, held_out=is_held_out))


# --- checkpoints ---------------------------------------------------------------------------------

MIB = 1 << 20


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
    only_list: Annotated[
        bool, typer.Option("--list", help="only list the job's checkpoints, oldest first")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Download a checkpoint, which plain transformers loads. Interrupted, the same command
    continues where it was."""
    with connect() as client:
        if only_list:
            kept = client.checkpoints(job).checkpoints
            show(output, kept, lambda: _checkpoints(kept) if kept else "no checkpoint yet")
            return
        with _bars() as progress:
            found = client.download(job, to, step=step, state=state, progress=progress)
    show(output, found, lambda: Text(f"the checkpoint of step {found.step} is in {found.folder}"))


def _checkpoints(checkpoints: Iterable[Checkpoint]) -> Table:
    table = Table("step", "MiB", "folder", box=None, pad_edge=False)
    for checkpoint in checkpoints:
        size = f"{checkpoint.size_bytes / MIB:,.1f}"
        table.add_row(str(checkpoint.step), size, checkpoint.path)
    return table


@contextlib.contextmanager
def _bars() -> Generator[Callable[[str, int, int], None]]:
    """Shows a progress bar for each file, on a terminal only. Yields what is called with a file's
    name, the bytes it has so far, and its size."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

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
