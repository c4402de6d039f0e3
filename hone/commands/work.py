"""`hone work`: runs agents for episodes of jobs, here, with their own dependencies."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import typer

from hone import stack
from hone.shell import INTERRUPTED, Output, OutputOption, command, out, say

SHOW_S = 5.0
"""Seconds between two lines of progress."""


@command
def work(
    agent: Annotated[
        list[str],
        typer.Argument(
            help="a Python file with `async def run(row, base_url, api_key)`, or FILE:NAME; or, "
            "after --, a command"
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(help="only episodes of this job, until it has ended (default: of all jobs)"),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("-c", "--concurrency", min=1, help="episodes at once")
    ] = 8,
    output: OutputOption = Output.table,
) -> None:
    """Run an agent for the episodes of jobs with kind = "worker".

    Takes episodes from the orchestrator, runs the agent for each, and reports its reward. A command
    finds the model at OPENAI_BASE_URL with OPENAI_API_KEY, the row in HONE_ROW and on its stdin,
    and prints its reward last. Ctrl-C gives the episodes that run to other workers."""
    from hone.agents.loading import agent_of
    from hone.agents.working import Progress
    from hone.agents.working import work as work_on

    found, shown_at = agent_of(agent), 0.0
    url, token = stack.orchestrator()
    newest = Progress()

    def show(progress: Progress) -> None:
        nonlocal newest, shown_at
        newest = progress
        if progress.done and time.monotonic() - shown_at >= SHOW_S:
            shown_at = time.monotonic()
            say(progress.sentence())

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"asking {url} for episodes, {concurrency} at a time; Ctrl-C ends it")
    try:
        work_on(
            found, job=job, concurrency=concurrency, url=url, token=token, tell=say, progress=show
        )
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    finally:
        say(newest.sentence())
        if output is Output.json:
            out.print_json(data=newest.as_json())
