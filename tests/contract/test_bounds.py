"""One request costs no one else: bodies have bounds, and reading them takes little time."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import Request
from pydantic import BaseModel, SecretStr, ValidationError

from services.orchestrator.app import LARGER_WEIGHT, WEIGHT, create_service, most_bytes
from services.orchestrator.extensions.pushed import groups
from services.orchestrator.store.store import Store
from shared.errors import BadRequest
from shared.http import codec
from shared.http.operations import unless_gone
from shared.http.service import Service
from shared.job import Job
from shared.job.checks import check as check_sections
from shared.settings import Settings
from shared.wire import (
    ChatRequest,
    CreateKey,
    EpisodeResult,
    LeaseEpisodes,
    NoBody,
    PushedGroup,
    RegradeRequest,
    ResumeRequest,
    ScoredData,
    ScoredDataList,
    SubmitRequest,
    WithdrawRequest,
)
from tests.support import orchestrator_stack
from tests.support.in_process import in_process

ROOT = {"authorization": "Bearer root-token-of-the-stack"}
MIB = 1 << 20
JOB: dict[str, Any] = {
    "name": "demo",
    "model": "owner/model",
    "steps": 1,
    "data": {"train": "rows.jsonl"},
    "rewards": [{"grader": "length"}],
}

store = orchestrator_stack.store  # a fixture


@pytest.fixture
async def http(settings: Settings, store: Store) -> AsyncGenerator[httpx.AsyncClient]:
    settings.runs_dir.mkdir(parents=True, exist_ok=True)
    token = SecretStr("root-token-of-the-stack")
    own = settings.model_copy(update={"token": token})
    async with in_process(create_service(own, store, works=False).app) as http:
        http.headers.update(ROOT)
        yield http


def unbounded(model: type[BaseModel]) -> list[str]:
    """Returns the places of lists, tables and texts of a body that may be of any length."""
    schema = model.model_json_schema()
    found: dict[str, None] = {}

    def walk(part: dict[str, Any], at: str, above: frozenset[str]) -> None:
        if reference := part.get("$ref"):
            name = reference.rpartition("/")[2]
            if name not in above:
                walk(schema["$defs"][name], at, above | {name})
            return
        for other in (*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("prefixItems", ())):
            walk(other, at, above)
        bounds = {"string": {"maxLength", "enum", "const", "pattern"}, "array": {"maxItems"}}
        inside = part.get("additionalProperties")
        if inside or (part.get("type") == "object" and "properties" not in part):
            bounds["object"] = {"maxProperties"}
        if (kind := part.get("type")) in bounds and not bounds[kind] & part.keys():
            found[at] = None
        for name, each in part.get("properties", {}).items():
            walk(each, f"{at}.{name}", above)
        for name, each in (("[]", part.get("items")), ("{}", inside)):
            if isinstance(each, dict):
                walk(each, at + name, above)

    walk(schema, model.__name__, frozenset())
    return [*found]


@pytest.mark.parametrize(
    "model",
    [
        *(SubmitRequest, ResumeRequest, WithdrawRequest, CreateKey),
        *(RegradeRequest, LeaseEpisodes, EpisodeResult),
    ],
)
def test_each_list_table_and_text_of_a_body_has_a_maximum(model: type[BaseModel]) -> None:
    assert unbounded(model) == []


GROUP = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}


@pytest.mark.parametrize(
    ("model", "body", "most"),
    [
        (ScoredDataList, lambda size: [GROUP] * size, 1024),
        (ScoredData, lambda size: {name: each * size for name, each in GROUP.items()}, 1024),
        (
            PushedGroup,
            lambda size: {
                "prompt": [{"role": "user", "content": "hi"}] * size,
                "rollouts": [{"token_ids": [1], "reward": 1.0}],
            },
            10_000,
        ),
        (ChatRequest, lambda size: {"messages": [{"role": "user", "content": ""}] * size}, 10_000),
    ],
)
def test_groups_and_conversations_have_a_largest_size(
    model: type[BaseModel], body: Callable[[int], Any], most: int
) -> None:
    codec.decode(model, json.dumps(body(most)).encode())
    with pytest.raises(BadRequest, match=f"{most:d}"):
        codec.decode(model, json.dumps(body(most + 1)).encode())


def test_thousands_of_rewards_are_refused_at_once() -> None:
    many = [{"grader": "length", "name": f"r{number}"} for number in range(30_000)]
    with pytest.raises(BadRequest, match="rewards"):
        codec.decode(SubmitRequest, json.dumps({"job": JOB | {"rewards": many}}).encode())
    most = [{"grader": "length", "name": f"r{number}"} for number in range(64)]
    assert len(Job.model_validate(JOB | {"rewards": most}).rewards) == 64
    with pytest.raises(ValidationError, match="two rewards are called 'r0'"):
        Job.model_validate(JOB | {"rewards": [*most[:63], most[0]]})


def test_the_checks_of_a_job_take_time_in_proportion() -> None:
    job = Job.model_validate(JOB)
    (reward,) = job.rewards
    rewards = tuple(reward.model_copy(update={"name": f"r{n}"}) for n in range(20_000))
    start = time.process_time()
    check_sections(job.model_copy(update={"rewards": rewards}))
    assert time.process_time() - start < 2  # 10 s if each is compared with each


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/plan", "/v1/jobs/demo-1/resume"])
async def test_a_body_of_more_than_a_mebibyte_is_not_read(
    http: httpx.AsyncClient, path: str
) -> None:
    is_read = False

    async def body() -> AsyncGenerator[bytes]:
        nonlocal is_read
        for _ in range(17):
            yield b" " * (MIB // 16)
        is_read = True
        yield b" " * MIB

    kind = {"content-type": "application/json"}
    refused = await http.post(path, content=b" " * (MIB + 1), headers=kind)
    assert refused.status_code == 413, refused.text
    assert f"body of {MIB + 1} bytes; at most {MIB} are taken at {path}" in refused.text
    refused = await http.post(path, content=body(), headers=kind)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert not is_read


def test_routes_of_data_take_larger_bodies() -> None:
    assert most_bytes("/v1/jobs/demo-1/groups") > most_bytes("/api/v1/asample") == 8 * MIB
    assert most_bytes("/sessions/a/v1/chat/completions") > 16 * MIB  # which it bounds itself
    assert most_bytes("/api/v1/create_model") == most_bytes("/v1/keys") == MIB


@pytest.mark.parametrize(
    ("path", "most_bytes", "kind"),
    [
        ("/v1/jobs/plan", MIB, codec.JSON),
        ("/operations/wait", MIB, codec.JSON),
        ("/api/v1/optim_step", MIB, codec.MSGPACK),
        ("/api/v1/asample", 8 * MIB, codec.JSON),
        ("/v1/jobs/demo-1/groups", 8 * MIB, codec.JSON),
        ("/v1/jobs/demo-1/atropos/scored_data", 8 * MIB, codec.MSGPACK),
        ("/v1/chat/completions", 8 * MIB, codec.MSGPACK),
    ],
)
async def test_json_that_takes_long_to_read_is_refused_before(
    http: httpx.AsyncClient, path: str, most_bytes: int, kind: str
) -> None:
    """While it is read as JSON, nothing else in the process goes on: 8 MiB of "[]," take 6 s."""
    for value in (b"1", b"[]", b"{}")[: 1 if most_bytes > MIB else 3]:
        values = b",".join([value] * ((most_bytes - 100) // (len(value) + 1)))
        body = b'{"rollouts": [' + values + b"]}"
        refused = await http.post(path, content=body, headers={"content-type": kind})
        assert (refused.status_code, refused.json()["code"]) == (413, "too_large"), refused.text
        assert "numbers, lists and tables" in refused.json()["detail"]


@pytest.mark.parametrize("value", [b"1", b"[]", b"{}"])
async def test_json_of_an_environment_is_weighed_once_it_is_unpacked(
    http: httpx.AsyncClient, value: bytes
) -> None:
    body = b'{"tokens": [' + b",".join([value] * 3_000_000) + b"]}"
    headers = {"content-type": codec.JSON, "content-encoding": "gzip"}
    path = "/v1/jobs/demo-1/atropos/scored_data"
    refused = await http.post(path, content=gzip.compress(body, 1), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large"), refused.text
    body = b'{"images": "' + b" " * groups.MAX_BODY_BYTES
    refused = await http.post(path, content=gzip.compress(body, 1), headers=headers)
    assert refused.status_code == 413, refused.text


@pytest.mark.parametrize("value", [b"\x90", b"\x80", b"\x01"])
async def test_msgpack_that_takes_long_to_read_is_refused(
    http: httpx.AsyncClient, value: bytes
) -> None:
    num = 300_000
    body = b"\x81\xa3ids\xdd" + num.to_bytes(4, "big") + value * num
    headers = {"content-type": codec.MSGPACK}
    refused = await http.post("/operations/wait", content=body, headers=headers)
    assert refused.status_code in (413, 422), refused.text
    assert "262144" in refused.json()["detail"]


def test_groups_of_usual_sizes_are_no_more_than_that() -> None:
    completion = "def f(x):\n    return {y: [y, x[0]] for y in x}, [x]\n" * 100
    messages = [{"role": "user", "content": completion}] * 6
    tokens = [[1] * 16_384] * 16
    data = {"tokens": tokens, "masks": tokens, "inference_logprobs": tokens}
    body = json.dumps(data | {"scores": [1.0] * 16, "messages": [messages] * 16}).encode()
    assert codec.json_weight(body) < LARGER_WEIGHT
    rows = [{"prompt": completion[:150], "answer": [1, 2]}] * 1000
    assert codec.json_weight(json.dumps(rows).encode()) < WEIGHT


NOT_TAKEN = [
    ("resume", b'{"set": ["a=\\ud800"]}', "surrogate"),
    ("resume", b'{"set": ["\\ud800"]}', "surrogate"),
    ("regrade", b'{"first_step": ' + b"9" * 250 + b"}", "beyond 64 bits"),
]


@pytest.mark.parametrize(("route", "body", "why"), NOT_TAKEN)
async def test_what_utf_8_and_64_bits_lack_is_refused_on_reading(
    http: httpx.AsyncClient, route: str, body: bytes, why: str
) -> None:
    kind = {"content-type": "application/json"}
    refused = await http.post(f"/v1/jobs/demo-1/{route}", content=body, headers=kind)
    assert refused.status_code == 422, refused.text
    assert why in refused.json()["detail"]


@pytest.mark.parametrize("text", ["\\ud800", "a\\uDC00"])
async def test_tinkers_requests_hold_text(http: httpx.AsyncClient, text: str) -> None:
    for body in (
        f'{{"session_id": "{text}", "model_seq_id": 0, "base_model": "m"}}',
        f'{{"session_id": "s", "model_seq_id": 0, "base_model": "m", "{text}": 1}}',
    ):
        refused = await http.post("/api/v1/create_model", content=body.encode())
        assert refused.status_code == 422, refused.text
        assert "half of a surrogate pair; expected text that UTF-8 has" in refused.json()["detail"]


def test_long_numbers_are_told_from_long_fractions() -> None:
    assert codec.read_json(b'{"a": 9223372036854775807, "b": 0.12345678901234567890123}') == {
        "a": 9223372036854775807,
        "b": 0.12345678901234568,
    }
    for wrong in (b"9223372036854775808", b"-1" + b"0" * 4000, b"[NaN]", b'"\\ud800"', b"{"):
        with pytest.raises(ValueError, match=r"."):
            codec.read_json(wrong)
    job = JOB | {"metadata": {"id": "9" * 30}, "seed": 2**63 - 1}
    assert codec.decode(SubmitRequest, json.dumps({"job": job}).encode()).job.seed == 2**63 - 1
    with pytest.raises(BadRequest, match="beyond 64 bits"):
        codec.decode(SubmitRequest, json.dumps({"job": JOB | {"seed": 2**63}}).encode())


async def test_a_bug_in_any_route_is_a_problem_document(settings: Settings) -> None:
    service = Service("trainer", settings)

    @service.app.get("/broken")
    async def broken() -> NoBody:
        raise ZeroDivisionError("of a route")

    async with in_process(service.app) as http:
        answer = await http.get("/broken")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "bug"
    assert answer.json()["detail"] == (
        "GET /broken: internal error (ZeroDivisionError); the service's log has the traceback, "
        "under this answer's x-request-id"
    )
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/nothing", {"body": b'{"a', "more_body": True}),
        ("/waiting", {"body": b"{}", "more_body": False}),
    ],
    ids=["in its body", "while it waits"],
)
async def test_a_client_that_disconnects_is_an_expected_end(
    settings: Settings, capsys: pytest.CaptureFixture[str], path: str, body: dict[str, Any]
) -> None:
    service = Service("trainer", settings)

    async def nothing(_: NoBody) -> NoBody:
        return NoBody()

    @service.app.post("/waiting")
    async def wait(request: Request) -> None:
        await request.body()
        await unless_gone(asyncio.sleep(60), request)

    service.operation("POST", "/nothing", nothing)
    messages = iter([{"type": "http.request", **body}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await service.app(scope, receive, send)
    assert sent == []
    counted = service.registry.get_sample_value(
        "hone_http_requests_total", {"method": "POST", "path": path, "status": "499"}
    )
    assert counted == 1
    assert "Traceback" not in capsys.readouterr().out


async def test_large_bodies_are_read_beside_the_loop(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading waits for the loop, which it could not if it ran in it."""
    service = Service("trainer", settings)
    loop, decode = asyncio.get_running_loop(), codec.decode

    def slow(*given: Any) -> Any:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
        return decode(*given)

    async def nothing(_: NoBody) -> NoBody:
        return NoBody()

    service.operation("POST", "/nothing", nothing)
    monkeypatch.setattr(codec, "decode", slow)
    kind = {"content-type": "application/json"}
    async with in_process(service.app) as http:
        content = b"{" + b" " * (65 << 10) + b"}"
        answer = await asyncio.wait_for(http.post("/nothing", content=content, headers=kind), 20)
    assert answer.status_code == 200
