"""`hone regrade`: stored rollouts graded by other rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone import rollout_view
from hone.shell import REWARDS_ONLY, JobArgument, Output, OutputOption, command, connect, show
from shared.errors import BadRequest
from shared.job.file import load_job


@command
def regrade(
    job: JobArgument,
    step: Annotated[str, typer.Option(help="which steps: 7, or 3:9 for 3 to 9")],
    reward: Annotated[
        Path, typer.Option(help="a TOML with the [[rewards]] to try; a job file will do")
    ],
    limit: Annotated[
        int, typer.Option("-n", help="how many of the rollouts that differ most to show")
    ] = 10,
    output: OutputOption = Output.table,
) -> None:
    """Grade a job's stored rollouts by other rewards.

    Shows how many rewards would change, and how many advantages their sign. The job stays as it
    is."""
    first, last = steps_of(step)
    rewards = load_job(reward, REWARDS_ONLY).rewards
    with connect() as client:
        report = client.regrade(job, first, last, rewards, limit)
    show(output, report, lambda: rollout_view.regrade_table(report))


def steps_of(text: str) -> tuple[int, int]:
    """Returns the first and last step of `A:B`, or of `A` alone."""
    first, separator, last = text.partition(":")
    if not first.isdecimal() or (separator and not last.isdecimal()) or not int(first):
        raise BadRequest(
            f"--step {text!r}: expected a step such as 7, or a range of them such as 3:9; the "
            "first step is 1"
        )
    return int(first), int(last or first)
