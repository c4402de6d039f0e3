"""`hone recover`: the jobs' records again, after Redis lost its data."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from hone.shell import Output, OutputOption, command, connect, show
from shared.wire import Recovered

NO_RUNS = "no run folders in HONE_RUNS_DIR of the orchestrator; there was nothing to rebuild"


@command
def recover(output: OutputOption = Output.table) -> None:
    """Rebuild jobs' records from their run folders.

    For when Redis lost its data. What had not ended is paused: `hone resume` continues."""
    with connect() as client:
        recovered = client.recover()
    show(output, recovered, lambda: _table(recovered) if recovered.jobs else NO_RUNS)


def _table(recovered: Recovered) -> Table:
    table = Table("job", "status", "step", "", box=None, pad_edge=False)
    for job in recovered.jobs:
        done = "" if job.steps is None else f"{job.step}/{job.steps}"
        what = "was known already" if job.known else "rebuilt from its run folder"
        table.add_row(job.id, job.status or "", done, escape(job.problem or what))
    return table
