"""A bound on what waits, and clients that go away: a service as a process, asked from outside."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.reward_service import RunningService, running_service


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service(
        constants={
            "services.reward.grading.scoring.MAX_QUEUED_COMPLETIONS": 4,
            "services.reward.app.MAX_QUEUED_PROGRAMS": 2,
        },
        HONE_SANDBOX_SLOTS="1",
        HONE_MAX_BODY_MIB="1",
    ) as service:
        yield service


def connected(
    service: RunningService, path: str, body: dict[str, Any], **headers: str
) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=60)
    connection.request(
        "POST", path, json.dumps(body), {"content-type": "application/json"} | headers
    )
    return connection


def programs(*codes: str, timeout_s: float = 10.0) -> dict[str, Any]:
    items = [{"prompt": "", "completion": code, "row": {"target": 1}} for code in codes]
    params = {"timeout_s": timeout_s}
    return {
        "items": items,
        "rewards": [
            {"grader": "python_value", "params": params},
            {"grader": "length", "params": {"max": 99}},
        ],
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/execute", {"code": "while True: pass", "timeout_s": 60, "cpu_s": 60}),
        ("/score", programs("while True: pass\n1", timeout_s=30)),
    ],
    ids=["execute", "score"],
)
def test_work_ends_with_the_client_that_waited_for_it(
    service: RunningService, path: str, body: dict[str, Any]
) -> None:
    connection = connected(service, path, body)
    time.sleep(0.3)
    connection.close()
    start = time.monotonic()
    assert service.post("/execute", {"expression": "6 * 7"})["value"] == 42, (
        "the only sandbox is free again"
    )
    assert time.monotonic() - start < 10


def test_work_with_a_key_continues_without_its_client(service: RunningService) -> None:
    body = {"code": "import os, time\ntime.sleep(0.5)", "expression": "os.urandom(8).hex()"}
    connection = connected(service, "/execute", body, **{"idempotency-key": "later"})
    time.sleep(0.3)
    connection.close()
    first = service.post("/execute", body, idempotency_key="later")
    assert first["verdict"] == "ok"
    assert service.post("/execute", body, idempotency_key="later") == first


def test_a_body_that_does_not_say_how_long_it_is_is_bounded_too(service: RunningService) -> None:
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=60)
    chunks = (b'{"code": "' if not number else b"#" * 65536 for number in range(20))
    connection.request(
        "POST", "/execute", chunks, {"content-type": "application/json"}, encode_chunked=True
    )
    response = connection.getresponse()
    assert (response.status, json.load(response)["detail"][:40]) == (
        422,
        "body of more than 1048576 bytes; at most",
    )


def test_more_than_may_wait_is_told_to_come_back(service: RunningService) -> None:
    waiting = connected(service, "/score", programs("import time\ntime.sleep(1)\n1", "1", "1"))
    time.sleep(0.4)
    refused = connected(service, "/score", programs("1", "1"))
    response = refused.getresponse()
    problem = json.load(response)
    assert (response.status, response.getheader("retry-after"), problem["type"]) == (
        429,
        "1",
        "urn:hone:busy",
    )
    assert problem["detail"] == "3 completions wait or run and 2 more were sent; at most 4 may"
    assert json.load(waiting.getresponse())["scores"][0]["value"] == 2.0
    assert service.post("/score", programs("1", "1"))["scores"][1]["value"] == 2.0
    assert len(service.post("/score", programs(*("1" * 9)))["scores"]) == 9, (
        "alone, a request may have any size"
    )


def test_programs_are_bounded_too(service: RunningService) -> None:
    answers: list[dict[str, Any]] = []
    body = {"code": "import time\ntime.sleep(0.5)", "expression": "1"}
    threads = [
        threading.Thread(target=lambda: answers.append(service.post("/execute", body)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        sorted(
            answer.get("verdict") or answer["status"] for answer in answers if "verdict" in answer
        )
        == ["ok"] * 2
    )
    assert {answer["status"] for answer in answers if "status" in answer} == {429}
