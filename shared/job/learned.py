"""What a job learns: all its keys except MAY_CHANGE, which may change while it runs."""

from __future__ import annotations

from typing import Any, cast

from shared.job.job import MAY_CHANGE, Job

SHOWN_CHARACTERS = 60


def learned(job: Job) -> dict[str, Any]:
    """Returns these keys, with the learning rate's value also where it is the default."""
    found = job.model_dump(mode="json", exclude=set(MAY_CHANGE))
    return found | {"training": found["training"] | {"learning_rate": job.learning_rate}}


def same_learning(one: Job, other: Job) -> bool:
    """Whether two jobs differ in keys of MAY_CHANGE only."""
    return learned(one) == learned(other)


def differences(old: Job, new: Job) -> list[str]:
    """Returns the differences in what the two learn, such as `training.epochs was 2 and is 3`."""
    return _differences(learned(old), learned(new), "")


def _differences(old: Any, new: Any, key: str) -> list[str]:
    before, after = _items(old), _items(new)
    if before is None or after is None or (isinstance(old, list) and len(before) != len(after)):
        return [] if old == new else [f"{key} was {_shown(old)} and is {_shown(new)}"]
    names = sorted(before.keys() | after.keys())
    return [
        found
        for name in names
        for found in _differences(
            before.get(name), after.get(name), f"{key}.{name}" if key else name
        )
    ]


def _items(value: Any) -> dict[str, Any] | None:
    """Returns a table's items, or a list's by position; None for a plain value."""
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    if isinstance(value, list):
        return {str(position): item for position, item in enumerate(cast(list[Any], value))}
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
