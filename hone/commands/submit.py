"""`hone submit`: a job from its file to the queue. `hone run`: to its end, on a stack that is
started if there is none."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone import stack, view
from hone.client import Client
from hone.commands.jobs import follow
from hone.commands.stack import FolderOption
from hone.reports import estimate_line
from hone.shell import (
    INTERRUPTED,
    JobFileArgument,
    Output,
    OutputOption,
    OverridesOption,
    as_json,
    command,
    connect,
    err,
    job_in,
    out,
    report_progress,
    say,
    show,
)
from shared.errors import HoneError, Unavailable
from shared.job import Job
from shared.wire import JobRecord

if TYPE_CHECKING:
    from shared.job import Job

CHECKING = "checking the job's data, model and rewards"


@command
def submit(
    file: JobFileArgument,
    overrides: OverridesOption = None,
    following: Annotated[
        bool, typer.Option("--follow", help="show progress until the job ends or pauses")
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
    """Submit a job.

    Ctrl-C before the job's id is shown takes the submission back. With --follow it exits 0 if the
    job succeeded, 1 if not, and 3 if it is paused."""
    job = job_in(file, overrides)
    with connect() as client:
        if dry:
            with report_progress(CHECKING):
                tried = client.dry_run(job)
            show(output, tried, lambda: view.dry_run(tried))
            return
        if following:
            submit_and_follow(client, job, output, key=key)
            return
        record = submit_or_withdraw(client, job, output, key)
        if output is Output.table:
            _say_more(client, record, job)
            out.print(f"  hone logs -f {record.id}    to watch it", highlight=False)
            out.print(f"  hone cancel {record.id}     to stop it", highlight=False)


def submit_and_follow(client: Client, job: Job, output: Output, *, key: str | None = None) -> None:
    """Shows a job from its submission to its end or a pause, and exits as `follow` does."""
    record = submit_or_withdraw(client, job, output if output is Output.table else None, key)
    if output is Output.table:
        _say_more(client, record, job)
    follow(client, record.id, output)


def submit_or_withdraw(
    client: Client, job: Job, output: Output | None, key: str | None
) -> JobRecord:
    """Returns the record of the job once it is accepted, and shows it (`output` None: does not). If
    interrupted before, the submission is withdrawn, unless the caller gave a key."""
    own = secrets.token_hex(12) if key is None else key
    try:
        with report_progress(CHECKING):
            record = client.submit(job, key=own)
        if output is Output.json:
            as_json(record)
        elif output is Output.table:
            said = f"job {record.id} accepted; results go to {record.run_dir}"
            out.print(said, soft_wrap=True, highlight=False)
            page = f"{client.url.rstrip('/')}/#/jobs/{record.id}"
            out.print(f"  {page} shows it", soft_wrap=True, highlight=False)
        return record
    except Unavailable:
        if key is None:
            with contextlib.suppress(HoneError):  # the first error says more
                client.withdraw(own)
        raise
    except KeyboardInterrupt as error:
        may_be = f"the job may be submitted by --key {key}; the same command again shows it"
        became = _taken_back(client, job, own) if key is None else may_be
        say(f"\ninterrupted: {became}")
        raise typer.Exit(INTERRUPTED) from error


def _taken_back(client: Client, job: Job, key: str) -> str:
    """Returns the result of withdrawing a submission, as a sentence."""
    unknown = f"it is not known whether the job was submitted; `hone ls --name {job.name}` shows it"
    try:
        found = client.withdraw(key).job
    except HoneError as error:
        return f"{unknown} ({error.detail})"
    except KeyboardInterrupt:
        return unknown
    if found is None:
        return "the job is not submitted"
    if found.status == "cancelled":
        return f"job {found.id} was accepted just before, and is cancelled"
    goes_on = f"job {found.id} was accepted just before, and is {found.status}"
    return f"{goes_on}; it is being cancelled" if found.cancel_requested else goes_on


def _say_more(client: Client, record: JobRecord, job: Job) -> None:
    """Shows the warnings and the orchestrator's estimate. If it has none, the accepted job is still
    fine."""
    try:
        estimate = estimate_line(client.plan(job))
    except HoneError as error:
        estimate = f"not planned: {error.detail}"
    for line in (*(f"warning: {each}" for each in record.warnings), estimate):
        out.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)


# --- from submission to end ----------------------------------------------------------------------


@command
def run(
    file: JobFileArgument = Path("job.toml"),
    overrides: OverridesOption = None,
    folder: FolderOption = stack.FOLDER,
    simple: Annotated[
        bool, typer.Option("--simple", help="by TRL's GRPOTrainer, without a stack")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Submit a job and follow it to its end.

    Starts the stack first if there is none; it stays up. With --simple TRL's GRPOTrainer trains
    the job here; Ctrl-C ends it."""
    job = job_in(file, overrides)
    if simple:
        _by_trl(job, output)
        return
    if started := stack.ensure(folder):
        err.print(f"the stack in {folder} stays up; `hone down` stops it", highlight=False)
    with connect(folder if started else stack.FOLDER) as client:
        submit_and_follow(client, job, output)


def _by_trl(job: Job, output: Output) -> None:
    from hone.trainer.simple import Simple

    run = Simple().start(job, {})
    if output is Output.json:
        for event in run.events():
            as_json(event)
        run.wait()
        return
    run.follow()
    out.print(f"checkpoint  {run.checkpoint()}", soft_wrap=True, highlight=False)
