"""What a program saved, by Tinker's REST API: lists, expiry, deletion and downloads."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.orchestrator.extensions.tinker import log
from services.orchestrator.extensions.tinker.log import SavedFolder
from services.orchestrator.extensions.tinker.routes import is_public, remove_expired
from shared.weights.folders import MANIFEST, StoredFile
from shared.wire import SavedKind, SavedWeights
from tests.contract.test_programs import ADAM, call, created, job, post, result, stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

__all__ = ["job", "stack"]  # fixtures


async def save(stack: Stack, how: str, model: str, number: int, path: str, **more: Any) -> Any:
    body = {"model_id": model, "seq_id": number, "path": path, **more}
    return await result(stack, await post(stack, how, body))


async def listed(stack: Stack, model: str) -> dict[str, Any]:
    answer = await stack.http.get(f"/api/v1/training_runs/{model}/checkpoints")
    return {one["checkpoint_id"]: one for one in answer.json()["checkpoints"]}


async def test_what_is_saved_is_listed_until_it_is_deleted_or_expires(stack: Stack) -> None:
    model = await created(stack, user_metadata={"renderer_name": "qwen3"})
    await save(stack, "save_weights", model, 1, "a", ttl_seconds=7200)
    await save(stack, "save_weights_for_sampler", model, 2, "b")
    await post(stack, "forward_backward", call(model, 3))
    await result(stack, await post(stack, "optim_step", {"model_id": model, "seq_id": 4, **ADAM}))
    await save(stack, "save_weights", model, 5, "c")
    found = await listed(stack, model)
    assert [*found] == ["weights/a", "sampler_weights/b", "weights/c"]
    assert found["weights/a"]["expires_at"] > found["weights/a"]["time"]
    assert found["sampler_weights/b"] | {"time": 0} == {
        "checkpoint_id": "sampler_weights/b",
        "checkpoint_type": "sampler",
        "time": 0,
        "tinker_path": f"tinker://{model}/sampler_weights/b",
        "size_bytes": 1,
        "public": False,
        "expires_at": None,
    }
    other = await created(stack, "t")
    runs = (await stack.http.get("/api/v1/training_runs?limit=1&offset=1")).json()
    assert runs["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    (run,) = runs["training_runs"]
    assert (run["training_run_id"], run["lora_rank"]) == (model, 4) and other != model
    assert run["user_metadata"] == {"renderer_name": "qwen3"}
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/c"
    of_all = (await stack.http.get("/api/v1/checkpoints?limit=2")).json()
    assert [one["checkpoint_id"] for one in of_all["checkpoints"]] == [*found][:0:-1]

    kept = f"/api/v1/training_runs/{model}/checkpoints"
    sampled = {"session_id": "s", "model_path": f"tinker://{model}/sampler_weights/b"}
    await post(stack, "create_sampling_session", sampled | {"sampling_session_seq_id": 0})
    assert (await stack.http.delete(f"{kept}/sampler_weights/b")).status_code == 204
    sampled |= {"sampling_session_seq_id": 1}
    refused = await stack.http.post("/api/v1/create_sampling_session", json=sampled)
    assert refused.status_code == 404 and "has no snapshot 'b'" in refused.json()["detail"]
    set_ttl = await stack.http.put(f"{kept}/weights/a/ttl", json={"ttl_seconds": 1})
    assert set_ttl.status_code == 204
    await asyncio.sleep(1.05)
    assert [*await listed(stack, model)] == ["weights/c"]
    for gone in ("weights/a", "sampler_weights/b", "weights/../x", "x"):
        assert (await stack.http.delete(f"{kept}/{gone}")).status_code == 404
    assert stack.fakes.kept[2] == (0, 2)
    await remove_expired(stack.store, model)
    await save(stack, "save_weights", model, 6, "d")
    assert stack.fakes.kept[2] == (2,), "the step of the expired checkpoint is not kept"


async def test_an_export_is_downloaded_by_addresses_that_are_signed(stack: Stack) -> None:
    model = await created(stack)
    answer = await save(stack, "save_weights_external", model, 1, "out")
    assert answer["path"] == f"tinker://{model}/external_weights/out"
    folder = Path((await stack.get(model)).run_dir) / "checkpoints/step-000000"
    (folder / "config.json").write_text("{}")
    (folder / MANIFEST).parent.mkdir()
    files = {"config.json": StoredFile.of(folder / "config.json").model_dump()}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))
    told = await stack.http.get(
        f"/api/v1/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    )
    assert [*told.json()["urls"]] == ["config.json", MANIFEST]
    path = urlsplit(told.json()["urls"]["config.json"]).path
    assert is_public(path)
    assert (await stack.http.get(path)).text == "{}"
    for wrong in (path.replace("config.json", MANIFEST), path.replace("/files/", "/files/0", 1)):
        assert (await stack.http.get(wrong)).status_code in (401, 404), wrong
    _, _, _, _, signature, expires, *rest = path.split("/")
    later = "/".join(["/api/v1/files", signature, str(int(expires) + 1), *rest])
    assert (await stack.http.get(later)).status_code == 401


async def test_a_time_to_live_that_is_none_is_refused(stack: Stack) -> None:
    model = await created(stack)
    for number, ttl in enumerate((0, 0.5, -1, "1", True, 1e12), 1):
        body = {"model_id": model, "seq_id": number, "path": "a", "ttl_seconds": ttl}
        refused = await stack.http.post("/api/v1/save_weights", json=body)
        assert refused.status_code == 422 and "'ttl_seconds': got" in refused.json()["detail"]


def entry(run: Path, number: int, kind: SavedKind, step: int, name: str = "x") -> SavedWeights:
    folder = run / ("snapshots" if kind == "snapshot" else "checkpoints")
    folder /= f"s{number}" if kind == "snapshot" else f"step-{step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    path = "" if kind == "snapshot" else str(folder)
    one = SavedWeights(number=number, kind=kind, name=name, step=step, made_at=0.0, path=path)
    SavedFolder(run).add(one)
    return one


def test_weights_that_another_entry_or_the_model_needs_stay(tmp_path: Path) -> None:
    first, twin = entry(tmp_path, 1, "checkpoint", 2), entry(tmp_path, 2, "export", 2)
    newest, shown = entry(tmp_path, 3, "checkpoint", 4), entry(tmp_path, 4, "snapshot", 4)
    kept = SavedFolder(tmp_path)
    kept.remove(first)
    assert Path(twin.path).is_dir() and kept.steps() == (2, 4)
    kept.remove(twin)
    assert not Path(twin.path).exists()
    kept.remove(newest)
    assert Path(newest.path).is_dir(), "the model resumes from it"
    kept.remove(shown)
    assert not [*(tmp_path / "snapshots").iterdir()] and kept.all() == []


def test_a_snapshot_without_a_name_stays_for_an_hour_after_its_last_sample(tmp_path: Path) -> None:
    entry(tmp_path, 1, "snapshot", 2, name="")
    kept, file = SavedFolder(tmp_path), tmp_path / "saved/00000001.msgpack"
    long_ago = file.stat().st_mtime - log.UNNAMED_S - 1
    os.utime(file, (long_ago, long_ago))
    kept.use(1)
    assert [one.number for one in kept.all()] == [1] and kept.expired() == []
    os.utime(file, (long_ago, long_ago))
    assert kept.all() == []
    kept.remove(kept.expired()[0])
    assert not file.exists() and not [*(tmp_path / "snapshots").iterdir()]


def test_an_entry_that_cannot_be_read_is_passed_over_and_no_checkpoint_is_lost(
    tmp_path: Path,
) -> None:
    damaged, other = entry(tmp_path, 1, "checkpoint", 2), entry(tmp_path, 2, "checkpoint", 4)
    entry(tmp_path, 3, "checkpoint", 6)
    kept = SavedFolder(tmp_path)
    (tmp_path / "saved/00000001.msgpack").write_bytes(b"")
    assert [one.number for one in kept.all()] == [2, 3]
    assert kept.steps() == (2, 4, 6), "the damaged entry may be of any of them"
    kept.remove(other)
    assert Path(damaged.path).is_dir() and Path(other.path).is_dir()
