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
        bool,
        typer.Option(
            "--held-out",
            help="show held-out completions of the evaluation after the step: the first 64 "
            "problems, two of each",
        ),
    ] = False,
    eval_set: Annotated[str, typer.Option(help="which held-out set (default: data.eval)")] = "",
    output: OutputOption = Output.table,
) -> None:
    """Show a step's prompts, completions and rewards.

    The advantages too, and what each grader said."""
    if eval_set and not held_out:
        raise BadRequest(f"--eval-set {eval_set!r} names a held-out set; add --held-out")
    with connect() as client:
        if held_out:
            listed = client.held_out(job, step, eval_set, limit=limit)
        else:
            listed = client.rollouts(job, step, limit=limit)
    show(output, listed, lambda: rollout_view.rollout_table(listed, held_out=held_out))
