"""The `hone` command. Exit codes: 0 done, 1 the job failed, 2 bad input or no service, 130 Ctrl-C
(which only detaches)."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Generator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hone import doctor as checks
from hone import grade as grading
from hone import rollout_view, stack, view
from hone.client import Client
from shared import logs as service_logs
from shared.errors import BadRequest, HoneError, Unavailable
from shared.job_file import load_job
from shared.wire import TERMINAL, JobRecord

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True)


REWARDS_ONLY = ("name=rewards", "model=any/model", "steps=1", "data.train=any")
"""Fills in what a file with nothing but `[[rewards]]` lacks of a job."""


class Output(StrEnum):
    table = "table"
    json = "json"


OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="table for people, json for programs")
]
FolderOption = Annotated[Path, typer.Option("--dir", help="where logs and Redis's data are")]
JobArgument = Annotated[
    str, typer.Argument(help="a job's id, or its name for the newest of that name")
]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a command whose HoneErrors become one sentence and exit code 2."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except HoneError as error:
            err.print(f"hone: {error.detail}", soft_wrap=True, markup=False, highlight=False)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    return app.command(function.__name__.rstrip("_"))(run)


@contextlib.contextmanager
def connect() -> Generator[Client]:
    url, token = stack.orchestrator()
    with Client(url, token=token) as client:
        try:
            client.ping()
        except Unavailable as error:
            raise Unavailable(
                f"{error.detail}; `hone up` starts a stack on this machine, HONE_ORCHESTRATOR_URL "
                "names another"
            ) from error
        yield client


@command
def up(folder: FolderOption = stack.FOLDER, output: OutputOption = Output.table) -> None:
    """Start Redis and the four services on this machine, and wait until they are ready."""
    code = subprocess.call(
        [sys.executable, "-m", "deploy.local", "up", "--dir", str(folder), "--output", output]
    )
    if code:
        raise typer.Exit(2 if code > 0 else 130)


@command
def down(folder: FolderOption = stack.FOLDER, output: OutputOption = Output.table) -> None:
    """Stop what `hone up` started. Jobs that run go on at the next `hone up`."""
    if code := subprocess.call(
        [sys.executable, "-m", "deploy.local", "down", "--dir", str(folder), "--output", output]
    ):
        raise typer.Exit(code)


@command
def submit(
    file: Annotated[Path, typer.Argument(help="a job as TOML")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=c, may be repeated")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="show progress until the job ends")
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="idempotency key: the same key and job submit once")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Submit a job."""
    job = load_job(file, overrides or [])
    with connect() as client:
        record = client.submit(job, key=key)
        if output is Output.json and not follow:
            view.as_json(out, record)
            return
        if output is Output.table:
            out.print(
                f"job {record.id} accepted; results go to {record.run_dir}",
                soft_wrap=True,
                highlight=False,
            )
        if follow:
            _follow(client, record.id, output)
        else:
            out.print(
                f"  hone logs -f {record.id}    to watch it\n  hone cancel {record.id}     to stop "
                "it",
                highlight=False,
            )


@command
def ls(
    limit: Annotated[int, typer.Option(help="how many")] = 20,
    output: OutputOption = Output.table,
) -> None:
    """List jobs, newest first."""
    with connect() as client:
        records = client.list(limit)
    if output is Output.json:
        view.as_json(out, records)
    elif records:
        out.print(view.job_table(records))
    else:
        out.print("no jobs yet; `hone submit JOB.toml` starts one", highlight=False)


@command
def get(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Show one job."""
    with connect() as client:
        record = client.get(job)
    if output is Output.json:
        view.as_json(out, record)
    else:
        out.print(view.job_details(record))


@command
def logs(
    job: JobArgument,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="go on until the job ends")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Show what happened to a job."""
    with connect() as client:
        if follow:
            _follow(client, job, output)
            return
        events = list(client.events(job))
    if output is Output.json:
        view.as_json(out, events)
        return
    follower = view.Follower(Console(force_terminal=False))
    for event in events:
        follower.show(event)


@command
def metrics(
    job: JobArgument,
    min_step: Annotated[int, typer.Option(help="first step to show")] = 0,
    output: OutputOption = Output.table,
) -> None:
    """Show a job's metrics, a row a step."""
    with connect() as client:
        listed = client.metrics(job, min_step - 1)
    if output is Output.json:
        view.as_json(out, listed)
    else:
        out.print(view.metrics_table(listed.rows))


@command
def rollouts(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="which step (default: the newest)")] = None,
    limit: Annotated[int, typer.Option("-n", help="how many")] = 16,
    output: OutputOption = Output.table,
) -> None:
    """Show a step's prompts, completions, rewards and advantages, and what each grader said."""
    with connect() as client:
        listed = client.rollouts(job, step)
    if output is Output.json:
        view.as_json(out, listed.model_copy(update={"rollouts": listed.rollouts[:limit]}))
    else:
        out.print(rollout_view.rollout_table(listed, limit))


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
    """Grade a job's stored rollouts by other rewards, and show what would flip. The job stays as it
    is."""
    first, last = _steps(step)
    rewards = load_job(reward, REWARDS_ONLY).rewards
    with connect() as client:
        report = client.regrade(job, first, last, rewards, limit)
    if output is Output.json:
        view.as_json(out, report)
    else:
        out.print(rollout_view.regrade_table(report))


@command
def grade(
    grader: Annotated[
        str | None, typer.Argument(help="a grader's name, for example exact_match")
    ] = None,
    completion: Annotated[
        str, typer.Option(help="what the model said; - reads it from stdin")
    ] = "-",
    row: Annotated[str, typer.Option(help="the dataset's row as JSON")] = grading.DEFAULT_ROW,
    prompt: Annotated[str, typer.Option(help="what the model was asked")] = "",
    num_tokens: Annotated[
        int | None, typer.Option(help="the completion's length in tokens")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the grader, may be repeated")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="your own rewards, with --function")] = None,
    function: Annotated[str, typer.Option(help="the function or class in --file")] = "reward",
    reward: Annotated[
        Path | None, typer.Option(help="a TOML with [[rewards]]; a job file will do")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Try a grader, your own function, or a file of rewards on one completion. Exits 1 if it gives
    no reward."""
    if sum(source is not None for source in (grader, file, reward)) != 1:
        raise BadRequest(
            "name one of: a grader, --file with your own function, --reward with a TOML of rewards"
        )
    if reward is not None and param:
        raise BadRequest(
            "--param goes with a grader or --file; the rewards of --reward have their params in "
            "the TOML"
        )
    if reward is not None:
        rewards = load_job(reward, REWARDS_ONLY).rewards
    else:
        own = grading.own_reward(file, function, param or []) if file else None
        rewards = (own or grading.named_reward(grader or "", param or []),)
    text = sys.stdin.read() if completion == "-" else completion
    score = grading.score(grading.item(text, prompt, row, num_tokens), rewards)
    if output is Output.json:
        view.as_json(out, score)
    else:
        out.print(grading.table(score))
    if score.value is None:
        raise typer.Exit(1)


@command
def cancel(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Cancel a job."""
    with connect() as client:
        record = client.cancel(job)
    if output is Output.json:
        view.as_json(out, record)
    else:
        out.print(
            f"job {record.id} is {'cancelled' if record.status in TERMINAL else 'being cancelled'}",
            highlight=False,
        )


@command
def pause(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Pause a job: it lets go of the services, and keeps all it has."""
    with connect() as client:
        record = client.pause(job)
    if output is Output.json:
        view.as_json(out, record)
    else:
        state = "paused" if record.status == "paused" else "being paused"
        out.print(
            f"job {record.id} is {state}; `hone resume {record.id}` goes on from there",
            highlight=False,
        )


@command
def resume(job: JobArgument, output: OutputOption = Output.table) -> None:
    """Let a paused job go on where it was."""
    with connect() as client:
        record = client.resume(job)
    if output is Output.json:
        view.as_json(out, record)
    else:
        out.print(
            f"job {record.id} is {record.status}; `hone logs -f {record.id}` watches it",
            highlight=False,
        )


@command
def doctor(output: OutputOption = Output.table) -> None:
    """Check this machine and the stack that runs on it."""
    report = checks.examine()
    if output is Output.json:
        view.as_json(out, report)
    else:
        for check in report.checks:
            mark = {"ok": "[green]ok[/]  ", "note": "[yellow]note[/]", "fault": "[red]FAULT[/]"}[
                check.state
            ]
            out.print(f"{mark} [bold]{check.name}[/]: ", end="")
            out.print(check.detail, markup=False, highlight=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def _steps(text: str) -> tuple[int, int]:
    """Returns the first and last step of `A:B`, or of `A` alone."""
    first, separator, last = text.partition(":")
    if not first.isdecimal() or (separator and not last.isdecimal()) or not int(first):
        raise BadRequest(
            f"--step {text!r}: expected a step such as 7, or a range of them such as 3:9; the "
            "first step is 1"
        )
    return int(first), int(last or first)


def _follow(client: Client, job: str, output: Output) -> None:
    """Shows a job's events to its end; exits 1 if it did not succeed. Ctrl-C leaves it running."""
    job = client.get(job).id
    try:
        if output is Output.json:
            for event in client.events(job, follow=True):
                view.as_json(out, event)
        else:
            with view.Follower(out) as follower:
                for event in client.events(job, follow=True):
                    follower.show(event)
    except KeyboardInterrupt as error:
        hint = f"`hone logs -f {job}` watches it again, `hone cancel {job}` stops it"
        err.print(f"\ndetached; job {job} goes on. {hint}.", highlight=False)
        raise typer.Exit(130) from error
    record: JobRecord = client.get(job)
    if output is Output.table:
        out.print(view.job_details(record))
    if record.status != "succeeded":
        raise typer.Exit(1)


def main() -> None:
    service_logs.to_stderr()
    stdout: Any = sys.stdout
    stdout.reconfigure(
        line_buffering=True
    )  # so that `hone logs -f | grep step` shows a line as it happens
    app()


if __name__ == "__main__":
    main()
