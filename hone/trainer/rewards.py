"""Rewards as people have them in a script, as `[[rewards]]` of a job: functions as TRL has them,
classes and instances of `hone.Reward`, names of graders, grader objects."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from hone.trainer.source import callable_source, instance_source, source_of
from shared.errors import BadRequest
from shared.explain import elide
from shared.rewards import Reward
from shared.wire.rewards import reward_of

SECRET_NAME, LEAST_SECRET = re.compile(r"(?i)(key|token|secret|password)$"), 12
TRL_OVERLONG = "_SoftOverlongPunishment"
"""The class of what TRL's `get_soft_overlong_punishment` returns. It counts token ids, which a
reward function does not get, as the grader `overlong` does."""

KEY = re.compile(r"\b(sk-|hf_|gh[pousr]_|github_pat_|xox[abp]-|AKIA|AIza)[\w-]{16,}")
"""API keys as OpenAI, Anthropic, Hugging Face, GitHub, Slack, AWS and Google write them."""


def rewards_of(given: Any, weights: Sequence[float] | None) -> list[dict[str, Any]]:
    """Returns a table of `[[rewards]]` for each reward. Raises BadRequest with the reason."""
    several = _several(given)
    if given is None or not several:
        raise BadRequest(
            "reward_funcs is empty; expected a function, a hone.Reward, or the name of a grader"
        )
    tables = [_table(each, position) for position, each in enumerate(several)]
    for table in tables:
        _check_no_secret(table)
    if weights is not None:
        if not isinstance(weights, list | tuple) or not all(map(_is_number, weights)):
            raise BadRequest(
                f"reward_weights is {elide(weights)}; expected a list with a number for each reward"
            )
        if len(weights) != len(tables):
            raise BadRequest(
                f"reward_weights has {len(weights)} weights and reward_funcs {len(tables)} "
                "rewards; expected as many"
            )
        for table, weight in zip(tables, weights, strict=True):
            table["weight"] = float(weight)
    return _named_apart(tables)


def _check_no_secret(table: Mapping[str, Any]) -> None:
    """Raises BadRequest if the source has an API key, or the value of a variable of the environment
    that is named as a secret: a job is stored, and shown to all who may read it."""
    held = {
        f"the value of {name}": value
        for name, value in os.environ.items()
        if SECRET_NAME.search(name) and len(value) >= LEAST_SECRET
    }
    source = table.get("source", "")
    if found := KEY.search(source):
        held[f"a key that begins with {found[1]!r}"] = found[0]
    if what := next((what for what, value in held.items() if value in source), None):
        raise BadRequest(
            f"the source of the reward {table['function']!r}, with what it closes over, has "
            f"{what}; expected no secret: a job is stored unchanged, and shown to all who may read "
            "it. A grader that asks a model takes its key from the services' settings"
        )


def packages_of(given: Any) -> tuple[str, ...]:
    """Returns the packages that the rewards want in the sandbox."""
    own = [each for each in _several(given) if isinstance(each, Reward)]
    return tuple(dict.fromkeys(package for each in own for package in each.sandbox.packages))


def _several(given: Any) -> Sequence[Any]:
    return cast(Sequence[Any], given) if isinstance(given, list | tuple) else (given,)


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Real)


def _table(given: Any, position: int) -> dict[str, Any]:
    if isinstance(given, str):
        return {"grader": given}
    if isinstance(given, Mapping):
        return _object(dict(cast(Mapping[str, Any], given)))
    if isinstance(given, Reward):
        name = type(given).__name__
        return {"function": name, "source": instance_source(given, name)}
    if type(given).__name__ == TRL_OVERLONG and type(given).__module__.startswith("trl."):
        limits = {"max_tokens": given.max_completion_len, "buffer_tokens": given.soft_punish_cache}
        return {"grader": "overlong", "params": limits}
    if isinstance(given, type) or callable(given):
        return _own(given, position)
    raise BadRequest(
        f"reward_funcs[{position}] is {elide(given)}; expected a function, a hone.Reward, the name "
        "of a grader, or a grader object"
    )


def _own(given: Any, position: int) -> dict[str, Any]:
    if isinstance(given, type) and not any(hasattr(given, one) for one in ("score", "score_batch")):
        raise BadRequest(
            f"reward_funcs[{position}] is the class {given.__name__!r} without score and "
            "score_batch; expected one of them"
        )
    if inspect.ismethod(given):
        raise BadRequest(
            f"reward_funcs[{position}] is a method of {elide(given.__self__)}; expected a "
            "function, or an instance of hone.Reward"
        )
    name = getattr(given, "__name__", "") or f"reward_{position}"
    name = name if name.isidentifier() else f"reward_{position}"
    is_plain = isinstance(given, type | types.FunctionType | functools.partial)
    if not is_plain and not hasattr(given, "__wrapped__"):
        return {"function": name, "source": callable_source(given, name)}
    return {"function": name, "source": source_of(given, name)}


def _object(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a table of `[[rewards]]`; of a grader object of OpenAI's, its `type` is the grader
    and the rest its params."""
    if "type" not in given:
        return given
    own = {name: given.pop(name) for name in ("weight", "shaping") if name in given}
    return reward_of(given).model_dump(exclude_defaults=True) | own


def _named_apart(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives a later reward of the same name a number: metrics are called by the names."""
    seen: set[str] = set()
    for table in tables:
        label = table.get("name") or table.get("function") or table.get("grader", "")
        names = (label if number == 1 else f"{label}_{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in seen)
        seen.add(name)
        if name != label:
            table["name"] = name
    return tables


# --- environments and tools ----------------------------------------------------------------------


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
        raise BadRequest(f"{where} is {elide(given)}; expected a function with a name")
    return name, given


def _class(given: Any, where: str) -> tuple[str, type]:
    if not isinstance(given, type) or not callable(getattr(given, "reset", None)):
        raise BadRequest(
            f"{where} is {elide(given)}; expected a class with reset(**row), whose public methods "
            "are the tools"
        )
    return given.__name__, given


def _text(named: Sequence[tuple[str, Any]]) -> str:
    return "\n".join(source_of(each, name) for name, each in dict(named).items())
