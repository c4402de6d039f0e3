"""The stack: `hone up` and `hone down` on this machine; the page of run folders without a stack:
`hone view`; the records of jobs after Redis lost its data: `hone recover`; and API keys: `hone keys
create`, `list`, `revoke`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hone import stack
from hone.shell import Output, OutputOption, app, command, command_of, connect, show
from hone.stack import check_installed
from shared.errors import BadRequest
from shared.wire import Access, KeyList, Recovered

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


# --- the page ------------------------------------------------------------------------------------

VIEW = "services.orchestrator.extensions.page.view"


@command
def view(
    folders: Annotated[list[Path], typer.Argument(help="run folders, or a folder of them")],
    port: Annotated[int, typer.Option(help="where to serve it (default: a free port)")] = 0,
    output: OutputOption = Output.table,
) -> None:
    """Show run folders on the page, without a stack.

    Of ended runs, of other machines, after a crash. Nothing can be changed there."""
    check_installed("orchestrator", "orchestrator")
    options = ["--port", str(port), "--output", output.value]
    code = subprocess.call([sys.executable, "-m", VIEW, *options, *map(str, folders)])
    raise typer.Exit(code)


# --- records -------------------------------------------------------------------------------------

NO_RUNS = "no run folders in HONE_RUNS_DIR of the orchestrator; there was nothing to rebuild"


@command
def recover(output: OutputOption = Output.table) -> None:
    """Rebuild jobs' records from their run folders.

    For when Redis lost its data. What had not ended is paused: `hone resume` continues."""
    with connect() as client:
        recovered = client.recover()
    show(output, recovered, lambda: _recovered_table(recovered) if recovered.jobs else NO_RUNS)


def _recovered_table(recovered: Recovered) -> Table:
    table = Table("job", "status", "step", "", box=None, pad_edge=False)
    for job in recovered.jobs:
        done = "" if job.steps is None else f"{job.step}/{job.steps}"
        what = "was known already" if job.known else "rebuilt from its run folder"
        table.add_row(job.id, job.status or "", done, escape(job.problem or what))
    return table


# --- keys ----------------------------------------------------------------------------------------

MAY: dict[Access, str] = {
    "read": "read",
    "full": "read and change",
    "own": "submit jobs, and read and change these alone",
}

NO_KEYS = "no keys yet; `hone keys create NAME` makes one"

group = typer.Typer(no_args_is_help=True)
app.add_typer(group, name="keys", help="Make, list and revoke API keys (needs HONE_TOKEN).")

NameArgument = Annotated[str, typer.Argument(help="the name of the key, of a-z, 0-9 and -")]


@command_of(group)
def create(
    name: NameArgument,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="it shows everything and changes nothing")
    ] = False,
    own: Annotated[bool, typer.Option("--own", help="it sees and changes its own jobs")] = False,
    weight: Annotated[
        float, typer.Option(help="its jobs' share of a trainer that several share")
    ] = 1.0,
    output: OutputOption = Output.table,
) -> None:
    """Make a key, and print its secret, which is shown only now."""
    if read_only and own:
        raise BadRequest("--read-only and --own were given; expected one of them or none")
    access: Access = "read" if read_only else "own" if own else "full"
    with connect() as client:
        made = client.create_key(name, access, weight)
    said = f"key {made.name} may {MAY[access]}; clients send it in place of HONE_TOKEN"
    show(output, made, lambda: f"{made.secret}\n{said}")


@command_of(group)
def list_(output: OutputOption = Output.table) -> None:
    """List the keys that are valid."""
    with connect() as client:
        listed = client.keys()
    show(output, listed.keys, lambda: _key_table(listed) if listed.keys else NO_KEYS)


@command_of(group)
def revoke(name: NameArgument, output: OutputOption = Output.table) -> None:
    """Revoke a key: no request with it is answered any more."""
    with connect() as client:
        revoked = client.revoke_key(name)
    show(output, revoked, lambda: f"key {revoked.name} is revoked")


def _key_table(listed: KeyList) -> Table:
    table = Table("key", "access", "weight", "made", box=None, pad_edge=False)
    for key in listed.keys:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
        table.add_row(key.name, key.access, f"{key.weight:g}", made)
    return table
