"""`hone keys create`, `list`, `revoke`: named API keys of the orchestrator."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from hone.shell import Output, OutputOption, app, command_of, connect, show
from shared.errors import BadRequest
from shared.wire import Access, KeyList

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
def list(output: OutputOption = Output.table) -> None:
    """List the keys that are valid."""
    with connect() as client:
        listed = client.keys()
    show(output, listed.keys, lambda: _table(listed) if listed.keys else NO_KEYS)


@command_of(group)
def revoke(name: NameArgument, output: OutputOption = Output.table) -> None:
    """Revoke a key: no request with it is answered any more."""
    with connect() as client:
        revoked = client.revoke_key(name)
    show(output, revoked, lambda: f"key {revoked.name} is revoked")


def _table(listed: KeyList) -> Table:
    table = Table("key", "access", "weight", "made", box=None, pad_edge=False)
    for key in listed.keys:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
        table.add_row(key.name, key.access, f"{key.weight:g}", made)
    return table
