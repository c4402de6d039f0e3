"""Errors keep their class and their code over the wire, and what a proxy answers is told apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shared.errors import (
    CODES,
    KINDS,
    Busy,
    Conflict,
    Failed,
    HoneError,
    NotFound,
    StateLost,
    TooLarge,
    Unavailable,
    from_problem,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_document_becomes_the_same_class_and_code(kind: type[HoneError]) -> None:
    sent = kind("got 7, expected 6", code="stale", errors=[{"pointer": "/step", "detail": "7"}])
    document = sent.problem()
    got = from_problem(kind.status, document, "trainer")
    assert (type(got), got.code, got.detail, got.errors) == (
        kind,
        "stale",
        sent.detail,
        sent.errors,
    )
    assert document["error"]["code"] == document["code"] == "stale"


def test_lost_state_and_a_conflict_share_the_status_and_not_the_type() -> None:
    lost = StateLost("no model is loaded").problem()
    conflict = Conflict("got step 7, expected 6").problem()
    assert lost["status"] == conflict["status"] == 409
    assert (lost["type"], conflict["type"]) == ("urn:hone:state-lost", "urn:hone:conflict")
    assert not isinstance(from_problem(409, lost, "rollout"), Conflict)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("document", [None, {"message": "Internal server error"}])
def test_a_5xx_without_a_problem_document_is_unavailable(
    status: int, document: dict[str, str] | None
) -> None:
    error = from_problem(status, document, "trainer at http://trainer:8002")
    assert type(error) is Unavailable and error.code == "unreachable"
    assert error.detail == f"trainer at http://trainer:8002 answered {status} without saying why"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, NotFound), (409, Conflict), (413, TooLarge), (429, Busy), (501, Failed)],
)
def test_other_responses_without_a_document_are_of_their_status(
    status: int, kind: type[HoneError]
) -> None:
    assert type(from_problem(status, None, "x")) is kind


def test_a_type_that_is_not_known_is_of_its_status() -> None:
    document = {"type": "urn:hone:of-a-newer-version", "code": "new", "detail": "broken"}
    error = from_problem(500, document, "x")
    assert type(error) is Failed and error.code == "new"


def test_every_code_that_is_raised_is_listed_with_its_meaning() -> None:
    names = {kind.__name__ for kind in KINDS}
    raised = {
        keyword.value.value
        for folder in ("shared", "services", "hone")
        for file in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in names
        for keyword in call.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }
    known = {code for code in raised if isinstance(code, str)}
    assert known <= CODES.keys()
    assert {kind.default_code for kind in KINDS} <= CODES.keys()
