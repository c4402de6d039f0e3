"""What all commands share: the app that they register with, their options, where they print, and
how they reach the orchestrator."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.text import Text

from hone import stack, view
from hone.client import Client
from shared.errors import HoneError, Unavailable

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, soft_wrap=True)

SAYING_S = 3.0
"""Seconds after which it is said again that a command waits."""

REWARDS_ONLY = ("name=rewards", "model=any/model", "steps=1", "data.train=any")
"""Fills in what a file with nothing but `[[rewards]]` lacks of a job."""


class Output(StrEnum):
    table = "table"
    json = "json"


OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="table for people, json for programs")
]
JobArgument = Annotated[
    str, typer.Argument(help="a job's id, or its name for the newest of that name")
]
JobFileArgument = Annotated[Path, typer.Argument(help="a job as TOML")]
OverridesOption = Annotated[list[str] | None, typer.Option("--set", help="a.b=c, may be repeated")]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a command under the function's name. Its HoneErrors become one sentence and exit
    code 2."""
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
            err.print(f"hone: {error.detail}", markup=False, highlight=False)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    return group.command(function.__name__)(run)


@contextlib.contextmanager
def connect(folder: Path = stack.FOLDER) -> Generator[Client]:
    """Yields a client of the orchestrator: of the stack that was started in `folder`, if the
    environment names none. Raises Unavailable at once if nothing answers."""
    url, token = stack.orchestrator(folder)
    with Client(url, token=token) as client:
        try:
            client.ping()
        except Unavailable as error:
            raise Unavailable(
                f"{error.detail}; `hone up` starts a stack on this machine, HONE_ORCHESTRATOR_URL "
                "names another"
            ) from error
        yield client


@contextlib.contextmanager
def saying(what: str) -> Generator[None]:
    """Says on stderr every few seconds that it still goes on: "checking the job, 6 s"."""
    ended, began = threading.Event(), time.monotonic()

    def say() -> None:
        while not ended.wait(SAYING_S):
            err.print(f"{what}, {time.monotonic() - began:.0f} s", highlight=False)

    telling = threading.Thread(target=say, daemon=True)
    telling.start()
    try:
        yield
    finally:
        ended.set()
        telling.join()


def show(
    output: Output, body: BaseModel | Sequence[BaseModel], shown: Callable[[], RenderableType]
) -> None:
    """Prints `body` as JSON, or what `shown` makes of it for people: text unwrapped, anything else
    as wide as the terminal."""
    if output is Output.json:
        view.as_json(out, body)
    else:
        content = shown()
        out.print(content, soft_wrap=isinstance(content, str | Text), highlight=False)
