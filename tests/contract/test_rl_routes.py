"""vLLM's routes for other trainers than Hone's, over HTTP: the real app, an engine at the `Engine`
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
from safetensors.numpy import save_file

from shared.errors import BadRequest, Conflict, StateLost
from shared.http.ownership import HEADER
from shared.wire import AbortRequest, ModelRequest, ServingWeights
from tests.contract.test_rollout_adapters import SPEC, Bench, held, until_held
from tests.support.rollout_bench import RolloutBench

BASE: dict[str, Any] = dict(Bench.base)
OWNER = {HEADER: "redis1 host:8000 job"}
NO_TRANSFER = "needs a GPU and HONE_WEIGHT_TRANSFER=nccl"


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


def folder_of(bench: Bench, name: str, without: str = "") -> Path:
    (folder := bench.runs / name).mkdir(parents=True)
    tensors = {key: base + 7 for key, base in bench.base.items() if key != without}
    save_file(tensors, folder / "model.safetensors")
    return folder


async def test_a_folder_of_weights_replaces_a_version_which_then_nobody_is_told_to_have(
    bench: Bench,
) -> None:
    await bench.reload(bench.publish(3, **BASE))
    await bench.abort()
    bench.engine.calls.clear()
    theirs = folder_of(bench, "step_4")
    assert (await post(bench, "/update_weights", {"weight_dir": str(theirs)}))[0] == 200
    assert bench.engine.calls == ["pause", "step_4", None, "resume"]
    serving = await bench.client.get("/weights", ServingWeights)
    assert (serving.job_id, serving.version, serving.digest) == (None, None, None)
    assert (await bench.generate()).rollouts[0].versions == ()
    with pytest.raises(Conflict, match="the weights that serve are no job's; reload"):
        await bench.generate(job_id="job", epoch=1)
    again = await bench.reload(bench.publish(3, fence=(0, 1), **BASE))
    assert (again.version, bench.engine.calls[-3:]) == (3, ["v3", 3, "resume"])


async def test_nothing_is_changed_while_a_job_has_the_sampler(bench: Bench) -> None:
    ref = bench.publish(3, **BASE)
    loaded = await of_job(bench, "POST", "/reload_weights", ref)
    assert loaded.status_code == 200, loaded.text
    folder = str(folder_of(bench, "theirs"))
    bodies: dict[str, Any] = {
        "/update_weights": {"weight_dir": folder},
        "/init_weight_transfer_engine": {"init_info": {}},
        "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": folder}},
        "/v1/unload_lora_adapter": {"lora_name": "a"},
    }
    adapter = {"lora_name": "a", "lora_path": folder}
    paths = [path for path in bench.service.app.openapi()["paths"] if path not in OURS]
    before = list(bench.engine.calls)
    for path in paths:
        body = bodies.get(path, adapter if "load_lora" in path else {})
        status, answer = await post(bench, path, body)
        assert (path, status, answer["code"]) == (path, 409, "taken")
        assert answer["detail"].startswith("the sampler has job 'job' of the orchestrator at host")
    assert len(paths) == 14 and bench.engine.calls == before
    put = await bench.raw("PUT", "/model", json={"model": "other"})
    assert (put.status_code, put.json()["code"], len(bench.engines)) == (409, "taken", 1)
    await of_job(bench, "POST", "/abort", AbortRequest(job_id="job"))
    assert (await post(bench, "/pause"))[0] == 200


OURS = {
    *("/generate", "/abort", "/model", "/reload_weights", "/weights/check", "/weights"),
    *("/health", "/healthz", "/readyz", "/version", "/metrics", "/is_paused", "/is_sleeping"),
    *("/operations/{id}", "/operations/wait"),
}
"""Routes that are Hone's, or change nothing."""


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "expected one of 'update_info' and 'weight_dir', not both or neither"),
        ({"weight_dir": "/etc"}, "'weight_dir': got '/etc'; folders may be named below these only"),
        ({"weight_dir": "runs/gone"}, "'weight_dir': there is no folder"),
        ({"weight_dir": "runs/small"}, "'runs/small' does not fit the model: 1 of 2 tensors are"),
        ({"weight_dir": "runs/none"}, "'weight_dir': "),
        ({"update_info": {}}, NO_TRANSFER),
        ({"weight_file": "a"}, "'weight_file'"),
    ],
)
async def test_weights_that_cannot_be_loaded_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    bench = Bench(tmp_path, model_dirs=(tmp_path / "models",))
    folder_of(bench, "small", without="layer.w.weight")
    (bench.runs / "none").mkdir()
    async with bench.client:
        await bench.put(SPEC)
        status, answer = await post(bench, "/update_weights", body)
        assert (status, sentence in answer["detail"]) == (422, True), answer["detail"]
        assert bench.engine.calls == [] and (await bench.generate()).rollouts


async def test_a_load_that_fails_halfway_leaves_weights_that_nobody_samples(bench: Bench) -> None:
    body = {"weight_dir": str(folder_of(bench, "theirs"))}
    bench.engine.fail_load = OSError("gone")
    assert (await post(bench, "/update_weights", body))[0] == 409
    with pytest.raises(StateLost, match="loading weights by hand failed halfway"):
        await bench.generate()
    assert (await bench.raw("GET", "/health")).status_code == 503
    bench.engine.fail_load = None
    assert (await post(bench, "/update_weights", body))[0] == 200
    assert (await bench.raw("GET", "/health")).status_code == 200


async def test_vllms_transfer_takes_its_steps_in_order_and_gives_no_version(bench: Bench) -> None:
    bench.engine.transfers = True
    await bench.reload(bench.publish(3, **BASE))
    await bench.abort()
    bench.engine.calls.clear()
    status, answer = await post(bench, "/update_weights", {"update_info": {"names": []}})
    assert (status, answer["code"]) == (409, "out_of_order")
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {"world_size": 2}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"names": []}}),
    ):
        assert (await post(bench, path, body))[0] == 200
    with pytest.raises(StateLost, match="weights are being updated by hand"):
        await bench.generate()
    assert (await post(bench, "/finish_weight_update"))[1]["message"] == "Weight update finished"
    begin = ["init_weight_transfer_engine", "pause", "start_weight_update", "update_weights"]
    assert bench.engine.calls == [*begin, "finish_weight_update", None, "reset cache", "resume"]
    assert bench.sampler.serving.version is None and (await bench.generate()).rollouts


async def test_a_job_that_finds_a_transfer_half_done_gets_another_engine(bench: Bench) -> None:
    bench.engine.transfers = True
    await post(bench, "/start_weight_update")
    job = ModelRequest(**SPEC.model_dump(exclude={"job_id"}), job_id="job")
    with pytest.raises(StateLost, match="weights are being updated by hand"):
        await bench.reload(bench.publish(3, **BASE))
    await bench.put(job)
    await bench.reload(bench.publish(3, **BASE))
    assert len(bench.engines) == 2 and (await bench.generate(job_id="job")).rollouts


async def test_an_adapter_is_called_by_its_name_beside_what_serves(bench: Bench) -> None:
    await bench.reload(ref := bench.publish_adapter(3))
    await bench.abort()
    for name in ("policy-v1", "policy-v2", "policy-v3"):
        body = {"lora_name": name, "lora_path": ref.path, "load_inplace": False}
        assert (await post(bench, "/v1/load_lora_adapter", body))[1]["status"] == "ok"
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


async def test_level_1_keeps_the_version_and_level_2_gives_it_up(bench: Bench) -> None:
    await bench.reload(bench.publish(3, **BASE))
    await bench.abort()
    bench.engine.calls.clear()
    assert (await post(bench, "/sleep?level=1"))[0] == 200
    assert (await bench.raw("GET", "/is_sleeping")).json() == {"is_sleeping": True}
    assert "POST /wake_up wakes it" in (await bench.raw("GET", "/readyz")).text
    assert (await post(bench, "/wake_up?tags=weights&tags=kv_cache"))[1] == {"status": "awake"}
    assert bench.engine.calls == ["sleep 1", "wake weights", "wake cache", "resume"]
    assert bench.sampler.serving.version == 3
    await post(bench, "/sleep", {"level": 2})
    assert (await post(bench, "/wake_up"))[1] == {"status": "sleeping"}
    assert bench.sampler.serving.version is None
    body = {"weight_dir": str(folder_of(bench, "theirs"))}
    assert (await post(bench, "/update_weights", body))[0] == 200
    assert (await bench.raw("GET", "/is_sleeping")).json() == {"is_sleeping": False}


async def test_a_job_ends_a_pause_and_a_sleep_that_another_trainer_left(bench: Bench) -> None:
    job = ModelRequest(**SPEC.model_dump(exclude={"job_id"}), job_id="job")
    for left in ("/pause", "/sleep?level=1"):
        assert (await post(bench, left))[0] == 200
    await bench.put(job)
    assert bench.engine.calls == ["pause", "sleep 1", "wake weights", "wake cache", "resume"]
    await post(bench, "/pause")
    await bench.put(job)
    assert bench.engine.calls[-2:] == ["pause", "resume"] and (await bench.generate()).rollouts


async def test_parameters_are_vllms_and_others_are_refused(bench: Bench) -> None:
    assert (await post(bench, "/pause?mode=abort&clear_cache=true"))[1]["status"] == "paused"
    assert bench.engine.calls == ["abort"]
    assert (await bench.raw("GET", "/is_paused")).json() == {"is_paused": True}
    assert (await post(bench, "/resume"))[1] == {"paused": False, "status": "resumed"}
    assert (await post(bench, "/reset_prefix_cache?reset_external=false"))[1] == {"success": True}
    for path, body, sentence in (
        ("/pause?mode=stop", None, "input should be 'keep', 'abort' or 'wait'"),
        ("/pause?moed=keep", None, "did you mean 'mode'?"),
        ("/pause?mode=keep", {"mode": "abort"}, "expected a body or query parameters, not both"),
        ("/collective_rpc", {"method": "exec"}, "cannot be called from outside"),
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
    assert (await bench.raw("GET", "/is_paused")).json() == {"is_paused": False}


async def test_weights_by_hand_do_not_end_a_pause_by_hand(bench: Bench) -> None:
    assert (await post(bench, "/pause"))[0] == 200
    body = {"weight_dir": str(folder_of(bench, "theirs"))}
    assert (await post(bench, "/update_weights", body))[0] == 200
    assert bench.engine.calls == ["pause", "pause", "theirs", None]


async def test_a_job_waits_for_no_request_that_a_pause_waits_for(bench: Bench) -> None:
    done, began, pause = asyncio.Event(), asyncio.Event(), bench.engine.pause

    async def until_done(mode: Any = "keep") -> None:
        began.set()
        await done.wait()
        await pause(mode)

    bench.engine.pause = until_done
    pausing = asyncio.create_task(post(bench, "/pause?mode=wait"))
    await began.wait()
    job = SPEC.model_copy(update={"job_id": "job"})
    put = await asyncio.wait_for(of_job(bench, "PUT", "/model", job), 2)
    assert (put.status_code, bench.engine.calls) == (200, ["resume"])
    done.set()
    assert await pausing == (200, {"paused": False, "status": "resumed"})
    assert bench.engine.calls == ["resume", "wait", "resume"]


async def test_an_engine_that_does_not_wake_is_replaced_by_a_job(bench: Bench) -> None:
    async def fail() -> None:
        raise RuntimeError("out of memory")

    assert (await post(bench, "/sleep?level=1"))[0] == 200
    bench.engine.wake_cache = fail
    status, answer = await post(bench, "/wake_up")
    assert status == 409 and "waking up failed (RuntimeError: out of memory)" in answer["detail"]
    await bench.put(SPEC.model_copy(update={"job_id": "job"}))
    assert len(bench.engines) == 2


async def test_a_sleep_that_the_settings_refuse_changes_nothing(bench: Bench) -> None:
    await bench.reload(bench.publish_adapter(3))
    await bench.abort()
    bench.engine.fail_sleep = BadRequest("the sampler cannot free its memory")
    assert (await post(bench, "/sleep?level=2"))[0] == 422
    assert (await bench.client.get("/weights", ServingWeights)).version == 3
    assert held(bench) == ["job/v3-0.0"]


async def test_nobody_sleeps_or_wakes_an_engine_amid_an_update(bench: Bench) -> None:
    bench.engine.transfers = True
    assert (await post(bench, "/start_weight_update"))[0] == 200
    for path in ("/sleep?level=1", "/sleep?level=2", "/wake_up"):
        status, answer = await post(bench, path)
        assert (status, answer["code"]) == (409, "state_lost"), path
    assert bench.engine.calls == ["pause", "start_weight_update"]


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
        requests = {"/update_weights": {"weight_dir": str(folder)}, "/load_lora_adapter": adapter}
        for path, body in requests.items():
            status, answer = await asyncio.wait_for(post(bench, path, body), 5)
            assert status == 422 and str(folder) in answer["detail"], (path, name)
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
