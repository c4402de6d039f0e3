"""`hone run`: a job from its file to its end, on a stack that is started if there is none."""

from __future__ import annotations

from pathlib import Path

from hone import stack
from hone.commands.submit import submit_and_follow
from hone.commands.up import FolderOption
from hone.shell import (
    JobFileArgument,
    Output,
    OutputOption,
    OverridesOption,
    command,
    connect,
    err,
    job_in,
)


@command
def run(
    file: JobFileArgument = Path("job.toml"),
    overrides: OverridesOption = None,
    folder: FolderOption = stack.FOLDER,
    output: OutputOption = Output.table,
) -> None:
    """Submit a job and follow it to its end.

    Starts the stack first if there is none; it stays up."""
    job = job_in(file, overrides)
    if started := stack.ensure(folder):
        err.print(f"the stack in {folder} stays up; `hone down` stops it", highlight=False)
    with connect(folder if started else stack.FOLDER) as client:
        submit_and_follow(client, job, output)
