"""`hone modal up`, `down`, `status`, `upload`: Hone on Modal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone import stack
from hone.shell import Output, OutputOption, app, command_of

group = typer.Typer(no_args_is_help=True)
app.add_typer(
    group,
    name="modal",
    help="Deploy to Modal.\n\nThe settings HONE_MODAL_* say what (docs/modal.md).",
)

TrialOption = Annotated[
    bool, typer.Option("--trial", help="the trial: all of it in one container, Redis included")
]


@command_of(group)
def up(trial: TrialOption = False, output: OutputOption = Output.table) -> None:
    """Deploy the services to Modal, and print where the jobs API is."""
    _manage("up", output, *(["--trial"] if trial else []))


@command_of(group)
def down(trial: TrialOption = False, output: OutputOption = Output.table) -> None:
    """Stop the services and what they run. Volumes stay; jobs continue at the next `hone modal
    up`."""
    _manage("down", output, *(["--trial"] if trial else []))


@command_of(group)
def status(output: OutputOption = Output.table) -> None:
    """Show which apps are deployed, and how many containers run."""
    _manage("status", output)


@command_of(group)
def upload(
    files: Annotated[list[Path], typer.Argument(help="data files, for jobs to name")],
    output: OutputOption = Output.table,
) -> None:
    """Put data files on the Volume, and print how jobs name them."""
    _manage("upload", output, *map(str, files))


def _manage(action: str, output: Output, *arguments: str) -> None:
    if code := stack.run_modal_action(action, *arguments, output=output).returncode:
        raise typer.Exit(2 if code > 0 else 130)
