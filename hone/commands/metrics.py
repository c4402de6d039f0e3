"""`hone metrics` and `hone plot`: what was measured at each step, of one job or of several side by
side, as a table, and as curves in the terminal or in a picture."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from hone import view
from hone.shell import JobsArgument, Output, OutputOption, command, connect, show
from hone.view import compared_curves, text_curve
from shared.errors import BadRequest, Failed
from shared.wire import MetricsList

if TYPE_CHECKING:
    from shared.wire import MetricsRow

COMPARED = ["reward", "eval/reward"]


class MetricsComparison(BaseModel):
    """The metrics of each job, by the name that was asked for."""

    jobs: dict[str, MetricsList]


NO_METRICS = (
    "no metrics: no step is done yet, none is as late as --min-step, or the job has no steps; "
    "`hone get` shows what it does, and the report of an evaluation"
)


@command
def metrics(
    job: JobsArgument,
    min_step: Annotated[int, typer.Option(help="first step to show")] = 0,
    keys: Annotated[
        str | None, typer.Option(help="which metrics, with commas: reward,time/step")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Show a job's metrics, one row per step.

    Metrics of several jobs stand side by side: `reward` and `eval/reward`, or --keys."""
    with connect() as client:
        listed_of = {name: client.metrics(name, min_step - 1) for name in job}
    if len(job) > 1:
        rows = tuple(row for listed in listed_of.values() for row in listed)
        chosen = COMPARED if keys is None else _names(keys, rows)
        show(
            output, MetricsComparison(jobs=listed_of), lambda: view.side_by_side(listed_of, chosen)
        )
        return
    (listed,) = listed_of.values()
    columns = view.columns_of(row.metrics for row in listed.rows)
    if keys is not None:
        names = _names(keys, listed.rows)
        columns = {name: name for name in names}
        listed = listed.model_copy(update={"rows": tuple(_only(row, names) for row in listed)})
    table = view.metrics_table(listed.rows, columns) if listed.rows else NO_METRICS
    show(output, listed, lambda: table)


def _names(keys: str, rows: tuple[MetricsRow, ...]) -> list[str]:
    """Returns the metrics that `keys` names. Raises BadRequest for a metric that no row has."""
    from shared.explain import nearest

    names = [name.strip() for name in keys.split(",") if name.strip()]
    known = sorted({name for row in rows for name in row.metrics})
    for name in names if rows else []:
        if name not in known:
            hint = nearest(name, known, "the job's metrics")
            raise BadRequest(f"--keys {keys!r}: no metric {name!r}; {hint}")
    return names


def _only(row: MetricsRow, names: list[str]) -> MetricsRow:
    kept = {name: row.metrics[name] for name in names if name in row.metrics}
    return row.model_copy(update={"metrics": kept})


# --- curves --------------------------------------------------------------------------------------


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
        body, title = MetricsComparison(jobs=metrics), ", ".join(record.name for record in records)
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
