"""`hone up`, `hone down`: the stack on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone import stack
from hone.shell import Output, OutputOption, command

FolderOption = Annotated[Path, typer.Option("--dir", help="where logs and Redis's data are")]


@command
def up(folder: FolderOption = stack.FOLDER, output: OutputOption = Output.table) -> None:
    """Start the stack on this machine.

    The stack is Redis and the four services; returns when they are ready."""
    if code := stack.control("up", folder, output):
        raise typer.Exit(2 if code > 0 else 130)


@command
def down(folder: FolderOption = stack.FOLDER, output: OutputOption = Output.table) -> None:
    """Stop what `hone up` started. Jobs that run continue at the next `hone up`."""
    if code := stack.control("down", folder, output):
        raise typer.Exit(code)
