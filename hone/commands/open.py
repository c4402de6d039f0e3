"""`hone open` and `hone view`: the page, of a stack or of run folders alone."""

from __future__ import annotations

import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from hone.installed import check_installed
from hone.shell import Output, OutputOption, command, connect, out, page_of

VIEW = "services.orchestrator.extensions.page.view"


@command
def open_(
    job: Annotated[str | None, typer.Argument(help="a job's id or name")] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="only print the address, and open no browser")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Open the page in a browser, at the list of jobs or at a job."""
    with connect() as client:
        address = page_of(client, client.get(job).id if job else None)
    if output is Output.json:
        out.print_json(data={"url": address})
        return
    out.print(address, highlight=False, soft_wrap=True)
    if not print_only:
        webbrowser.open(address)


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
