"""A key for its own jobs alone: another key's job is not there for it, however it is named."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.api import files, history
from services.orchestrator.app import create_service
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import accept
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import stop
from shared.errors import BadRequest, Forbidden, NotFound
from shared.http.gate import caller
from shared.job import Job, LoraSpec
from shared.settings import Settings
from shared.weights.folders import MANIFEST, STATE
from shared.wire import JobRecord
from tests.support import orchestrator_stack
from tests.support.in_process import in_process
from tests.support.job_records import JOB
from tests.support.model_folders import make_model_folder
from tests.support.own_keys import (
    AS_ROOT,
    bearer,
    called_by,
    key_of,
    program,
    submitted,
    with_token,
)

store = orchestrator_stack.store


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return with_token(settings)


@pytest.fixture
async def http(settings: Settings, store: Store) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_service(settings, store, works=False).app
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://host:8000") as http:
        yield http


async def test_another_keys_job_is_not_there(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    alice, bob = bearer(settings, "alice"), bearer(settings, "bob")
    hers = await submitted(store, settings, key_of("alice", 3.0))
    his = await submitted(store, settings, key_of("bob"))
    roots = await submitted(store, settings, None)
    listed = (await http.get("/v1/jobs", headers=alice)).json()["jobs"]
    assert [job["id"] for job in listed] == [hers]
    own = (await http.get(f"/v1/jobs/{hers}", headers=alice)).json()
    assert (own["submitted_by"], own["weight"]) == ("alice", 3.0)
    for job_id in (his, roots):
        for method, path in (
            ("GET", ""),
            ("GET", "/events"),
            ("GET", "/metrics"),
            ("GET", "/checkpoints"),
            ("GET", "/rollouts"),
            ("GET", "/held_out"),
            ("POST", "/cancel"),
            ("POST", "/pause"),
            ("POST", "/resume"),
            ("DELETE", ""),
        ):
            found = await http.request(method, f"/v1/jobs/{job_id}{path}", headers=alice)
            assert found.status_code == 404, (method, path, found.text)
            assert f"no job {job_id!r}" in found.json()["detail"]
        asked = {"model_id": job_id}
        found = await http.post("/api/v1/get_info", json=asked, headers=alice)
        assert found.status_code == 404, found.text
    assert (await http.post(f"/v1/jobs/{his}/pause", headers=bob)).status_code == 200
    assert len((await http.get("/v1/jobs", headers=AS_ROOT)).json()["jobs"]) == 3


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("GET", "/v1/samplers"),
        ("GET", "/v1/services"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/fine_tuning/jobs"),
        ("GET", "/v1/fine_tuning/jobs"),
        ("POST", "/v1/keys"),
        ("POST", "/v1/recover"),
        ("GET", "//v1/jobs"),
        ("GET", "/v1/jobsx"),
    ],
)
async def test_what_is_about_others_too_is_forbidden(
    http: httpx.AsyncClient, settings: Settings, method: str, path: str
) -> None:
    key = bearer(settings, "alice")
    refused = await http.request(method, f"http://host:8000{path}", headers=key, json={})
    assert refused.status_code == 403, refused.text
    assert refused.json()["detail"] == (
        f"key 'alice' has access 'own', and {method} {path} concerns other jobs too"
    )


async def test_another_keys_checkpoint_is_no_model_to_begin_with(
    store: Store, settings: Settings
) -> None:
    his = await submitted(store, settings, key_of("bob"))
    model = str(settings.runs_dir / his / "checkpoints" / "step-000001")
    job = JOB.model_copy(update={"model": model})
    with called_by("alice") as alice, pytest.raises(NotFound):
        await submitted(store, settings, alice, job)
    with called_by("bob") as bob:
        assert await submitted(store, settings, bob, job)


async def test_who_submitted_a_job_outlives_redis(store: Store, settings: Settings) -> None:
    job = JOB.model_copy(update={"lora": LoraSpec(rank=2)})
    job_id = await submitted(store, settings, key_of("alice", 0.5), job)
    note = RunFolder(Path(settings.runs_dir) / job_id).note()
    assert note and (note.submitted_by, note.weight) == ("alice", 0.5)
    assert await store.submitted_by(job_id) == "alice"
    assert await store.submitted_by("demo-none") is None


async def test_a_key_serves_the_episodes_of_its_own_jobs(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    alice = bearer(settings, "alice")
    hers = await submitted(store, settings, key_of("alice"))
    his = await submitted(store, settings, key_of("bob"))

    async def lease(job_id: str | None) -> httpx.Response:
        body = {"worker": "w", "job_id": job_id}
        return await http.post("/v1/episodes/lease", json=body, headers=alice)

    own = await lease(hers)
    assert (own.status_code, own.json()) == (200, {"episodes": []}), own.text
    other, absent = await lease(his), await lease("demo-0none")
    assert (other.status_code, absent.status_code) == (404, 404)
    assert f"no job {his!r}" in other.json()["detail"]
    unnamed = await lease(None)
    assert unnamed.status_code == 403
    assert "'job_id' is missing; expected the id of one" in unnamed.json()["detail"]
    renewed = await http.post("/v1/episodes/renew", json={"worker": "w"}, headers=alice)
    assert renewed.status_code == 200, renewed.text


async def test_another_keys_submission_is_not_withdrawn(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    alice = bearer(settings, "alice")
    submission = Submission(JOB, settings.runs_dir, key="run-2", by=None)
    job_id = (await accept(store, submission)).id
    found = await http.post("/v1/jobs/withdraw", json={"key": "run-2"}, headers=alice)
    assert (found.status_code, found.json()) == (200, {"job": None})
    caller.set(None)
    assert (await store.get(job_id)).status == "queued"


async def test_a_priority_above_others_is_refused(store: Store, settings: Settings) -> None:
    job = JOB.model_copy(update={"priority": 1})
    refused = pytest.raises(Forbidden, match="priority is 1, expected 0 or less")
    with called_by("alice") as alice, refused:
        await submitted(store, settings, alice, job)


async def test_names_of_others_are_not_told(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    alice = bearer(settings, "alice")
    job = JOB.model_copy(update={"lora": LoraSpec(rank=2)})
    hers = await submitted(store, settings, key_of("alice"), job)
    secret = job.model_copy(update={"name": "secret"})
    await submitted(store, settings, key_of("bob"), secret)
    waiting = await submitted(store, settings, key_of("alice"), job)
    for _ in range(2):
        assert await store.take("w", "t:1", 30, ["s:1"], places=2)
    for path in ("", f"/{hers}", f"/{waiting}"):
        found = await http.get(f"/v1/jobs{path}", headers=alice)
        assert found.status_code == 200 and "secret" not in found.text, found.text


async def test_another_keys_checkpoint_is_nothing_to_begin_with(
    store: Store, settings: Settings
) -> None:
    his = await submitted(store, settings, key_of("bob"))
    folder = settings.runs_dir / his / "checkpoints" / "step-000001"
    (folder / STATE).mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"job": JOB.model_dump(mode="json")}))

    def beginning(with_folder: Path) -> Job:
        training = JOB.training.model_copy(update={"start_from": str(with_folder)})
        return JOB.model_copy(update={"training": training})

    with called_by("alice") as alice:
        with pytest.raises(NotFound):
            await submitted(store, settings, alice, beginning(folder))
        for other in (settings.runs_dir, Path("/etc")):
            with pytest.raises(BadRequest, match="is no checkpoint below HONE_RUNS_DIR"):
                await submitted(store, settings, alice, beginning(other))
    with called_by("bob") as bob:
        assert await submitted(store, settings, bob, beginning(folder))
        other = beginning(folder).model_copy(update={"lora": LoraSpec(rank=2)})
        with pytest.raises(BadRequest, match="a checkpoint with all weights, and the job has lora"):
            await submitted(store, settings, bob, other)
        assert [use.path for use in await store.models_below(settings.runs_dir / his)] == [folder]


FULL = {
    "name": "alices",
    "model": "owner/model",
    "steps": 1,
    "data": {"train": [{"prompt": "1?", "answer": "1"}]},
    "rewards": [{"grader": "exact_match"}],
}


def naming(path: str, key: str) -> dict[str, Any]:
    """A job that names the path under the key."""
    if key == "evaluation.models":
        held_out = {"eval": FULL["data"]["train"]}
        models = {"models": [{"name": "a", "model": path}]}
        return FULL | {"steps": 0, "data": held_out, "evaluation": models}
    if key == "training.start_from":
        return FULL | {"training": {"start_from": path}}
    if key == "data.train":
        return FULL | {"data": {"train": f"{path}/rows.jsonl"}}
    return FULL | {key: path}


@pytest.mark.parametrize("route", ["", "/dry_run", "/plan"])
@pytest.mark.parametrize("key", ["model", "evaluation.models", "training.start_from", "data.train"])
async def test_another_keys_path_is_as_one_that_does_not_exist(
    http: httpx.AsyncClient, store: Store, settings: Settings, route: str, key: str
) -> None:
    alice = bearer(settings, "alice")
    his = await submitted(store, settings, key_of("bob"))
    theirs = settings.runs_dir / his / "checkpoints" / "step-000001"
    make_model_folder(theirs)
    (theirs / "rows.jsonl").write_text('{"prompt": "secret", "answer": "1"}\n')
    for job_id in (his, "bobs-0none"):
        path = settings.runs_dir / job_id / "checkpoints" / "step-000001"
        body = {"job": naming(str(path), key)}
        found = await http.post(f"/v1/jobs{route}", json=body, headers=alice)
        assert found.status_code == 404, found.text
        assert found.json()["detail"].startswith(f"no job {job_id!r}")


async def test_another_keys_checkpoint_is_no_base_model(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    alice = bearer(settings, "alice")
    his = await submitted(store, settings, key_of("bob"))
    path = settings.runs_dir / his / "checkpoints" / "step-000001"
    make_model_folder(path)
    body = {"session_id": "s", "base_model": str(path)}
    for route, number in (
        ("create_model", "model_seq_id"),
        ("create_sampling_session", "sampling_session_seq_id"),
    ):
        found = await http.post(f"/api/v1/{route}", json=body | {number: 0}, headers=alice)
        assert (found.status_code, found.json()["code"]) == (404, "not_found"), found.text


async def test_a_resumed_job_has_no_priority_above_others(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    alice = bearer(settings, "alice")
    hers = await submitted(store, settings, key_of("alice"))
    await store.pause(hers)

    async def resume(headers: dict[str, str], *changes: str) -> httpx.Response:
        await store.pause(hers)
        return await http.post(
            f"/v1/jobs/{hers}/resume", json={"set": list(changes)}, headers=headers
        )

    refused = await resume(alice, "priority=100")
    assert refused.status_code == 403, refused.text
    assert refused.json()["detail"].startswith("priority is 100, expected 0 or less")
    assert (await resume(alice, "priority=-3")).status_code == 200
    assert (await resume(AS_ROOT, "priority=5")).status_code == 200
    assert (await resume(alice, "checkpoints.every=2")).status_code == 200  # 5 may stay
    assert (await resume(alice, "priority=6")).status_code == 403
    caller.set(None)
    assert (await store.get(hers)).job.priority == 5


async def test_a_session_finds_the_models_of_its_own_caller(
    http: httpx.AsyncClient, store: Store, settings: Settings
) -> None:
    model = program(metadata={"tinker_model": "s:train:0"})
    roots = await submitted(store, settings, None, model)
    hers = await submitted(store, settings, key_of("alice"), model)
    asked = {"model_id": "s:train:0"}
    for headers, expected in ((AS_ROOT, roots), (bearer(settings, "alice"), hers)):
        found = await http.post("/api/v1/get_info", json=asked, headers=headers)
        assert found.json()["model_id"] == expected, found.text
    beside = await http.post("/api/v1/get_info", json=asked, headers=bearer(settings, "bob"))
    assert beside.status_code == 404
    session = {"session_id": "s", "sampling_session_seq_id": 0, "base_model": model.model}
    opened = await http.post("/api/v1/create_sampling_session", json=session, headers=AS_ROOT)
    assert opened.json()["sampling_session_id"].startswith(f"{roots}:"), opened.text

    async def told(path: str, scope: str) -> httpx.Response:
        return await http.get(f"/api/v1/{path}?access_scope={scope}", headers=AS_ROOT)

    for scope, expected in (("owned", [roots]), ("accessible", [hers, roots])):
        runs = (await told("training_runs", scope)).json()
        assert [one["training_run_id"] for one in runs["training_runs"]] == expected
        assert runs["cursor"]["total_count"] == len(expected)
        assert (await told("sessions/s", scope)).json()["training_run_ids"] == expected
        assert (await told("sessions", scope)).json() == {"sessions": ["s"]}
    assert (await told(f"training_runs/{hers}", "accessible")).status_code == 200
    not_own = await told(f"training_runs/{hers}", "owned")
    assert not_own.status_code == 404 and "belongs to 'alice'; expected one of your" in not_own.text
    carol = bearer(settings, "carol")
    nothing = await http.get("/api/v1/sessions?access_scope=owned", headers=carol)
    assert nothing.json() == {"sessions": []}
    assert (await told("sessions/t", "accessible")).status_code == 404
    assert (await told("training_runs", "everyone")).status_code == 422


async def test_another_keys_upload_is_not_found_by_its_idempotency_key(
    http: httpx.AsyncClient, settings: Settings
) -> None:
    alice, bob = bearer(settings, "alice"), bearer(settings, "bob")

    async def upload(headers: dict[str, str], row: bytes) -> httpx.Response:
        given = headers | {"idempotency-key": "train-v1"}
        files, data = {"file": ("rows.jsonl", row)}, {"purpose": "fine-tune"}
        return await http.post("/v1/files", headers=given, files=files, data=data)

    ids: list[str] = []
    for headers, row in ((alice, b'{"prompt": "secret"}'), (bob, b"{}"), (AS_ROOT, b"{}")):
        stored = await upload(headers, row)
        assert stored.status_code == 200, stored.text
        assert (await upload(headers, row)).json() == stored.json()
        ids.append(stored.json()["id"])
    assert len(set(ids)) == 3
    for guessed in ("train-v1", "alice/train-v1"):
        id = f"file-{hashlib.sha256(guessed.encode()).hexdigest()[:24]}"
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            found = await http.request(method, f"/v1/files/{id}{path}", headers=bob)
            assert found.status_code == 404, found.text


async def test_no_tenant_has_all_streams_of_events(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_OF_TENANT", 3)
    app = create_service(settings, store, works=False).app
    ids = {name: await submitted(store, settings, key_of(name)) for name in ("alice", "bob")}
    tokens = {name: bearer(settings, name)["authorization"].encode() for name in ids}

    async def status_of(name: str) -> int:
        """Opens a stream of events, and returns its status."""
        headers = [
            (b"host", b"host:8000"),
            (b"authorization", tokens[name]),
            (b"accept", b"text/event-stream"),
        ]
        scope = {"type": "http", "method": "GET", "path": f"/v1/jobs/{ids[name]}/events"}
        scope |= {"query_string": b"", "headers": headers, "http_version": "1.1"}
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                started.set_result(message["status"])

        async def receive() -> Any:
            return await asyncio.Event().wait()

        streams[name].append(asyncio.create_task(app(scope, receive, send)))
        return await started

    num_read, all_read, get = 0, asyncio.Event(), Store.get

    async def together(self: Store, job_id: str) -> JobRecord:
        nonlocal num_read
        record = await get(self, job_id)
        num_read += 1
        if num_read == 6:
            all_read.set()
        await all_read.wait()
        return record

    monkeypatch.setattr(Store, "get", together)
    streams: dict[str, list[asyncio.Task[None]]] = {name: [] for name in ids}
    found = await asyncio.gather(*(status_of("alice") for _ in range(6)))
    assert sorted(found) == [200, 200, 200, 429, 429, 429]
    assert await status_of("bob") == 200 and await status_of("alice") == 429
    await stop(*streams["alice"])
    assert await status_of("alice") == 200, "they have ended"
    await stop(*streams["alice"], *streams["bob"])


async def test_a_key_leaves_others_room_for_uploads(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve files one key has six, another half of what is left, and HONE_TOKEN the rest."""
    monkeypatch.setattr(files, "MAX_FILES", 12)
    upload = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "fine-tune"}}

    async def num_taken(header: dict[str, str]) -> int:
        for num in range(20):
            answer = await http.post("/v1/files", headers=header, **upload)
            if answer.status_code != 200:
                assert answer.status_code == 413, answer.text
                refused.append(answer.json()["detail"])
                return num
        return 20

    refused: list[str] = []
    async with in_process(create_service(settings, store, works=False).app) as http:
        assert await num_taken(bearer(settings, "alice")) == 6
        bob = bearer(settings, "bob")
        assert await num_taken(bob) == 3
        assert await num_taken(AS_ROOT) == 3
        assert await num_taken(bob) == 0
    assert refused[0] == (
        "a file of 3 bytes beside 6 of 18 bytes that API key 'alice' uploaded; expected at most as "
        "many as are left for all: 6 files and 107374182382 bytes (setting "
        "HONE_MAX_FILES_GIB): remove some by DELETE /v1/files/{id}"
    )
    assert refused[2].startswith("there are 12 uploaded files; expected at most 12")


async def test_uploads_under_way_take_no_more_than_their_share(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two that have not come yet, one key has one."""
    monkeypatch.setattr(files, "MAX_UPLOADING_BYTES", 2 * files.LEAST_BYTES)
    app = create_service(settings, store, works=False).app
    token = bearer(settings, "alice")["authorization"].encode()
    form = b"multipart/form-data; boundary=x"

    async def begin() -> asyncio.Task[None]:
        """Sends an upload's headers and no body."""
        headers = [(b"host", b"host"), (b"authorization", token), (b"content-type", form)]
        scope = {"type": "http", "method": "POST", "path": "/v1/files", "http_version": "1.1"}
        scope |= {"query_string": b"", "headers": [*headers, (b"content-length", b"1000")]}
        asked = asyncio.Event()

        async def receive() -> Any:
            asked.set()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            asked.set()

        task = asyncio.create_task(app(scope, receive, send))
        await asked.wait()
        return task

    sent: list[Any] = []
    first = await begin()
    assert not sent
    await begin()
    assert sent[0]["status"] == 429 and (b"retry-after", b"5") in sent[0]["headers"]
    assert b"uploads of 8388608 bytes of the API key are under way" in sent[1]["body"]
    sent.clear()
    await stop(first)
    again = await begin()
    assert not sent, "the room was given back"
    await stop(again)
