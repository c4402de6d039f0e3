"""What a job does and did: `hone logs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hone import view
from hone.shell import (
    FAILED,
    INTERRUPTED,
    PAUSED,
    JobArgument,
    Output,
    OutputOption,
    as_json,
    command,
    connect,
    err,
    out,
)
from shared.wire.pages import MAX_LAST

if TYPE_CHECKING:
    from hone.client import Client
    from shared.wire import JobRecord


@command
def logs(
    job: JobArgument,
    following: Annotated[
        bool, typer.Option("-f", "--follow", help="continue until the job ends or pauses")
    ] = False,
    last: Annotated[
        int | None, typer.Option("-n", min=1, max=MAX_LAST, help="only the last so many")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Show what happened to a job.

    With -f it exits 0 if the job succeeded, 1 if not, and 3 if it is paused."""
    with connect() as client:
        if following:
            follow(client, job, output, last)
            return
        events = list(client.events(job, last=last))
    if output is Output.json:
        as_json(events)
        return
    follower = view.Follower(Console(force_terminal=False))
    for event in events:
        follower.show(event)


def follow(client: Client, job: str, output: Output, last: int | None = None) -> None:
    """Shows a job's events, or the last ones and what follows, until it has ended or is paused, and
    exits as `show_end` does. Ctrl-C leaves it running."""
    job = client.get(job).id
    try:
        if output is Output.json:
            for event in client.events(job, last=last, follow=True):
                as_json(event)
        else:
            with view.Follower(out) as follower:
                told = client.events(job, last=last, follow=True, progress=follower.progress)
                for event in told:
                    follower.show(event)
    except KeyboardInterrupt as error:
        hint = f"`hone logs -f {job}` watches it again, `hone cancel {job}` stops it"
        err.print(f"\ndetached; job {job} continues. {hint}.", highlight=False)
        raise typer.Exit(INTERRUPTED) from error
    show_end(client.get(job), output)


def show_end(record: JobRecord, output: Output) -> None:
    """Shows how a job ended, and what the user can do next; exits 1 if it did not succeed, and 3 if
    it is paused."""
    if output is Output.table:
        out.print(view.job_details(record))
        out.print(view.what_next(record), soft_wrap=True, highlight=False)
    if record.status != "succeeded":
        raise typer.Exit(PAUSED if record.status == "paused" else FAILED)
