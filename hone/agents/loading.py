"""Agents as the command line names them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.agents.commands import Command
from hone.agents.working import Agent
from shared.errors import BadRequest

NAME = "run"
"""The function of a file that is its agent, if none is named."""


def agent_of(words: Sequence[str]) -> Agent:
    """Returns the agent that `words` stand for: one Python file, perhaps with `:name` behind it, or
    a command. Raises BadRequest for a file that has no such function."""
    path, _, name = words[0].partition(":")
    if len(words) == 1 and path.endswith(".py"):
        return _in_file(Path(path), name or NAME)
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
    return found


def _loaded(path: Path) -> Any:
    """Returns the file as a module. Files beside it can be imported, as by `python agent.py`."""
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
