"""Requests of all kinds, made by schemathesis from a service's own OpenAPI document, and what is
wrong with their answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi import checks

from shared.http.service import Service

CHECKS: Any = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
TIMEOUT_S = 60.0
"""Much more than any of them takes, also where the machine is busy."""

UNPROVEN = ("digest_differs", "disk_full", "not_seen", "tensors_differ")
"""Codes of errors (500) that are the right answer to weights that were made up, of any size."""


@dataclass
class Fuzzed:
    """A service at `url`. In half of the requests a path parameter is one of `known`, by its name;
    `adjust` changes a request before it is sent, and `after` is called with what was answered.
    What `needs_others` may be answered with 503, for those others are not there."""

    service: Service
    url: str
    known: Mapping[str, Sequence[str]] = field(default_factory=dict)
    adjust: Callable[[Any], None] = lambda _: None
    after: Callable[[Any, Any], None] = lambda _case, _answer: None
    needs_others: frozenset[str] = frozenset()


@dataclass
class Findings:
    """How many requests were answered with each status, and each kind of fault once."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)


def fuzz(fuzzed: Fuzzed, num_cases: int) -> Findings:
    """Sends `num_cases` requests, as many that fit the document as that do not, always the same
    ones, and returns what came of them."""
    schema = schemathesis.openapi.from_dict(fuzzed.service.app.openapi())
    cases = strategies.one_of(
        schema.as_strategy(GenerationMode.POSITIVE), schema.as_strategy(GenerationMode.NEGATIVE)
    )
    findings = Findings()
    rng = random.Random(0)

    with requests.Session() as session:

        @hypothesis.seed(0)
        @hypothesis.settings(
            max_examples=num_cases,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=cases)
        def send(case: Any) -> None:
            for name, values in fuzzed.known.items():
                if values and name in (case.path_parameters or {}) and rng.random() < 0.5:
                    case.path_parameters[name] = rng.choice(values)
            fuzzed.adjust(case)
            _note(findings, fuzzed, case, session)

        send()
    return findings


def _note(findings: Findings, fuzzed: Fuzzed, case: Any, session: requests.Session) -> None:
    label = f"{case.method} {case.path}"
    try:
        answer = case.call(base_url=fuzzed.url, session=session, timeout=TIMEOUT_S)
        findings.statuses[answer.status_code] += 1
        away = answer.status_code == 503 and label in fuzzed.needs_others
        right = away or (answer.status_code == 500 and answer.json()["code"] in UNPROVEN)
        case.validate_response(answer, checks=CHECKS[1:] if right else CHECKS)
        fuzzed.after(case, answer)
    except FailureGroup as group:
        for failure in group.exceptions:
            assert isinstance(failure, Failure)
            kind = f"{label} {answer.status_code} {failure.title}"
            findings.faults.setdefault(
                kind, f"{failure.message}\n{answer.text[:600]}\n{_shown(case)}"
            )
    except requests.RequestException as error:
        findings.faults.setdefault(f"{label} {type(error).__name__}", f"{error}\n{_shown(case)}")


def _shown(case: Any) -> str:
    return f"{case.path_parameters} {case.query} {case.body!r:.1500}"
