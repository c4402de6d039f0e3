"""Named API keys: what each allows, what is kept of it, and that it is void once it was revoked."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2 as httpx
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

import hone
from hone.cli import app
from hone.commands import keys as commands
from services.orchestrator.api.access import Keys
from services.orchestrator.app import create_service
from services.orchestrator.queue.store import Store
from shared import client as shared_client
from shared import logs
from shared.config import Settings

ROOT = "root-token-of-the-stack"
SECRET = re.compile(r"hone_[a-z0-9-]+_[A-Za-z0-9_-]{43}")
ROWS = {"file": ("rows.jsonl", b'{"prompt": "1"}\n')}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"token": SecretStr(ROOT)})


@pytest.fixture
def transport(settings: Settings) -> httpx.ASGITransport:
    service = create_service(settings, Store("redis://127.0.0.1:1"))
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
        "key 'dashboard' may only read, and POST /v1/files is a change"
    )
    assert (await http.post("/v1/files", headers=full, **upload)).status_code == 200
    for method, path in (
        ("POST", "/v1/keys"),
        ("GET", "/v1/keys"),
        ("DELETE", "/v1/keys/dashboard"),
        ("PUT", "/v1/samplers/mine"),
        ("DELETE", "/v1/samplers/mine"),
        ("POST", "/v1/recover"),
    ):
        refused = await http.request(method, path, headers=full, json={})
        assert refused.status_code == 403, path
        assert refused.json()["detail"].endswith("is for HONE_TOKEN only, not for key 'train-bot'")


async def test_a_key_that_was_revoked_or_made_up_is_refused(http: httpx.AsyncClient) -> None:
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
    assert (await http.delete(path, headers=bearer(ROOT))).status_code == 404
    other = await create(http, "dashboard", "full")
    assert other != secret
    assert (await http.get("/v1/files", headers=bearer(secret))).status_code == 401


async def test_the_secret_is_kept_nowhere(http: httpx.AsyncClient, settings: Settings) -> None:
    secret = await create(http, "dashboard", "read")
    (file,) = (settings.runs_dir / ".keys").iterdir()
    assert (settings.runs_dir / ".keys").stat().st_mode & 0o777 == 0o700
    assert secret not in file.read_text() and json.loads(file.read_text())["name"] == "dashboard"


async def test_a_retry_of_making_a_key_gets_the_same_secret(http: httpx.AsyncClient) -> None:
    headers = bearer(ROOT) | {"idempotency-key": "one"}
    made = [await http.post("/v1/keys", json={"name": "a"}, headers=headers) for _ in range(2)]
    assert made[0].json() == made[1].json()


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "../x", "a" * 41, "a\n"])
async def test_a_name_that_could_be_no_file_is_refused(http: httpx.AsyncClient, name: str) -> None:
    made = await http.post("/v1/keys", json={"name": name}, headers=bearer(ROOT))
    assert made.status_code == 422


async def test_without_a_token_there_is_nothing_to_have_keys_for(settings: Settings) -> None:
    open_to_all = settings.model_copy(update={"token": None})
    service = create_service(open_to_all, Store("redis://127.0.0.1:1"))
    transport = httpx.ASGITransport(app=service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
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


def test_keys_of_a_folder_are_those_of_every_orchestrator_with_it(tmp_path: Path) -> None:
    secret = Keys(tmp_path).create("a", "full").secret
    assert [key.name for key in Keys(tmp_path).list()] == ["a"] and secret.startswith("hone_a_")
    Keys(tmp_path).revoke("a")
    assert Keys(tmp_path).list() == []


def test_keys_are_made_listed_and_revoked_by_commands(
    transport: httpx.ASGITransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = hone.Client(token=ROOT)
    client._client = shared_client.Client(
        "orchestrator", "http://host:8000", token=ROOT, transport=transport
    )

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["keys", *arguments])
        assert result.exit_code == (2 if "hone: " in result.output else 0), result.output
        return result.output

    logs.to_stderr()
    monkeypatch.setattr(commands, "connect", lambda: contextlib.nullcontext(client))
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
    assert "no key 'bot'" in run("revoke", "bot")
    assert "'name': got 'A B'" in run("create", "A B")
    client.close()
