"""`hone metrics`: what was measured at each step, of one job or of several side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from hone import view
from hone.shell import JobsArgument, Output, OutputOption, command, connect, show
from shared.errors import BadRequest
from shared.wire import MetricsList

if TYPE_CHECKING:
    from shared.wire import MetricsRow


COMPARED = ["reward", "eval/reward"]


class Compared(BaseModel):
    """The metrics of each job, by the name that was asked for."""

    jobs: dict[str, MetricsList]


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
        show(output, Compared(jobs=listed_of), lambda: view.side_by_side(listed_of, chosen))
        return
    (listed,) = listed_of.values()
    columns = view.COLUMNS
    if keys is not None:
        names = _names(keys, listed.rows)
        columns = {name: name for name in names}
        listed = listed.model_copy(update={"rows": tuple(_only(row, names) for row in listed)})
    show(output, listed, lambda: view.metrics_table(listed.rows, columns))


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
