"""`hone eval`: models compared on held-out problems, by a job of 0 steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hone import long_calls, reports, view
from hone.client import Client
from hone.commands.submit import submit_or_withdraw
from hone.shell import (
    INTERRUPTED,
    PAUSED,
    Output,
    OutputOption,
    command,
    connect,
    err,
    job_in,
    say,
    show,
)
from shared.errors import BadRequest, NotFound
from shared.job import JOB_ID, EvaluatedModel, Job
from shared.job.file import make_job
from shared.wire import EvaluationReport

ANY = {"name": long_calls.NAME, "model": "any/model", "steps": 0}
"""Keys of a job without a file. Its model is replaced."""


@command
def eval(
    models: Annotated[
        list[str],
        typer.Argument(
            help="a folder, such as a checkpoint; a job, or JOB:STEP, for its checkpoint; a "
            "Hugging Face id, or ID@REVISION. Later ones are compared with the first"
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option(
            "--job", help="takes data, rewards and [evaluation] of this job file, or of this job"
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="held-out problems: a file or a Hugging Face dataset")
    ] = None,
    split: Annotated[str | None, typer.Option(help="split of a Hugging Face dataset")] = None,
    grader: Annotated[
        str | None, typer.Option(help="a grader's name, in place of the job file's rewards")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="how many problems, from the first on (default: all)")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option("-k", "--num-samples", help="completions per problem")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (the default)")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="longest completion")] = None,
    seed: Annotated[int | None, typer.Option(help="seeds the completions")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="a.b=c of the job, such as data.template=..., may be repeated"),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Compare models and checkpoints on held-out problems.

    Submits a job of 0 steps, which trains nothing, and waits for its report. Ctrl-C cancels it."""
    given = {
        "data.eval": data,
        "data.eval_split": split,
        "evaluation.num_prompts": num_prompts,
        "evaluation.samples": num_samples,
        "evaluation.temperature": temperature,
        "evaluation.max_tokens": max_tokens,
        "seed": seed,
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    changes = [*(overrides or []), *settings]
    with connect() as client:
        job = _job(client, file, data, grader, changes)
        found = [_model(client, model) for model in models]
        if not any(change.startswith("training.dtype") for change in changes):
            job = _in_trained_dtype(client, job, models)
        record = submit_or_withdraw(client, long_calls.evaluation_of(job, found), None, None)
        for line in (*(f"warning: {each}" for each in record.warnings), f"job {record.id}"):
            say(line)
        report = _followed(client, record.id)
    show(output, report, lambda: reports.evaluation_report(report))


def _followed(client: Client, job_id: str) -> EvaluationReport:
    try:
        with view.Follower(err) as follower:
            return client.run(
                lambda asynchronous: long_calls.follow(asynchronous, job_id, follower.progress)
            )
    except KeyboardInterrupt as error:
        say(f"interrupted: job {job_id} is being cancelled")
        raise typer.Exit(INTERRUPTED) from error
    except long_calls.Paused as error:
        say(f"hone: {error.detail}")
        raise typer.Exit(PAUSED) from error


def _job(
    client: Client, file: Path | None, data: str | None, grader: str | None, overrides: list[str]
) -> Job:
    """Returns the job with the evaluation's data, rewards and settings. Raises BadRequest."""
    rewards = [] if grader is None else [f"rewards=[{{grader={json.dumps(grader)}}}]"]
    if file is not None and not file.exists() and re.fullmatch(JOB_ID, str(file)):
        document = client.get(str(file)).job.model_dump(mode="json")
        return make_job(document, [*rewards, *overrides], str(file))
    if file is not None:
        return job_in(file, [*rewards, *overrides])
    if data is None or grader is None:
        raise BadRequest(
            "name what to evaluate on: --job with a job file, or --data with problems and --grader "
            "with what grades them"
        )
    document: dict[str, Any] = {**ANY, "data": {}}
    return make_job(document, [*rewards, *overrides], "hone eval")


def _model(client: Client, text: str) -> EvaluatedModel:
    """Returns the model that `text` stands for. Raises BadRequest for a step of a job that has no
    checkpoint."""
    if Path(text).is_dir():
        return EvaluatedModel(name=text, model=str(Path(text).resolve()))
    if checkpoint := _checkpoint(client, text):
        return EvaluatedModel(name=text, model=checkpoint)
    model, _, revision = text.partition("@")
    return EvaluatedModel(name=text, model=model, revision=revision or None)


def _in_trained_dtype(client: Client, job: Job, models: list[str]) -> Job:
    """Returns the job in the dtype in which the models were trained, as far as that is known. If
    they differ it is float32, which has the numbers of all."""
    dtypes = {text: dtype for text in models if (dtype := _dtype(client, text))}
    if not dtypes:
        return job
    dtype, *others = {*dtypes.values()}
    dtype = "float32" if others else dtype
    listed = ", ".join(f"{text!r} was trained in {each}" for text, each in dtypes.items())
    say(f"evaluates in {dtype}: {listed}; `--set training.dtype=...` takes another one")
    training = job.training.model_copy(update={"dtype": dtype})
    return job.model_copy(update={"training": training})


def _dtype(client: Client, text: str) -> str | None:
    """Returns the dtype of the model's weights by the job or the config.json that is known of."""
    config = Path(text) / "config.json"
    if Path(text).is_dir():
        text = config.read_text(encoding="utf-8") if config.is_file() else "{}"
        found: dict[str, Any] = json.loads(text)
        dtype = found.get("dtype") or found.get("torch_dtype")
        return dtype if dtype in ("float32", "bfloat16") else None
    name = text.partition(":")[0]
    try:
        return long_calls.trained_dtype(client.get(name)) if re.fullmatch(JOB_ID, name) else None
    except NotFound:
        return None


def _checkpoint(client: Client, text: str) -> str | None:
    """Returns the path of the checkpoint of JOB or JOB:STEP, None if there is no such job."""
    job, _, step = text.partition(":")
    if not re.fullmatch(JOB_ID, job):
        return None
    try:
        checkpoints = client.checkpoints(job).checkpoints
    except NotFound:
        return None
    steps = {str(checkpoint.step): checkpoint.path for checkpoint in checkpoints}
    if not steps:
        raise BadRequest(f"{text!r}: job {job!r} has no checkpoint yet")
    wanted = step or [*steps][-1]
    if wanted not in steps:
        raise BadRequest(
            f"{text!r}: job {job!r} has no checkpoint of step {step}; it has checkpoints of steps "
            f"{', '.join(steps)}"
        )
    return steps[wanted]
