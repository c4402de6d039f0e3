"""`hone rollouts` shows stored rollouts."""

from __future__ import annotations

from typing import Annotated

import typer

from hone import rollout_view
from hone.shell import JobArgument, Output, OutputOption, command, connect, show
from shared.errors import BadRequest


@command
def rollouts(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="which step (default: the newest)")] = None,
    limit: Annotated[int, typer.Option("-n", min=1, help="how many")] = 16,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="of the evaluation after the step")
    ] = False,
    set_name: Annotated[
        str, typer.Option("--set", help="which held-out set (default: data.eval)")
    ] = "",
    output: OutputOption = Output.table,
) -> None:
    """Show a step's prompts, completions and rewards.

    The advantages too, and what each grader said."""
    if set_name and not held_out:
        raise BadRequest("--set names a held-out set; expected --held-out with it")
    with connect() as client:
        if held_out:
            listed = client.held_out(job, step, set_name, limit=limit)
        else:
            listed = client.rollouts(job, step, limit=limit)
    show(output, listed, lambda: rollout_view.rollout_table(listed))
