"""`hone run`: a job from its file to its end, on a stack that is started if there is none."""

from __future__ import annotations

from pathlib import Path

from hone import stack
from hone.commands.submit import submit_and_follow
from hone.commands.up import FolderOption, start
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
from shared.errors import Unavailable
from shared.settings.environment import load_settings

STDERR = 2


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
    if started := _ensure_stack(folder):
        err.print(f"the stack in {folder} stays up; `hone down` stops it", highlight=False)
    with connect(folder if started else stack.FOLDER) as client:
        submit_and_follow(client, job, output)


def _ensure_stack(folder: Path) -> bool:
    """Returns whether a stack had to be started. Raises Unavailable if the environment names an
    orchestrator that does not answer: then the user means that one."""
    try:
        with connect(folder):
            return False
    except Unavailable:
        if "orchestrator_url" in load_settings().model_fields_set:
            raise
    err.print(f"no stack answers; one is started in {folder}", markup=False, highlight=False)
    start(folder, Output.table, told_to=STDERR)
    return True
