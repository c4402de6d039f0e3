"""What users depend on: routes, keys of a job, settings, commands and metrics. A change of any is a
change of tests/data/surface.json: `python -m tests.contract.test_surface` writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from pydantic import BaseModel

from hone.cli import find_commands as found_commands
from services.orchestrator.app import create_service as create_orchestrator
from services.orchestrator.store.store import Store
from services.reward.app import create_service as create_reward
from services.rollout.app import create_service as create_rollout
from services.rollout.sampler import Sampler
from services.trainer.app import create_service as create_trainer
from shared.http.service import Service
from shared.job import Job
from shared.settings import Settings

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests/data/surface.json"
MEANINGS = ROOT / "services/orchestrator/extensions/page/meanings.json"

unused = cast(Any, None)
SERVICES: dict[str, Callable[[Settings], Service]] = {
    "orchestrator": lambda settings: create_orchestrator(settings, Store("redis://127.0.0.1:1")),
    "rollout": lambda settings: create_rollout(settings, Sampler(unused, (), unused)),
    "trainer": lambda settings: create_trainer(settings, unused, unused, {}),
    "reward": lambda settings: create_reward(settings.model_copy(update={"sandbox": "unsafe"})),
}


def routes() -> list[str]:
    """Returns the routes in the OpenAPI documents, as "orchestrator POST /v1/jobs"."""
    return [
        f"{name} {method.upper()} {path}"
        for name, make in SERVICES.items()
        for path, methods in make(Settings()).app.openapi()["paths"].items()
        for method in methods
    ]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{above}{field.alias or name}"
        yield key
        for inner in models_in(field.annotation):
            yield from keys_of(inner, f"{key}.")


def metrics() -> list[str]:
    return [one["name"] for one in json.loads(MEANINGS.read_text())]


SURFACE: dict[str, Callable[[], list[str]]] = {
    "routes": routes,
    "job keys": lambda: [*keys_of(Job)],
    "settings": lambda: [*Settings.model_fields],
    "commands": lambda: [*found_commands()],
    "metrics": metrics,
}


@pytest.mark.parametrize("what", SURFACE)
def test_what_users_depend_on_is_as_stored(what: str) -> None:
    assert sorted(set(SURFACE[what]())) == json.loads(STORED.read_text())[what]


if __name__ == "__main__":
    surface = {what: sorted(set(names())) for what, names in SURFACE.items()}
    STORED.write_text(json.dumps(surface, indent=1) + "\n")
