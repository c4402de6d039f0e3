"""Parts that all commands share: the app that they register with, their options, their output, and
the connection to the orchestrator."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hone import stack
from shared.errors import HoneError, Unavailable

if TYPE_CHECKING:  # imported where they are used, because `hone --help` does not need them
    from pydantic import BaseModel
    from rich.console import RenderableType

    from hone.client import Client
    from shared.job import Job

app = typer.Typer(rich_markup_mode=None)
out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, soft_wrap=True)

FAILED, WRONG, PAUSED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: the job did not succeed; bad input, or no service; the job is paused; Ctrl-C."""

SAYING_S = 3.0
"""Seconds between two messages that a command is waiting."""

REWARDS_ONLY = ("name=rewards", "model=any/model", "steps=1", "data.train=any")
"""Keys that complete a file with only `[[rewards]]` to a job."""

COMPLETION_S = 5.0
"""Seconds that a shell's Tab waits for the names of jobs."""


def job_names(incomplete: str) -> list[str]:
    """Returns the names and ids of the newest jobs that begin so, for a shell's completion. Empty
    if no stack answers in time: a Tab shows no errors."""
    import asyncio

    from hone.async_client import AsyncClient

    async def newest() -> list[str]:
        url, token = stack.orchestrator()
        async with asyncio.timeout(COMPLETION_S), AsyncClient(url, token=token) as client:
            await client.ping()
            return [name for job in await client.list(100) for name in (job.name, job.id)]

    with contextlib.suppress(HoneError, TimeoutError):
        names = dict.fromkeys(asyncio.run(newest()))
        return [name for name in names if name.startswith(incomplete)]
    return []


class Output(StrEnum):
    table = "table"
    json = "json"


OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="table for people, json for programs")
]
_JOB = typer.Argument(
    help="a job's id, or its name for the newest of that name", autocompletion=job_names
)
JobArgument = Annotated[str, _JOB]
OptionalJobArgument = Annotated[str | None, _JOB]
JobsArgument = Annotated[
    list[str], typer.Argument(help="jobs' ids, or their names for the newest of a name")
]
JobFileArgument = Annotated[Path, typer.Argument(help="a job as TOML")]
OverridesOption = Annotated[list[str] | None, typer.Option("--set", help="a.b=c, may be repeated")]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a command under the function's name, without a `_` at its end. Its HoneErrors
    become one sentence and exit code 2."""
    return command_of(app)(function)


def command_of(group: typer.Typer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the decorator that registers a command as `command` does, in a group of commands."""
    return functools.partial(_register, group)


def _register(group: typer.Typer, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except HoneError as error:
            say(f"hone: {error.detail}")
            raise typer.Exit(WRONG) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error

    return group.command(function.__name__.rstrip("_"))(run)


def say(message: str) -> None:
    """Prints a message for people on stderr, unchanged."""
    err.print(message, markup=False, highlight=False)


def job_in(file: Path, overrides: Sequence[str] | None) -> Job:
    """Returns the job in a file. Warns if its model counts as a Hub id but is probably a misspelt
    folder."""
    from shared.job.file import load_job

    job = load_job(file, overrides or [])
    if said := _misspelt_folder(job.model):
        say(f"warning: {said}")
    return job


def _misspelt_folder(model: str) -> str | None:
    parent, name = Path(model).parent, Path(model).name
    if len(Path(model).parts) != 2 or Path(model).exists() or not parent.is_dir():
        return None
    from shared.explain import closest

    beside = parent.iterdir() if os.access(parent, os.R_OK) else ()
    near = closest(name, [each.name for each in beside if each.is_dir()])
    meant = f"; did you mean {str(parent / near)!r}?" if near else ""
    return (
        f"there is no folder {model!r} here, and {str(parent)!r} is one; the model is looked for "
        f"on the Hugging Face Hub{meant}"
    )


@contextlib.contextmanager
def connect(folder: Path = stack.FOLDER) -> Generator[Client]:
    """Yields a client of the orchestrator: of the stack that was started in `folder`, if the
    environment names none. Raises Unavailable at once if nothing answers."""
    from hone.client import Client

    url, token = stack.orchestrator(folder)
    with Client(url, token=token) as client:
        try:
            client.ping()
        except Unavailable as error:
            starts = "`hone up` starts a stack on this machine, HONE_ORCHESTRATOR_URL names another"
            remedy = stack.restarting(folder, url) or starts
            raise Unavailable(f"{error.detail}; {remedy}") from error
        yield client


@contextlib.contextmanager
def report_progress(what: str) -> Generator[None]:
    """Says on stderr every few seconds that it still continues: "checking the job, 6 s"."""
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(SAYING_S):
            err.print(f"{what}, {time.monotonic() - began:.0f} s", highlight=False)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        yield
    finally:
        ended.set()
        telling.join()


def show(
    output: Output, body: BaseModel | Sequence[BaseModel], shown: Callable[[], RenderableType]
) -> None:
    """Prints `body` as JSON, or the result of `shown` for people: text unwrapped, anything else as
    wide as the terminal."""
    if output is Output.json:
        as_json(body)
    else:
        from rich.text import Text

        content = shown()
        out.print(content, soft_wrap=isinstance(content, str | Text), highlight=False)


def as_json(body: BaseModel | Iterable[BaseModel]) -> None:
    """Prints one JSON document: an object, or a list of them."""
    from pydantic import BaseModel

    text = (
        body.model_dump_json()
        if isinstance(body, BaseModel)
        else "[" + ",".join(item.model_dump_json() for item in body) + "]"
    )
    out.print(text, soft_wrap=True, markup=False, highlight=False)
