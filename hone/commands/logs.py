"""What a job does and did: `hone logs`, `hone metrics`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from hone import view
from hone.client import Client
from hone.shell import JobArgument, Output, OutputOption, command, connect, err, out, show
from shared.wire import JobRecord


@command
def logs(
    job: JobArgument,
    following: Annotated[
        bool, typer.Option("-f", "--follow", help="go on until the job ends")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Show what happened to a job."""
    with connect() as client:
        if following:
            follow(client, job, output)
            return
        events = list(client.events(job))
    if output is Output.json:
        view.as_json(out, events)
        return
    follower = view.Follower(Console(force_terminal=False))
    for event in events:
        follower.show(event)


@command
def metrics(
    job: JobArgument,
    min_step: Annotated[int, typer.Option(help="first step to show")] = 0,
    output: OutputOption = Output.table,
) -> None:
    """Show a job's metrics, one row per step."""
    with connect() as client:
        listed = client.metrics(job, min_step - 1)
    show(output, listed, lambda: view.metrics_table(listed.rows))


def follow(client: Client, job: str, output: Output) -> None:
    """Shows a job's events to its end; exits 1 if it did not succeed. Ctrl-C leaves it running."""
    job = client.get(job).id
    try:
        if output is Output.json:
            for event in client.events(job, follow=True):
                view.as_json(out, event)
        else:
            with view.Follower(out) as follower:
                for event in client.events(job, follow=True, progress=follower.progress):
                    follower.show(event)
    except KeyboardInterrupt as error:
        hint = f"`hone logs -f {job}` watches it again, `hone cancel {job}` stops it"
        err.print(f"\ndetached; job {job} goes on. {hint}.", highlight=False)
        raise typer.Exit(130) from error
    show_end(client.get(job), output)


def show_end(record: JobRecord, output: Output) -> None:
    """Shows what became of a job, and what can be done with it; exits 1 if it did not succeed."""
    if output is Output.table:
        out.print(view.job_details(record))
        out.print(view.what_next(record), soft_wrap=True, highlight=False)
    if record.status != "succeeded":
        raise typer.Exit(1)
