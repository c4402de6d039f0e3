"""`hone wait`: returns when a job has ended or paused, for scripts."""

from __future__ import annotations

from hone import view
from hone.commands.logs import show_end
from hone.shell import JobArgument, Output, OutputOption, command, connect, out


@command
def wait(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Wait for a job to end or pause.

    Shows what became of it, and exits 1 if it did not succeed."""
    with connect() as client:
        record = client.wait(job, paused=True)
    if output is Output.json:
        view.as_json(out, record)
    show_end(record, output)
