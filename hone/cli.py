"""The `hone` command. Exit codes: 0 done, 1 the job did not succeed, 2 bad input or no service, 3
the job is paused, 130 Ctrl-C."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

# Else pydantic would search all packages for plugins, a tenth of a command's time.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import typer
from typer.core import TyperGroup

from hone import commands
from hone.shell import app as registered
from shared.host import logs

REPLACED = {
    "checkpoints": "`hone download JOB --list` lists a job's checkpoints",
    "diagnose": "`hone doctor JOB` says what is wrong with a job",
    "data": "`hone modal upload FILES` puts data files on Modal",
    "get": "`hone ls JOB` shows one job",
    "open": "`hone up` and `hone submit` print the address of the page",
    "plot": "`hone metrics JOB --plot` draws the learning curve",
    "regrade": "`hone grade --job JOB --step STEPS --reward FILE` grades stored rollouts again",
    "sample": "the sampler answers OpenAI's API: docs/commands.md, one service alone",
    "status": "`hone ls` shows the jobs, `hone ls JOB` one",
    "stop": "`hone cancel JOB` ends a job, `hone pause JOB` lets it continue later",
    "validate": "`hone submit FILE --dry-run` checks a job and changes nothing",
    "wait": "`hone logs -f JOB` returns when the job ends or pauses",
}
"""Commands that are gone, or that other programs have, with a sentence on the replacement."""


@functools.cache
def find_commands() -> Mapping[str, tuple[str, str]]:
    """Returns the module of each command, and a line on what it does. Imports no module, so a
    command takes only its own module's time."""
    files = sorted(Path(commands.__path__[0]).glob("*.py"))
    return dict(sorted(found for file in files for found in _commands_in(file)))


def _commands_in(file: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for line in ast.parse(file.read_text(encoding="utf-8")).body:
        for name, text in _commands_of(line):
            yield name, (f"{commands.__name__}.{file.stem}", text)


def _commands_of(line: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yields the command that a function defines, or the group that `app.add_typer` adds."""
    match line:
        case ast.FunctionDef(name=name, decorator_list=[ast.Name(id="command")]):
            yield name.rstrip("_"), _first_sentence(ast.get_docstring(line) or "")
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="add_typer"), keywords=given)):
            texts = {each.arg: ast.literal_eval(each.value) for each in given}
            yield texts["name"], _first_sentence(texts["help"])
        case _:
            pass


def _first_sentence(text: str) -> str:
    return re.split(r"\n\n|(?<=\.)\s", text, maxsplit=1)[0].replace("\n", " ")


class Group(TyperGroup):
    """The commands, each imported when it is asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = cast(Any, dict.fromkeys(find_commands()))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            return None
        import_module(find_commands()[cmd_name][0])
        return typer.main.get_group(registered).commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in REPLACED and not ctx.resilient_parsing:
            ctx.fail(f"no command {args[0]!r}; {REPLACED[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in find_commands().items()])


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"hone {version('hone-rl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """GRPO post-training of language models as a service."""


def main() -> None:
    logs.to_stderr()
    stdout: Any = sys.stdout
    stdout.reconfigure(
        line_buffering=True
    )  # so that `hone logs -f | grep step` shows a line as it happens
    app()


if __name__ == "__main__":
    main()
