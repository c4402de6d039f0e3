"""`hone up`, `hone down`: the stack on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hone import stack
from hone.installed import ENGINES, check_installed
from hone.shell import Output, OutputOption, command

FolderOption = Annotated[Path, typer.Option("--dir", help="where logs and Redis's data are")]


@command
def up(folder: FolderOption = stack.FOLDER, output: OutputOption = Output.table) -> None:
    """Start the stack on this machine.

    The stack is Redis and the four services; returns when they are ready."""
    start(folder, output)


def start(folder: Path, output: Output, *, told_to: int | None = None) -> None:
    """Returns once the stack is ready; exits if it does not become ready. `told_to` is the file
    descriptor for its progress, None: stdout. Raises BadRequest if a service's packages are
    missing."""
    check_installed("laptop", *ENGINES)
    if code := _local("up", folder, output, told_to):
        raise typer.Exit(2 if code > 0 else 130)


@command
def down(folder: FolderOption = stack.FOLDER, output: OutputOption = Output.table) -> None:
    """Stop what `hone up` started. Jobs that run go on at the next `hone up`."""
    if code := _local("down", folder, output):
        raise typer.Exit(code)


def _local(action: str, folder: Path, output: Output, told_to: int | None = None) -> int:
    arguments = [action, "--dir", str(folder), "--output", output]
    return subprocess.call([sys.executable, "-m", "deploy.local", *arguments], stdout=told_to)
