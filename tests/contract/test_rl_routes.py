"""vLLM's routes that TRL's clients call, over HTTP: the real app, an engine at the `Engine`
seam. None of them touches a job's sampler."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx import Response
from pydantic import BaseModel

from shared.errors import BadRequest
from shared.http.ownership import HEADER
from shared.wire import AbortRequest, ModelRequest, ServingWeights
from tests.contract.test_rollout_adapters import SPEC, Bench, held, until_held
from tests.support.rollout_bench import RolloutBench

BASE: dict[str, Any] = dict(Bench.base)
OWNER = {HEADER: "redis1 host:8000 job"}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    async with bench.client:
        await bench.put(SPEC)
        yield bench


async def post(bench: RolloutBench, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    answer = await bench.raw("POST", path, **({} if body is None else {"json": body}))
    return answer.status_code, answer.json()


async def of_job(bench: Bench, method: str, path: str, body: BaseModel) -> Response:
    headers = {**OWNER, "content-type": "application/json"}
    return await bench.raw(method, path, content=body.model_dump_json(), headers=headers)


async def test_nothing_is_changed_while_a_job_has_the_sampler(bench: Bench) -> None:
    ref = bench.publish(3, **BASE)
    loaded = await of_job(bench, "POST", "/reload_weights", ref)
    assert loaded.status_code == 200, loaded.text
    bodies: dict[str, Any] = {
        "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": str(bench.runs)},
        "/v1/unload_lora_adapter": {"lora_name": "a"},
    }
    paths = [path for path in bench.service.app.openapi()["paths"] if path not in OURS]
    before = list(bench.engine.calls)
    for path in paths:
        status, answer = await post(bench, path, bodies.get(path, {}))
        assert (path, status, answer["code"]) == (path, 409, "taken")
        assert answer["detail"].startswith("the sampler has job 'job' of the orchestrator at host")
    assert len(paths) == 5 and bench.engine.calls == before
    put = await bench.raw("PUT", "/model", json={"model": "other"})
    assert (put.status_code, put.json()["code"], len(bench.engines)) == (409, "taken", 1)
    await of_job(bench, "POST", "/abort", AbortRequest(job_id="job"))
    assert (await post(bench, "/pause"))[0] == 200


OURS = {
    *("/generate", "/abort", "/model", "/reload_weights", "/weights/check", "/weights"),
    *("/health", "/healthz", "/readyz", "/version", "/metrics", "/sleep"),
    *("/operations/{id}", "/operations/wait"),
}
"""Routes that are Hone's, or change nothing."""


async def test_an_adapter_is_called_by_its_name_beside_what_serves(bench: Bench) -> None:
    await bench.reload(ref := bench.publish_adapter(3))
    await bench.abort()
    for name in ("policy-v1", "policy-v2", "policy-v3"):
        body = {"lora_name": name, "lora_path": ref.path, "load_inplace": False}
        assert (await post(bench, "/v1/load_lora_adapter", body))[0] == 200
    await until_held(bench, "job/v3-0.0", "policy-v3")
    assert (await bench.generate()).rollouts[0].text == "job/v3-0.0"
    drop = {"lora_name": "policy-v3"}
    assert (await post(bench, "/v1/unload_lora_adapter", drop))[0] == 200
    await until_held(bench, "job/v3-0.0")
    assert (await post(bench, "/v1/unload_lora_adapter", drop))[0] == 404
    assert bench.sampler.serving.version == 3


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("tiny", None, "expected a printable name without '#' that is not the model's"),
        ("a\x1b[2J", None, "expected a printable name without '#'"),
        ("job", None, "'job' is the adapter of a job; expected another name"),
        ("a", '{"r": 8, "target_modules": ["w"]}', "has rank 8, expected at most 4"),
        ("a", "{}", "adapter_config.json cannot be used"),
    ],
)
async def test_an_adapter_that_cannot_be_called_or_loaded_is_refused(
    bench: Bench, name: str, config: str | None, sentence: str
) -> None:
    await bench.reload(bench.publish_adapter(3))
    await bench.abort()
    own: dict[str, Any] = {"config": config} if config else {}
    given = bench.publish_adapter(9, "theirs", **own)
    body = {"lora_name": name, "lora_path": given.path}
    status, answer = await post(bench, "/v1/load_lora_adapter", body)
    assert (status, sentence in answer["detail"]) == (422, True), answer["detail"]
    assert held(bench) == ["job/v3-0.0"]
    assert len(list((bench.copies / "adapters").iterdir())) == 1


async def test_a_job_ends_a_pause_that_another_trainer_left(bench: Bench) -> None:
    job = ModelRequest(**SPEC.model_dump(exclude={"job_id"}), job_id="job")
    assert (await post(bench, "/pause"))[0] == 200
    await bench.put(job)
    assert bench.engine.calls == ["pause", "resume"] and (await bench.generate()).rollouts


async def test_parameters_are_vllms_and_others_are_refused(bench: Bench) -> None:
    paused = {"paused": True, "status": "paused"}
    assert (await post(bench, "/pause?mode=keep")) == (200, paused)
    assert (await post(bench, "/resume"))[1] == {"paused": False, "status": "resumed"}
    assert (await post(bench, "/reset_prefix_cache"))[1] == {"success": True}
    assert bench.engine.calls == ["pause", "resume", "reset cache"]
    for path, body, sentence in (
        ("/pause?mode=abort", None, "input should be 'keep'"),
        ("/pause?moed=keep", None, "did you mean 'mode'?"),
        ("/pause?mode=keep", {"mode": "keep"}, "expected a body or query parameters, not both"),
    ):
        status, answer = await post(bench, path, body)
        assert (status, sentence in answer["detail"]) == (422, True), answer["detail"]
    page = await bench.raw("POST", "/pause", headers={"origin": "https://example.org"})
    assert (page.status_code, bench.engine.calls[-1]) == (403, "reset cache")


async def test_a_client_without_tokens_gives_the_token_in_its_url(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path, token="open-sesame:1")
    for password, status in (("open-sesame:1", 409), ("open", 401), ("", 401)):
        basic = base64.b64encode(f"hone:{password}".encode()).decode()
        for value in (f"Basic {basic}", f"Basic {basic}!"):
            answer = await bench.raw("POST", "/resume", headers={"authorization": value})
            assert answer.status_code == (401 if value.endswith("!") else status)
    assert json.loads((await bench.raw("GET", "/health")).text)["status"] == "ok"


async def test_a_job_that_comes_back_ends_a_pause_that_was_made_while_it_was_silent(
    bench: Bench,
) -> None:
    ref, clock = bench.publish(3, **BASE), [100.0]
    bench.sampler.ownership._now = lambda: clock[0]  # pyright: ignore[reportPrivateUsage]
    assert (await of_job(bench, "POST", "/reload_weights", ref)).status_code == 200
    clock[0] += 61
    assert (await post(bench, "/pause"))[0] == 200
    assert bench.engine.calls[-1] == "pause"
    assert (await of_job(bench, "POST", "/reload_weights", ref)).status_code == 200
    assert bench.engine.calls[-2:] == ["pause", "resume"]


async def test_a_sleep_that_the_settings_refuse_changes_nothing(bench: Bench) -> None:
    await bench.reload(bench.publish_adapter(3))
    bench.engine.fail_sleep = BadRequest("the sampler cannot free its memory")
    assert (await post(bench, "/sleep", {"job_id": "job"}))[0] == 422
    assert (await bench.client.get("/weights", ServingWeights)).version == 3
    assert held(bench) == ["job/v3-0.0"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
async def test_what_is_no_regular_file_is_never_opened(bench: Bench, kind: str) -> None:
    await bench.put(SPEC.model_copy(update={"max_lora_rank": 4}))
    for name in ("model.safetensors", "adapter_model.safetensors"):
        folder = Path(bench.publish_adapter(len(name)).path)
        (folder / "adapter_model.safetensors").unlink()
        if kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero")
        adapter = {"lora_name": "a", "lora_path": str(folder)}
        posted = post(bench, "/v1/load_lora_adapter", adapter)
        status, answer = await asyncio.wait_for(posted, 5)
        assert status == 422 and str(folder) in answer["detail"], name
    assert not any((bench.copies / "adapters").iterdir())


async def test_of_an_adapters_folder_only_its_two_files_are_copied(bench: Bench) -> None:
    folder = Path(bench.publish_adapter(3).path)
    (folder / "loop").symlink_to(folder)
    (folder / "notes").write_text("anything")
    body = {"lora_name": "a", "lora_path": str(folder)}
    assert (await post(bench, "/v1/load_lora_adapter", body))[0] == 200
    (copy,) = (bench.copies / "adapters").iterdir()
    assert {file.name for file in copy.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


async def test_a_jobs_adapter_takes_its_name_from_an_adapter_by_hand(bench: Bench) -> None:
    ref = bench.publish_adapter(4)
    body = {"lora_name": ref.adapter, "lora_path": ref.path}
    assert (await post(bench, "/v1/load_lora_adapter", body))[0] == 200
    await bench.reload(ref)
    adapters = bench.sampler.running and bench.sampler.running.adapters
    assert adapters and adapters.find(ref.adapter) == adapters.find("job")
