"""Submitting, listing and changing jobs: `hone submit`, `ls`, `get`, `cancel`, `pause`, `resume`,
`rm`."""

from __future__ import annotations

from typing import Annotated

import typer

from hone import view
from hone.client import Client
from hone.commands.logs import follow
from hone.plan_view import estimate_line
from hone.shell import (
    JobArgument,
    JobFileArgument,
    Output,
    OutputOption,
    OverridesOption,
    command,
    connect,
    err,
    out,
    saying,
    show,
)
from shared.errors import BadRequest, HoneError
from shared.job import Job
from shared.job_file import load_job
from shared.wire import TERMINAL, JobRecord, JobStatus

CHECKING = "checking the job's data, model and rewards"

NO_JOBS = "no jobs yet; `hone submit JOB.toml` starts one"


@command
def submit(
    file: JobFileArgument,
    overrides: OverridesOption = None,
    following: Annotated[
        bool, typer.Option("--follow", help="show progress until the job ends")
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="idempotency key: the same key and job submit once")
    ] = None,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="only check the job, and show its first prompts"),
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Submit a job."""
    job = load_job(file, overrides or [])
    with connect() as client:
        if dry:
            with saying(CHECKING):
                tried = client.dry_run(job)
            show(output, tried, lambda: view.dry_run(tried))
            return
        if following:
            submit_and_follow(client, job, output, key=key)
            return
        with saying(CHECKING):
            record = client.submit(job, key=key)
        if output is Output.json:
            view.as_json(out, record)
            return
        _say_accepted(client, record, job)
        out.print(f"  hone logs -f {record.id}    to watch it", highlight=False)
        out.print(f"  hone cancel {record.id}     to stop it", highlight=False)


def submit_and_follow(client: Client, job: Job, output: Output, *, key: str | None = None) -> None:
    """Shows a job from its submission to its end; exits 1 if it did not succeed."""
    with saying(CHECKING):
        record = client.submit(job, key=key)
    if output is Output.table:
        _say_accepted(client, record, job)
    follow(client, record.id, output)


def _say_accepted(client: Client, record: JobRecord, job: Job) -> None:
    accepted = f"job {record.id} accepted; results go to {record.run_dir}"
    out.print(accepted, soft_wrap=True, highlight=False)
    out.print(f"  {_estimate(client, job)}", soft_wrap=True, highlight=False, markup=False)


def _estimate(client: Client, job: Job) -> str:
    """Returns what the orchestrator expects of the job, in a line. That it cannot say it is no
    fault of a job that was accepted."""
    try:
        return estimate_line(client.plan(job))
    except HoneError as error:
        return f"not planned: {error.detail}"


@command
def ls(
    limit: Annotated[int, typer.Option(help="how many")] = 20,
    status: Annotated[JobStatus | None, typer.Option(help="only jobs of this status")] = None,
    name: Annotated[str | None, typer.Option(help="only jobs of this name")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, only jobs with it; may be repeated")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """List jobs, newest first."""
    wanted = _pairs(metadata or [])
    with connect() as client:
        listed = client.list(limit, status=status, name=name, metadata=wanted)
    show(output, listed.jobs, lambda: view.job_list(listed.jobs) if listed.jobs else NO_JOBS)
    if listed.unreadable:
        err.print(
            f"not shown, for this version of Hone cannot read them: {', '.join(listed.unreadable)}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


def _pairs(given: list[str]) -> dict[str, str]:
    for one in given:
        if "=" not in one:
            raise BadRequest(f"--metadata {one!r}: expected NAME=VALUE, for example team=math")
    return dict(one.split("=", 1) for one in given)


@command
def get(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Show one job."""
    with connect() as client:
        record = client.get(job)
    show(output, record, lambda: view.job_details(record))


@command
def cancel(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Cancel a job."""
    with connect() as client:
        state = client.cancel(job)
    done = "cancelled" if state.status in TERMINAL else "being cancelled"
    show(output, state, lambda: f"job {state.id} is {done}")


@command
def pause(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Pause a job: it keeps all that it has.

    The services are free for other jobs then."""
    with connect() as client:
        state = client.pause(job)
    done = "paused" if state.status == "paused" else "being paused"
    goes_on = f"`hone resume {state.id}` goes on from there"
    show(output, state, lambda: f"job {state.id} is {done}; {goes_on}")


@command
def resume(
    job: JobArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of memory, steps, evaluation, checkpoints, ..."),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Let a paused job go on where it was."""
    with connect() as client:
        state = client.resume(job, changes or [])
    watches = f"`hone logs -f {state.id}` watches it"
    show(output, state, lambda: f"job {state.id} is {state.status}; {watches}")


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
