"""`hone plan`: what a job will need, before anything runs: memory, time, GPUs and money."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from hone import reward_service
from hone.reports import plan_lines
from hone.shell import (
    JobFileArgument,
    Output,
    OutputOption,
    OverridesOption,
    command,
    job_in,
    say,
    show,
)
from shared.errors import BadRequest, Failed
from shared.job import Job
from shared.plan.gpus import parse_gpus
from shared.plan.model import UnknownModelSize, find_model
from shared.plan.planning import make_plan, planned_gpus
from shared.settings import load_settings
from shared.wire import PromptLengths

LENGTHS_S = 30.0
"""Seconds that counting the prompts' tokens may take, in a process that loads libraries first."""


@command
def plan(
    file: JobFileArgument,
    gpus: Annotated[
        str | None,
        typer.Option(help="1xA100-80GB, 8xH100; cpu"),
    ] = None,
    overrides: OverridesOption = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of the longest prompt")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Say what a job needs, where it fits and what it costs.

    No service has to run. Without --gpus it is planned for HONE_GPUS, or else for the GPUs of this
    machine. Without --prompt-tokens the tokens of some of the data's prompts are counted."""
    job = job_in(file, overrides)
    settings = load_settings()
    planned_for = parse_gpus(gpus) if gpus is not None else planned_gpus(settings)
    given = PromptLengths(longest=prompt_tokens, is_all=True)
    lengths = given if prompt_tokens else lengths_of(job)
    try:
        reward_service.check_rewards(job.rewards)
    except Failed as error:  # a plan is also made where that service is not installed
        say(f"the rewards are not checked: {error.detail}")
    try:
        model = find_model(job.model, job.model_revision)
        planned = make_plan(job, model, settings, planned_for, lengths)
    except UnknownModelSize as error:
        raise BadRequest(str(error)) from error
    show(output, planned, lambda: "\n".join(plan_lines(planned)))


def lengths_of(job: Job) -> PromptLengths:
    """Returns the lengths of the job's prompts, by a process of the orchestrator's code; why not,
    where that is not installed or takes too long."""
    if not job.trains:
        return PromptLengths()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "services.orchestrator.jobs.prompt_checks"],
            input=job.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=LENGTHS_S,
        )
    except subprocess.TimeoutExpired:
        return PromptLengths(why_not=f"the data was not read within {LENGTHS_S:g} s")
    if done.returncode:
        return PromptLengths(why_not=done.stderr.strip().rpartition("\n")[2])
    return PromptLengths.model_validate_json(done.stdout)
