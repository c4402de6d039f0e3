"""`hone run`: a job from its file to its end, on a stack that is started if there is none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone import stack
from hone.commands.submit import submit_and_follow
from hone.commands.up import FolderOption
from hone.shell import (
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
)

if TYPE_CHECKING:
    from shared.job import Job


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
