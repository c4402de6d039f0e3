"""The OpenAPI document of each service: complete, and every reference in it resolves."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from starlette.routing import Route

from services.orchestrator.app import create_service as create_orchestrator
from services.orchestrator.store.store import Store
from services.reward.app import create_service as create_reward
from services.rollout.app import create_service as create_rollout
from services.rollout.sampler import Sampler
from services.trainer.app import create_service as create_trainer
from shared import wire
from shared.errors import KINDS, HoneError
from shared.http.rendering import Problem
from shared.http.service import Service
from shared.settings import Settings

pytestmark = pytest.mark.slow

unused = cast(Any, None)
SERVICES: dict[str, Callable[[Settings], Service]] = {
    "orchestrator": lambda settings: create_orchestrator(settings, Store("redis://127.0.0.1:1")),
    "rollout": lambda settings: create_rollout(settings, Sampler(unused, (), unused)),
    "trainer": lambda settings: create_trainer(settings, unused, unused, {}),
    "reward": lambda settings: create_reward(settings.model_copy(update={"sandbox": "unsafe"})),
}
BODIES = {
    "orchestrator": {("/v1/jobs", "post"): "SubmitRequest"},
    "rollout": {("/generate", "post"): "GenerateRequest", ("/model", "put"): "ModelRequest"},
    "trainer": {("/job", "put"): "TrainerJob", ("/train_step", "post"): "TrainStepRequest"},
    "reward": {("/score", "post"): "ScoreRequest"},
}


@functools.cache
def document_of(name: str) -> dict[str, Any]:
    return SERVICES[name](Settings()).app.openapi()


@pytest.fixture(params=SERVICES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def document(name: str) -> dict[str, Any]:
    return document_of(name)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        mapping = node.get("discriminator", {}).get("mapping", {})
        yield from mapping.values()
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_no_two_handlers_have_one_method_and_path(name: str, settings: Settings) -> None:
    served = Counter(
        (method, route.path)
        for route in SERVICES[name](settings).app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    )
    assert [each for each, count in served.items() if count > 1] == []
    assert served


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert found
    for reference in found:
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            assert part in node, reference
            node = node[part]


def test_every_body_is_a_component(name: str, document: dict[str, Any]) -> None:
    for (path, method), model in BODIES[name].items():
        content = document["paths"][path][method]["requestBody"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{model}"}
    assert "$defs" not in repr(document)


def test_every_error_is_a_problem_document(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        for kind in KINDS:
            content = operation["responses"][str(kind.status)]["content"]
            schema = content["application/problem+json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}, name
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_examples_of_a_body_are_valid(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        for example in schema.get("examples", ()):
            getattr(wire, name).model_validate(example)


def test_examples_are_of_the_bodies_that_people_send() -> None:
    found = {
        name
        for service in SERVICES
        for name, schema in document_of(service)["components"]["schemas"].items()
        if "examples" in schema
    }
    assert found == {"SubmitRequest", "PushedGroup", "ScoreRequest", "GenerateRequest"}


def test_a_query_says_what_it_answers() -> None:
    paths = document_of("trainer")["paths"]
    answer = paths["/state"]["get"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"] == {"$ref": "#/components/schemas/TrainerState"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_is_as_documented(kind: type[HoneError]) -> None:
    document = kind("x", errors=[{"pointer": "/a", "detail": "b"}]).problem()
    assert Problem.model_validate(document).model_dump(mode="json") == document
