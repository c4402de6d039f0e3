"""`hone metrics`: what was measured at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hone import view
from hone.shell import JobArgument, Output, OutputOption, command, connect, show
from shared.errors import BadRequest

if TYPE_CHECKING:
    from shared.wire import MetricsRow


@command
def metrics(
    job: JobArgument,
    min_step: Annotated[int, typer.Option(help="first step to show")] = 0,
    keys: Annotated[
        str | None, typer.Option(help="which metrics, with commas: reward,time/step")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Show a job's metrics, one row per step."""
    with connect() as client:
        listed = client.metrics(job, min_step - 1)
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
            hint = nearest(name, known, "those of the job")
            raise BadRequest(f"--keys {keys!r}: no metric {name!r}; {hint}")
    return names


def _only(row: MetricsRow, names: list[str]) -> MetricsRow:
    kept = {name: row.metrics[name] for name in names if name in row.metrics}
    return row.model_copy(update={"metrics": kept})
