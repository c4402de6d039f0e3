"""The names that people use for GRPO, TRL's above all, as the job's keys.

| file | names |
|---|---|
| `single.py` | that become a key alone |
| `joint.py` | whose values become keys together |
| `training_arguments.py` | that have no key, and why |

`hone.Trainer`, `hone import` and the table of docs/trainer.md are made from these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hone.trainer.joint import JOINT, JOINT_NAMES, NO_BOUND, Values, check_kinds
from hone.trainer.single import CONVERTED, SAME, Translation, key_of, set_alone
from hone.trainer.training_arguments import REFUSED, WITHOUT_EFFECT
from shared.errors import BadRequest
from shared.explain import closest, shown
from shared.job import Job

SECTIONS_AND_KEYS = frozenset(Job.model_fields) - {"request"}
"""Keys of the job itself, and its sections as dicts."""


def translate(given: Values) -> Translation:
    """Returns the job's keys for these parameters; None says nothing. The job's own sections go
    over what other names say. Raises BadRequest for a value that cannot be converted."""
    said = {name: NO_BOUND.get(name) if each is None else each for name, each in given.items()}
    given = {name: value for name, value in said.items() if value is not None}
    check_kinds(given)
    job = Translation()
    for name, value in given.items():
        _translate_one(name, value, job)
    for function, (names, _) in JOINT.items():
        try:
            function(given, job)
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            said = ", ".join(f"{name} {shown(given[name])}" for name in names if name in given)
            raise BadRequest(f"{said} cannot be converted together: {error}") from error
    _merge(job.job, {name: given[name] for name in given.keys() & SECTIONS_AND_KEYS - SAME.keys()})
    return job


def _translate_one(name: str, value: Any, job: Translation) -> None:
    if key_of(name):
        set_alone(name, value, job)
    elif name in REFUSED:
        neutral, why = REFUSED[name]
        if value not in neutral:
            job.refused[name] = f"{shown(value)}: {why}"
    elif name in WITHOUT_EFFECT:
        job.ignored[name] = WITHOUT_EFFECT[name]
    elif name not in JOINT_NAMES and name not in SECTIONS_AND_KEYS:
        job.unknown.append(name)


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            into[name] = value


def check(job: Translation, what: str) -> None:
    """Raises BadRequest for each name that is unknown, with the nearest, or refused. `what` is who
    was given them."""
    faults = [f"{name!r} is unknown{_nearest(name)}" for name in job.unknown]
    faults += [f"{name} is {why}" for name, why in job.refused.items()]
    if faults:
        raise BadRequest(f"{what}: {'; '.join(faults)}")


OWN = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "reward_weights", "mode")
"""Parameters of the Trainer beside these."""


def _nearest(name: str) -> str:
    whole = next((own for own in OWN if f"_{name}" in own), None)
    known = whole or closest(
        name, [*OWN, *SAME, *CONVERTED, *REFUSED, *JOINT_NAMES, *SECTIONS_AND_KEYS]
    )
    return f"; did you mean {known!r}?" if known else ""


def given_by(config: Any) -> dict[str, Any]:
    """Returns the parameters of a dataclass of arguments, such as a `trl.GRPOConfig`: the names
    that say what is learned, and refused names where they are not at their defaults."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise BadRequest(
            f"args is {shown(config)}; expected a trl.GRPOConfig, or parameters by name"
        )
    known = {*SAME, *CONVERTED, *JOINT_NAMES, "seed", "use_vllm"}
    values = {each.name: (getattr(config, each.name), each) for each in dataclasses.fields(config)}
    return {
        name: value
        for name, (value, each) in values.items()
        if (value is not None or name in NO_BOUND)
        and (name in known or (name in REFUSED and value != each.default))
    }
