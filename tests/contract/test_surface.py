"""What users depend on: routes, keys of a job, settings, commands and metrics. A change of any is a
change of tests/data/surface.json: `python -m tests.contract.test_surface` writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from hone.cli import find_commands as found_commands
from shared.job import Job
from shared.settings import Settings
from tests.contract.test_openapi import SERVICES, document_of

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests/data/surface.json"
MEANINGS = ROOT / "services/orchestrator/extensions/page/meanings.json"


def routes() -> list[str]:
    """Returns the routes in the OpenAPI documents, as "orchestrator POST /v1/jobs"."""
    return [
        f"{name} {method.upper()} {path}"
        for name in SERVICES
        for path, methods in document_of(name)["paths"].items()
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
