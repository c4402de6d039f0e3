"""`hone wait`: returns when a job has ended or paused, for scripts."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.async_client import NotEnded
from hone.commands.logs import show_end
from hone.shell import TIMED_OUT, JobArgument, Output, OutputOption, as_json, command, connect, say


@command
def wait(
    job: JobArgument,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0, help="seconds, after which it exits 124")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Wait for a job to end or pause.

    Shows what became of it. Exits 0 if it succeeded, 1 if not, 3 if it is paused, and 124 if it
    continues after --timeout seconds."""
    with connect() as client:
        try:
            record = client.wait(job, timeout_s=timeout_s)
        except NotEnded as error:
            say(f"hone: {error.detail}")
            raise typer.Exit(TIMED_OUT) from error
    if output is Output.json:
        as_json(record)
    show_end(record, output)
