"""OpenAI's grader objects: the `type` of a grader, perhaps a `name`, and its params beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import BadRequest
from shared.job import RewardSpec


def reward_of(grader: Mapping[str, Any]) -> RewardSpec:
    """Returns the object as a reward of a job. Raises BadRequest if `type` cannot be a grader's
    name: a job's own code is a file, not an object."""
    kind, name = grader.get("type"), grader.get("name")
    if not isinstance(kind, str) or kind == "function":
        raise BadRequest(
            f"'grader.type' is {kind!r:.80}; expected the name of a grader, for example "
            "'string_check'"
        )
    if not isinstance(name, str | None):
        raise BadRequest(f"'grader.name' is {name!r:.80}; expected text")
    params = {key: value for key, value in grader.items() if key not in ("type", "name")}
    return RewardSpec(grader=kind, name=name or None, params=params)
