"""Jobs: `hone ls`, `cancel`, `pause`, `resume`, `rm`; what a job does and did: `hone logs`."""

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
    OptionalJobArgument,
    Output,
    OutputOption,
    as_json,
    command,
    connect,
    err,
    out,
    say,
    show,
)
from shared.errors import BadRequest
from shared.wire import TERMINAL, JobStatus
from shared.wire.pages import MAX_LAST

if TYPE_CHECKING:
    from hone.calling import ResumeResult
    from hone.client import Client
    from shared.wire import JobRecord

NO_JOBS = "no jobs yet; `hone submit JOB.toml` starts one"
NONE_PAUSED = "no job is paused"


@command
def ls(
    job: OptionalJobArgument = None,
    limit: Annotated[int, typer.Option(help="how many")] = 20,
    status: Annotated[JobStatus | None, typer.Option(help="only jobs of this status")] = None,
    name: Annotated[str | None, typer.Option(help="only jobs of this name")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, only jobs with it; may be repeated")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """List jobs, newest first, or show one job.

    Of one job it shows the whole record: what it does or waits for, why it is paused, its summary,
    and the report of an evaluation."""
    wanted = _pairs(metadata or [])
    if job is not None and (status or name or wanted):
        raise BadRequest("--status, --name and --metadata choose from the list; name no job")
    with connect() as client:
        if job is not None:
            record = client.get(job)
            show(output, record, lambda: view.job_details(record))
            return
        listed = client.list(limit, status=status, name=name, metadata=wanted)
    show(output, listed.jobs, lambda: view.job_list(listed.jobs) if listed.jobs else NO_JOBS)
    if listed.unreadable:
        unreadable = ", ".join(listed.unreadable)
        say(f"not shown, for this version of Hone cannot read them: {unreadable}")


def _pairs(given: list[str]) -> dict[str, str]:
    for one in given:
        if "=" not in one[1:]:
            raise BadRequest(f"--metadata {one!r}: expected NAME=VALUE, for example team=math")
    return dict(one.split("=", 1) for one in given)


@command
def cancel(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Cancel a job. It keeps its run folder, with a checkpoint of its last step."""
    with connect() as client:
        state = client.cancel(job)
    done = "cancelled" if state.status in TERMINAL else "being cancelled"
    show(output, state, lambda: f"job {state.id} is {done}")


@command
def pause(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Pause a job, with a checkpoint of its last step.

    The services are free for other jobs then."""
    with connect() as client:
        state = client.pause(job)
    done = "paused" if state.status == "paused" else "being paused"
    goes_on = f"`hone resume {state.id}` continues from there"
    show(output, state, lambda: f"job {state.id} is {done}; {goes_on}")


@command
def resume(
    job: OptionalJobArgument = None,
    every: Annotated[
        bool, typer.Option("--all", help="every paused job, also jobs that you paused")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of memory, steps, evaluation, checkpoints, ..."),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Let a paused job continue where it was.

    With --all every paused job; exits 1 if one of them could not be resumed."""
    if (job is None) != every or (every and changes):
        raise BadRequest("name one job, to which --set may be added, or give --all alone")
    with connect() as client:
        if job is None:
            _show_resumed(client.resume_all(), output)
            return
        state = client.resume(job, changes or [])
    watches = f"`hone logs -f {state.id}` watches it"
    show(output, state, lambda: f"job {state.id} is {state.status}; {watches}")


def _show_resumed(found: tuple[ResumeResult, ...], output: Output) -> None:
    said = [
        f"job {job.id} is {job.status}"
        if job.status
        else f"job {job.id} was not resumed: {job.problem}"
        for job in found
    ]
    show(output, found, lambda: "\n".join(said) if said else NONE_PAUSED)
    if not all(job.status for job in found):
        raise typer.Exit(FAILED)


@command
def rm(
    job: JobArgument,
    files: Annotated[
        bool, typer.Option("--files", help="remove its run folder and checkpoints too")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Forget a job that has ended."""
    with connect() as client:
        deleted = client.delete(job, files=files)
    what = "and its run folder are" if files else "is"
    show(output, deleted, lambda: f"job {deleted.id} {what} removed")


# --- what a job does and did ---------------------------------------------------------------------


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

    With -f it shows the job's record too once the job ends or pauses, and exits 0 if the job
    succeeded, 1 if not, and 3 if it is paused."""
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
