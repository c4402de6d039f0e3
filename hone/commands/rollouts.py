"""`hone rollouts` shows stored rollouts."""

from __future__ import annotations

from typing import Annotated

import typer

from hone import rollout_view
from hone.shell import JobArgument, Output, OutputOption, command, connect, show


@command
def rollouts(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="which step (default: the newest)")] = None,
    limit: Annotated[int, typer.Option("-n", help="how many")] = 16,
    output: OutputOption = Output.table,
) -> None:
    """Show a step's prompts, completions and rewards.

    The advantages too, and what each grader said."""
    with connect() as client:
        listed = client.rollouts(job, step)
    first = listed.model_copy(update={"rollouts": listed.rollouts[:limit]})
    show(output, first, lambda: rollout_view.rollout_table(listed, limit))
