"""What an agent returned, as the result of its episode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from shared.explain import shown
from shared.wire import EpisodeResult

MAX_ERROR = 2000
"""Characters of an agent's failure that are reported; its end says most."""

EXPECTED = (
    "expected a number, None, a list with a number per answer of the model, a dict by the ids of "
    'answers, or {"reward": ..., "metrics": {...}}'
)


class AgentFailed(Exception):
    """The agent did, for a reason that its text says."""


def result_of(value: Any) -> EpisodeResult:
    """Returns the result that `value` stands for. Raises AgentFailed for anything else than
    rewards."""
    if isinstance(value, Mapping) and "reward" in value:
        given = dict(cast(Mapping[str, Any], value))
        reward: Any = given.pop("reward")
        metrics: Any = given.pop("metrics", None) or {}
        if given or not isinstance(metrics, Mapping):
            raise AgentFailed(f"the agent returned {shown(cast(Any, value))}; {EXPECTED}")
        named = cast(Mapping[Any, Any], metrics)
        found = {str(name): _number(f"metric {name}", each) for name, each in named.items()}
        return EpisodeResult(reward=_reward(reward), metrics=found)
    return EpisodeResult(reward=_reward(value))


def failure(error: BaseException) -> EpisodeResult:
    """Returns the result of an agent that raised `error`."""
    told = str(error) if isinstance(error, AgentFailed) else f"{type(error).__name__}: {error}"
    return EpisodeResult(error=told[-MAX_ERROR:] or type(error).__name__)


def _reward(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        by_id = cast(Mapping[Any, Any], value)
        return {str(id): _or_none(f"reward of {id}", each) for id, each in by_id.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        turns = cast(Sequence[Any], value)
        return tuple(_or_none(f"reward of answer {n}", each) for n, each in enumerate(turns))
    return _number("reward", value)


def _or_none(what: str, value: Any) -> float | None:
    return None if value is None else _number(what, value)


def _number(what: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        raise AgentFailed(f"the agent's {what} is {shown(value)}; {EXPECTED}") from None
    if not math.isfinite(number):
        raise AgentFailed(f"the agent's {what} is {shown(value)}; expected a finite number")
    return number
