"""What programs of one API key may cost: what waits to be done has a quota, and all who wait for
one future have one watcher."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.app import create_service
from services.orchestrator.extensions.tinker import log as log_module
from services.orchestrator.extensions.tinker import models
from services.orchestrator.extensions.tinker.log import OperationLog, PendingQuota
from services.orchestrator.store.store import Store
from shared.errors import Busy
from shared.settings import Settings
from shared.wire import OperationOutcome, ProgramOperation
from tests.support import orchestrator_stack
from tests.support.in_process import in_process
from tests.support.model_folders import make_model_folder
from tests.support.own_keys import bearer, key_of, program, submitted, with_token

store = orchestrator_stack.store  # a fixture

STEP = {"adam_params": {"learning_rate": 0.1}}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return with_token(settings)


@pytest.fixture
async def http(settings: Settings, store: Store) -> AsyncGenerator[httpx.AsyncClient]:
    async with in_process(create_service(settings, store, works=False).app) as http:
        yield http


async def model_of(store: Store, settings: Settings, name: str, base: str = "owner/model") -> str:
    return await submitted(store, settings, key_of(name), program(base))


async def test_operations_that_wait_have_a_quota_by_key(
    http: httpx.AsyncClient, store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "MAX_PENDING", 2)
    alice, bob = bearer(settings, "alice"), bearer(settings, "bob")
    first = await model_of(store, settings, "alice")
    second = await model_of(store, settings, "alice")
    bobs = await model_of(store, settings, "bob")

    async def step(model: str, number: int, key: dict[str, str]) -> httpx.Response:
        body = {"model_id": model, "seq_id": number, **STEP}
        return await http.post("/api/v1/optim_step", json=body, headers=key)

    assert (await step(first, 1, alice)).status_code == 200
    assert (await step(first, 2, alice)).status_code == 200
    for model, number in ((first, 3), (second, 1)):
        refused = await step(model, number, alice)
        assert (refused.status_code, refused.json()["code"]) == (429, "busy"), refused.text
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["retry-after"] == "2"
        assert "2 operations and orders of samples wait to be done" in refused.json()["detail"]
    assert (await step(first, 2, alice)).status_code == 200, "it has come before"
    assert (await step(bobs, 1, bob)).status_code == 200
    OperationLog(settings.runs_dir / first).finish(1, OperationOutcome(step=1))
    monkeypatch.setattr(log_module, "QUOTA_RETRY_AFTER_S", 0)  # as if that time were over
    assert (await step(second, 1, alice)).status_code == 200


def test_bytes_that_wait_are_counted_also_of_an_earlier_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OperationLog(tmp_path)
    log.accept(1, ProgramOperation(kind="optim_step", digest="d" * 1000))
    on_disk = (tmp_path / "operations" / "00000001.msgpack").stat().st_size
    assert on_disk > 1000
    monkeypatch.setattr(log_module, "MAX_PENDING_BYTES", on_disk)
    full = PendingQuota()
    with pytest.raises(Busy, match=f"1 operations .* take {on_disk} bytes"):
        full.check("alice", log, "00000002")
    full.check("bob", OperationLog(tmp_path / "another"), "00000002")
    log.finish(1, OperationOutcome(step=1))
    with pytest.raises(Busy):  # thousands of files are not looked at for each request
        full.check("alice", log, "00000002")
    monkeypatch.setattr(log_module, "QUOTA_RETRY_AFTER_S", 0)
    full.check("alice", log, "00000002")


def test_a_key_whose_disk_is_slow_keeps_no_other_key_waiting(tmp_path: Path) -> None:
    reads, goes_on = threading.Event(), threading.Event()

    class SlowLog(OperationLog):
        def pending(self) -> Any:
            reads.set()
            goes_on.wait()
            return super().pending()

    full = PendingQuota()
    slow = threading.Thread(target=full.check, args=("alice", SlowLog(tmp_path / "a"), "00000001"))
    slow.start()
    reads.wait()
    bobs = threading.Thread(
        target=full.check, args=("bob", OperationLog(tmp_path / "b"), "00000001")
    )
    bobs.start()
    bobs.join(10)
    is_waiting = bobs.is_alive()
    goes_on.set()
    slow.join()
    assert not is_waiting


async def test_a_prompt_longer_than_the_model_is_refused(
    http: httpx.AsyncClient, store: Store, settings: Settings, tmp_path: Path
) -> None:
    alice, base = bearer(settings, "alice"), make_model_folder(tmp_path / "base", window=32)
    model = await model_of(store, settings, "alice", str(base))
    OperationLog(settings.runs_dir / model).open_session(
        "x" + "0" * 16, models.SamplingSession(own_weights=True)
    )

    async def sample(num_tokens: int, number: int) -> httpx.Response:
        body = {
            "sampling_session_id": f"{model}:x{'0' * 16}",
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * num_tokens}]},
        }
        return await http.post("/api/v1/asample", json=body, headers=alice)

    refused = await sample(32, 1)
    assert refused.status_code == 422, refused.text
    assert "the prompt has 32 tokens, and the model holds 32" in refused.json()["detail"]
    assert (await sample(31, 1)).status_code == 200


async def test_all_who_wait_for_one_future_have_one_watcher(
    http: httpx.AsyncClient, store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = bearer(settings, "alice")
    model = await model_of(store, settings, "alice")
    log = OperationLog(settings.runs_dir / model)
    log.accept(1, ProgramOperation(kind="optim_step", digest="d"))
    looks = 0
    look = models._operation_result

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(*given)

    monkeypatch.setattr(models, "_operation_result", counted)
    monkeypatch.setattr(models, "WAIT_S", 3.0)  # all must be asking before the first is answered
    monkeypatch.setattr(models, "MAX_WAITING", 20)

    async def ask() -> httpx.Response:
        asked = {"request_id": f"{model}:1"}
        return await http.post("/api/v1/retrieve_future", json=asked, headers=alice)

    answers = await asyncio.gather(*(ask() for _ in range(21)))
    assert sorted(answer.status_code for answer in answers) == [408] * 20 + [429]
    assert 1 <= looks <= 120  # 60 in three seconds by one watcher; 20 times as many by 20
    waiting = [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(0.2)
    log.finish(1, OperationOutcome(step=1, grad_norm=2.0))
    answers = await asyncio.gather(*waiting)
    assert [answer.json()["metrics"] for answer in answers] == [{"grad_norm:mean": 2.0}] * 3
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3


async def test_futures_of_one_key_are_looked_for_no_less_often_for_those_of_another(
    http: httpx.AsyncClient, store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MAX_LOOKS_PER_S", 20)
    keys = {name: bearer(settings, name) for name in ("alice", "bob")}
    ids = {name: await model_of(store, settings, name) for name in keys}
    logs = {name: OperationLog(settings.runs_dir / id) for name, id in ids.items()}
    looked, look = set[tuple[str, int]](), models._operation_result

    def noted(model_id: str, log: OperationLog, number: int) -> Any:
        found = look(model_id, log, number)
        looked.add((model_id, number))
        return found

    monkeypatch.setattr(models, "_operation_result", noted)

    async def ask(name: str, number: int) -> httpx.Response:
        logs[name].accept(number, ProgramOperation(kind="optim_step", digest="d"))
        asked = {"request_id": f"{ids[name]}:{number}"}
        return await http.post("/api/v1/retrieve_future", json=asked, headers=keys[name])

    waiting = [asyncio.create_task(ask("alice", number)) for number in range(1, 101)]
    async with asyncio.timeout(60):
        while len(looked) < 100:
            await asyncio.sleep(0.02)
        bobs = asyncio.create_task(ask("bob", 1))
        while len(looked) < 101:
            await asyncio.sleep(0.02)
    logs["bob"].finish(1, OperationOutcome(step=1))
    assert (await asyncio.wait_for(bobs, 2)).status_code == 200  # else it takes 5 s
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_number_that_no_operation_can_have_is_refused(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    alice = bearer(settings, "alice")
    model = await model_of(store, settings, "alice")
    for number in ("1" + "0" * 250, "100000000", "0", "1.5", "true"):
        body = f'{{"model_id": "{model}", "seq_id": {number}, "adam_params": {{}}}}'
        refused = await http.post("/api/v1/optim_step", content=body.encode(), headers=alice)
        assert (refused.status_code, refused.json()["code"]) == (422, "bad_request"), refused.text
