"""Named API keys: what each allows, what is kept of it, and that it is void once it was revoked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

import hone
from hone.cli import app
from hone.commands import stack
from services.orchestrator.api.access import Keys
from services.orchestrator.app import create_service
from services.orchestrator.store.store import Store
from shared.host import logs
from shared.http import client as shared_client
from shared.settings import Settings
from tests.support.in_process import in_process

ROOT = "root-token-of-the-stack"
SECRET = re.compile(r"hone_[a-z0-9-]+_[A-Za-z0-9_-]{43}")
ROWS = {"file": ("rows.jsonl", b'{"prompt": "1"}\n')}


GUARDED = [
    ("POST", "/v1/keys", "full"),
    ("GET", "/v1/keys", "read"),
    ("DELETE", "/v1/keys/dashboard", "full"),
    ("PUT", "/v1/samplers/mine", "full"),
    ("DELETE", "/v1/samplers/mine", "full"),
    ("POST", "/v1/recover", "full"),
]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"token": SecretStr(ROOT)})


@pytest.fixture
def transport(settings: Settings) -> httpx.ASGITransport:
    impatient = settings.model_copy(update={"patience_s": 0.1})
    service = create_service(impatient, Store("redis://127.0.0.1:1"))
    return httpx.ASGITransport(app=service.app)


@pytest.fixture
async def http(transport: httpx.ASGITransport) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, base_url="http://host:8000") as http:
        yield http


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def create(http: httpx.AsyncClient, name: str, access: str) -> str:
    body = {"name": name, "access": access}
    made = await http.post("/v1/keys", json=body, headers=bearer(ROOT))
    assert (made.status_code, made.headers["location"]) == (201, f"/v1/keys/{name}")
    secret = made.json()["secret"]
    assert SECRET.fullmatch(secret)
    return secret


async def test_a_key_may_read_or_change_and_never_make_keys(http: httpx.AsyncClient) -> None:
    reads = bearer(await create(http, "dashboard", "read"))
    full = bearer(await create(http, "train-bot", "full"))
    upload = {"files": ROWS, "data": {"purpose": "fine-tune"}}
    assert (await http.get("/v1/files", headers=reads)).status_code == 200
    assert (await http.get("/metrics", headers=reads)).status_code == 200
    refused = await http.post("/v1/files", headers=reads, **upload)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert refused.json()["detail"] == (
        "key 'dashboard' has access 'read', and POST /v1/files changes something"
    )
    assert (await http.post("/v1/files", headers=full, **upload)).status_code == 200
    for method, path, _ in GUARDED:
        refused = await http.request(method, path, headers=full, json={})
        assert refused.status_code == 403, path
        assert refused.json()["detail"].endswith("is for HONE_TOKEN only, not for key 'train-bot'")


async def test_a_key_is_answered_until_it_is_revoked_and_a_made_up_one_never(
    http: httpx.AsyncClient,
) -> None:
    secret = await create(http, "dashboard", "read")
    listed = (await http.get("/v1/keys", headers=bearer(ROOT))).json()["keys"]
    assert [(key["name"], key["access"]) for key in listed] == [("dashboard", "read")]
    assert "secret" not in listed[0] and "digest" not in listed[0]
    for token in (secret[:-1], secret[:-1] + "~", "hone_other_" + 43 * "x", "x", secret + " x"):
        refused = await http.get("/v1/files", headers=bearer(token))
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized"), token
    again = await http.post("/v1/keys", json={"name": "dashboard"}, headers=bearer(ROOT))
    assert again.status_code == 409 and "revoke it" in again.json()["detail"]
    assert (await http.get("/v1/files", headers=bearer(secret))).status_code == 200
    path = "/v1/keys/dashboard"
    assert (await http.delete(path, headers=bearer(ROOT))).json() == {"name": "dashboard"}
    assert (await http.get("/v1/files", headers=bearer(secret))).status_code == 401
    assert (await http.delete(path, headers=bearer(ROOT))).json() == {"name": "dashboard"}
    never = await http.delete("/v1/keys/other", headers=bearer(ROOT))
    assert (never.status_code, never.json()["code"]) == (404, "not_found")
    other = await create(http, "dashboard", "full")
    assert other != secret
    assert (await http.get("/v1/files", headers=bearer(secret))).status_code == 401


async def test_a_key_file_is_its_owners_alone_and_has_no_secret(
    http: httpx.AsyncClient, settings: Settings
) -> None:
    secret = await create(http, "dashboard", "read")
    (file,) = (settings.runs_dir / ".keys").iterdir()
    assert (settings.runs_dir / ".keys").stat().st_mode & 0o777 == 0o700
    assert secret not in file.read_text() and json.loads(file.read_text())["name"] == "dashboard"


async def test_no_operation_keeps_the_secret_of_a_new_key(http: httpx.AsyncClient) -> None:
    headers = bearer(ROOT) | {"prefer": "respond-async", "idempotency-key": "one"}
    made = await http.post("/v1/keys", json={"name": "a"}, headers=headers)
    assert made.status_code == 201 and SECRET.fullmatch(made.json()["secret"])
    again = await http.post("/v1/keys", json={"name": "a"}, headers=headers)
    assert (again.status_code, again.json()["code"]) == (409, "conflict")


async def test_no_spelling_of_a_path_goes_past_what_a_key_may(
    http: httpx.AsyncClient, settings: Settings
) -> None:
    keys = {access: bearer(await create(http, access, access)) for access in ("full", "read")}
    for method, path, access in GUARDED:
        for end, status in (("", 403), ("%0A", 404), ("%0D", 404), ("%0d%0a", 404), ("/", 307)):
            body = {"name": "other"}
            asked = await http.request(method, path + end, headers=keys[access], json=body)
            assert asked.status_code == status, (path + end, asked.text)
    assert [key.name for key in Keys(settings.runs_dir).list()] == ["full", "read"]


async def test_a_key_file_that_is_not_valid_is_no_key(
    http: httpx.AsyncClient, settings: Settings
) -> None:
    secret = await create(http, "dashboard", "read")
    await create(http, "bot", "full")
    (settings.runs_dir / ".keys" / "dashboard.key").write_text("{")
    assert (await http.get("/v1/files", headers=bearer(secret))).status_code == 401
    listed = (await http.get("/v1/keys", headers=bearer(ROOT))).json()["keys"]
    assert [key["name"] for key in listed] == ["bot"]


async def test_a_key_file_that_cannot_be_read_is_a_fault_of_the_service(
    http: httpx.AsyncClient, settings: Settings
) -> None:
    secret = await create(http, "dashboard", "read")
    file = settings.runs_dir / ".keys" / "dashboard.key"
    file.unlink()
    file.mkdir()
    refused = await http.get("/v1/files", headers=bearer(secret))
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert refused.json()["detail"] == (
        f"the API keys in '{file.parent}' cannot be read: Is a directory; check the folder's owner "
        "and its disk"
    )


async def test_a_key_is_checked_while_all_threads_are_busy(http: httpx.AsyncClient) -> None:
    await create(http, "dashboard", "read")
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(release.wait, 60))
    try:
        async with asyncio.timeout(90):
            wrong = await http.get("/v1/files", headers=bearer("hone_dashboard_" + 43 * "x"))
            assert wrong.status_code == 401
    finally:
        release.set()
        await busy


async def test_a_file_of_the_host_is_read_for_the_token_and_for_no_key(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1"}\n')
    job = {
        "name": "mine",
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "steps": 1,
        "data": {"train": str(rows)},
        "rewards": [{"name": "r", "grader": "exact_match"}],
    }
    key = bearer(await create(http, "bot", "full"))
    refused = await http.post("/v1/jobs/dry_run", json={"job": job}, headers=key)
    assert refused.status_code == 422
    assert "below these folders only: none, as HONE_DATA_DIRS is not set" in refused.text
    allowed = await http.post("/v1/jobs/dry_run", json={"job": job}, headers=bearer(ROOT))
    assert "below these folders" not in allowed.text


async def test_a_models_folder_is_named_by_the_token_and_by_no_key(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = str(tmp_path / "models" / "private")
    job = {
        "name": "mine",
        "model": model,
        "steps": 1,
        "data": {"train": [{"prompt": "1"}], "eval": [{"prompt": "1"}]},
        "rewards": [{"name": "r", "grader": "exact_match"}],
    }
    other = {"model": "owner/model", "steps": 0, "evaluation": {"models": [{"model": model}]}}
    key = bearer(await create(http, "bot", "full"))
    for path, body in (
        ("/v1/jobs/dry_run", {"job": job}),
        ("/v1/jobs/plan", {"job": job}),
        ("/v1/jobs/dry_run", {"job": job | other}),
    ):
        refused = await http.post(path, json=body, headers=key)
        assert refused.status_code == 422
        assert "as HONE_MODEL_DIRS is not set" in refused.json()["detail"]
        answered = await http.post(path, json=body, headers=bearer(ROOT))
        assert "there is no folder" in answered.json()["detail"]


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "../x", "a" * 41, "a\n"])
async def test_a_name_that_could_be_no_file_is_refused(http: httpx.AsyncClient, name: str) -> None:
    made = await http.post("/v1/keys", json={"name": name}, headers=bearer(ROOT))
    assert made.status_code == 422


async def test_without_a_token_there_is_nothing_to_have_keys_for(settings: Settings) -> None:
    open_to_all = settings.model_copy(update={"token": None})
    service = create_service(open_to_all, Store("redis://127.0.0.1:1"))
    async with in_process(service.app) as http:
        made = await http.post("/v1/keys", json={"name": "a"})
    assert made.status_code == 422 and "has no HONE_TOKEN" in made.json()["detail"]


async def test_the_log_has_the_name_of_the_key_and_not_its_secret(
    http: httpx.AsyncClient, settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = await create(http, "dashboard", "read")
    logs.configure("orchestrator", settings.model_copy(update={"log_level": "info"}))
    await http.get(f"/v1/files/{secret}", headers=bearer(secret))
    line = json.loads(capfd.readouterr().err.strip().splitlines()[-1])
    assert (line["event"], line["key"]) == ("request", "dashboard")
    assert line["path"] == "/v1/files/hone_dashboard_***"
    await http.post("/v1/keys", json={"name": "a"}, headers=bearer(secret))
    line = json.loads(capfd.readouterr().err.strip().splitlines()[-1])
    assert (line["status"], line["key"]) == (403, "dashboard"), "what it may not do is logged too"


def test_keys_of_a_folder_are_those_of_every_orchestrator_with_it(tmp_path: Path) -> None:
    secret = Keys(tmp_path).create("a", "full").secret
    assert [key.name for key in Keys(tmp_path).list()] == ["a"] and secret.startswith("hone_a_")
    Keys(tmp_path).revoke("a")
    assert Keys(tmp_path).list() == []


def test_keys_are_made_listed_and_revoked_by_commands(
    transport: httpx.ASGITransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = hone.Client(token=ROOT)
    client._asynchronous._calls.client = shared_client.Client(
        "orchestrator", "http://host:8000", token=ROOT, transport=transport
    )

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["keys", *arguments])
        assert result.exit_code == (2 if "hone: " in result.output else 0), result.output
        return result.output

    logs.to_stderr()
    monkeypatch.setattr(stack, "connect", lambda: contextlib.nullcontext(client))
    assert run("list") == "no keys yet; `hone keys create NAME` makes one\n"
    made = run("create", "dashboard", "--read-only").splitlines()
    assert SECRET.fullmatch(made[0])
    assert made[1] == "key dashboard may read; clients send it in place of HONE_TOKEN"
    assert json.loads(run("create", "bot", "-o", "json"))["access"] == "full"
    assert [line.split()[:2] for line in run("list").splitlines()[1:]] == [
        ["bot", "full"],
        ["dashboard", "read"],
    ]
    assert run("revoke", "bot") == "key bot is revoked\n"
    assert run("revoke", "bot") == "key bot is revoked\n"
    assert "no key 'boot'" in run("revoke", "boot")
    assert "'name': got 'A B'" in run("create", "A B")
    client.close()
