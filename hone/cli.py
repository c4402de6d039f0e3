"""The `hone` command. Exit codes: 0 done, 1 the job did not succeed, 2 bad input or no service, 3
the job is paused, 124 the time of --timeout is over, 130 Ctrl-C."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

# Else pydantic would search all packages for plugins, a tenth of a command's time.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import typer
from typer.core import TyperGroup

from hone import commands
from hone.shell import app as registered
from shared.host import logs


@functools.cache
def find_commands() -> Mapping[str, tuple[str, str]]:
    """Returns the module of each command, and a line on what it does. Imports no module, so a
    command takes only its own module's time."""
    return dict(sorted((name, told) for file in _files() for name, told in _commands_in(file)))


def _module_of(name: str) -> str:
    """Returns the module of a command. Only files that contain its name are parsed: parsing all
    takes a tenth of the time of `hone ls`. Raises KeyError for an unknown command."""
    defined = re.compile(rf'\ndef {re.escape(name)}_?\(|name="{re.escape(name)}"')
    likely = [file for file in _files() if defined.search(file.read_text(encoding="utf-8"))]
    return {name: module for file in likely for name, (module, _) in _commands_in(file)}[name]


def _files() -> list[Path]:
    return sorted(Path(commands.__path__[0]).glob("*.py"))


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


class Commands(MutableMapping[str, Any]):
    """The commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        import_module(_module_of(name))
        return typer.main.get_group(registered).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(find_commands())

    def __len__(self) -> int:
        return len(find_commands())

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError(f"got a command {name!r}; expected it in a file of hone/commands")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the command {name!r} goes with its file in hone/commands")


class Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands()

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
