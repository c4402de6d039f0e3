"""Environments and tools as people have them in a script, as `[environment]` of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hone.trainer.source import source_of
from shared.errors import BadRequest
from shared.explain import shown


@dataclass(frozen=True)
class Played:
    """The table of `[environment]`; `rewards`: a class of it has `get_reward`."""

    table: dict[str, Any]
    rewards: bool


def environment_of(tools: Any, environment: Any) -> Played | None:
    """Returns the environment of functions `tools`, of a class, of a dict of classes by the row's
    `environment`, or of a job's own table; None without any. Raises BadRequest with the reason."""
    if tools and environment is not None:
        raise BadRequest(
            "tools and environment are both given; expected one of them: make the tools methods of "
            "the environment"
        )
    if tools:
        listed = cast(Sequence[Any], tools) if isinstance(tools, list | tuple) else [tools]
        functions = [_function(each, f"tools[{at}]") for at, each in enumerate(listed)]
        names = [name for name, _ in functions]
        return Played({"kind": "tools", "tools": names, "source": _text(functions)}, False)
    if environment is None:
        return None
    if not isinstance(environment, Mapping):
        found = _class(environment, "environment")
        return Played({"name": found[0], "source": _text([found])}, _has_reward(found))
    table = dict(cast(Mapping[str, Any], environment))
    if not any(isinstance(each, type) for each in table.values()):
        return Played(table, False)
    classes = {key: _class(each, f"environment[{key!r}]") for key, each in table.items()}
    names = {key: name for key, (name, _) in classes.items()}
    text = _text([*classes.values()])
    return Played({"name": names, "source": text}, any(map(_has_reward, classes.values())))


def _has_reward(found: tuple[str, type]) -> bool:
    return callable(getattr(found[1], "get_reward", None))


def _function(given: Any, where: str) -> tuple[str, Callable[..., Any]]:
    name = getattr(given, "__name__", "")
    if not callable(given) or isinstance(given, type) or not name.isidentifier():
        raise BadRequest(f"{where} is {shown(given)}; expected a function with a name")
    return name, given


def _class(given: Any, where: str) -> tuple[str, type]:
    if not isinstance(given, type) or not callable(getattr(given, "reset", None)):
        raise BadRequest(
            f"{where} is {shown(given)}; expected a class with reset(**row), whose public methods "
            "are the tools"
        )
    return given.__name__, given


def _text(named: Sequence[tuple[str, Any]]) -> str:
    return "\n".join(source_of(each, name) for name, each in dict(named).items())
