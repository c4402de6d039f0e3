"""Agents as the command line names them."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.agents.commands import Command
from hone.agents.working import Agent
from shared.errors import BadRequest, HoneError

NAME = "run"
"""The function of a file that is its agent, if none is named."""


def agent_of(words: Sequence[str]) -> Agent:
    """Returns the agent that `words` stand for: one Python file, perhaps with `:name` behind it, or
    a command. Raises BadRequest for a file without such a function, and for no command."""
    path, _, name = words[0].partition(":")
    if len(words) == 1 and path.endswith(".py"):
        return _in_file(Path(path), name or NAME)
    if shutil.which(words[0]) is None:
        raise BadRequest(
            f"there is no command {words[0]!r}; expected a program that can be run, or one Python "
            "file without arguments"
        )
    return Command(words)


def _in_file(path: Path, name: str) -> Agent:
    if not path.is_file():
        raise BadRequest(
            f"there is no file {str(path)!r}; expected one with an agent, such as "
            f"`async def {NAME}(row, base_url, api_key)`"
        )
    found: Any = getattr(_loaded(path), name, None)
    if not callable(found):
        raise BadRequest(
            f"{str(path)!r} has no function {name!r}; expected `async def {name}(row, base_url, "
            "api_key)`, or its name behind a colon: agent.py:play"
        )
    _check_arguments(found, f"{name!r} of {str(path)!r}")
    return found


def _check_arguments(agent: Any, which: str) -> None:
    try:
        parameters = inspect.signature(agent)
    except ValueError:  # of a function that is not Python's nothing is known
        return
    try:
        parameters.bind({}, "", "")
    except TypeError:
        raise BadRequest(f"{which} takes {parameters}; expected (row, base_url, api_key)") from None


def _loaded(path: Path) -> Any:
    """Returns the file as a module. Files beside it can be imported, as by `python agent.py`.
    Raises BadRequest for what the file raises."""
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except HoneError:
        raise
    except Exception as error:  # the user's own code
        why = f"{type(error).__name__}: {error}"
        raise BadRequest(f"{_where(error, path)} cannot be loaded: {why}") from error
    return module


def _where(error: Exception, path: Path) -> str:
    """Returns the file, and its line that raised or that cannot be compiled."""
    places = [(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno))
    line = next((line for name, line in reversed(places) if name == str(path.resolve())), None)
    return repr(str(path)) if line is None else f"line {line} of {str(path)!r}"
