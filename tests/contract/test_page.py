"""The page's files over HTTP, who may act through a browser, and what charts are given."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2 as httpx
import pytest
from pydantic import SecretStr

from services.orchestrator.api import rollouts as stored_rollouts
from services.orchestrator.api import stack as looking
from services.orchestrator.api.history import columns
from services.orchestrator.app import create_service
from services.orchestrator.extensions.diagnosis.facts import alone
from services.orchestrator.extensions.page import routes
from services.orchestrator.extensions.page.view import create_view, run_folders
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.records import WAS_DELETED, find_runs
from services.orchestrator.store.store import Store
from shared.errors import BadRequest
from shared.host.processes import free_port
from shared.job import Job
from shared.settings import Settings
from shared.wire import MetricsRow, ServiceList
from tests.support import orchestrator_stack
from tests.support.in_process import in_process
from tests.support.orchestrator_stack import Stack

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

NOBODY = "redis://127.0.0.1:1"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


@pytest.fixture
async def http(settings: Settings) -> AsyncGenerator[httpx.AsyncClient]:
    """The orchestrator without a Redis that answers: the files need none."""
    async with client_of(settings) as client:
        yield client


def client_of(settings: Settings) -> httpx.AsyncClient:
    return in_process(create_service(settings, Store(NOBODY), works=False).app)


async def test_the_page_is_at_the_root_under_a_strict_policy(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "<script" in page.text and not re.search(r"<script(?![^>]*src=)", page.text)
    assert not re.search(r"\bon\w+=|\bstyle=|https?://", page.text)


async def test_every_file_that_the_page_names_is_there_with_its_type(
    http: httpx.AsyncClient,
) -> None:
    seen, wanted = set[str](), ["page/app.js", "page/meanings.json"]
    wanted += re.findall(r'(?:href|src)="([^"]+)"', (await http.get("/")).text)
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        file = await http.get(f"/{name}")
        assert file.status_code == 200, name
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        kind |= {"json": "application/json"}
        assert file.headers["content-type"].startswith(kind[name.rpartition(".")[2]]), name
        if name.endswith(".js"):
            folder = name.rpartition("/")[0]
            wanted += [
                f"{folder}/{found}" for found in re.findall(r'from ?"\./([^"]+)"', file.text)
            ]
    assert {"page/vendor/preact.js", "page/vendor/uplot.js", "page/jobs.js"} <= seen


async def test_a_browser_asks_again_and_gets_a_file_once(http: httpx.AsyncClient) -> None:
    first = await http.get("/page/app.js", headers={"accept-encoding": "gzip"})
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["content-encoding"] == "gzip"
    plain = await http.get("/page/app.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.text == first.text
    again = await http.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = await http.head("/page/app.js", headers={"accept-encoding": "identity"})
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(plain.content))


async def test_only_the_pages_own_files_are_served(http: httpx.AsyncClient) -> None:
    for path in (
        *("/page/nothing.js", "/page/", "/page/../app.py", "/page/routes.py"),
        *("/page/vendor/SHA256SUMS", "/page/%2e%2e/app.py"),
    ):
        answer = await http.get(path)
        assert answer.status_code == 404 and answer.json()["status"] == 404, path


async def test_with_a_token_the_files_are_public_and_nothing_else_is(settings: Settings) -> None:
    async with client_of(settings.model_copy(update={"token": SecretStr("secret")})) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.head("/page/app.js")).status_code == 200
        assert (await http.get("/v1/jobs")).status_code == 401
        assert (await http.post("/page/app.js")).status_code == 401
        assert (await http.get("/metrics")).status_code == 401


async def test_a_page_of_another_site_changes_nothing(http: httpx.AsyncClient) -> None:
    foreign = {"origin": "https://example.org"}
    for method, path in (
        *(("POST", "/v1/jobs/a-1/cancel"), ("DELETE", "/v1/jobs/a-1"), ("POST", "/v1/jobs")),
        ("POST", "/v1/recover"),
    ):
        for headers in (foreign, {"origin": "null"}, {"origin": "http://localhost:1"}):
            answer = await http.request(method, path, headers=headers)
            assert answer.status_code == 403, (path, headers, answer.text)
            assert "a page of another site may change nothing here" in answer.json()["detail"]
    own = await http.post("/v1/jobs/a-1/cancel", headers={"origin": "http://localhost"})
    assert own.status_code == 503, "let through to Redis, which does not answer"
    assert (await http.get("/healthz", headers=foreign)).status_code == 200


async def test_a_token_that_the_browser_adds_automatically_is_none(settings: Settings) -> None:
    async with client_of(settings.model_copy(update={"token": SecretStr("secret")})) as http:
        for scheme, status in (("Basic aG9uZTpzZWNyZXQ=", 403), ("Bearer secret", 503)):
            headers = {"authorization": scheme, "origin": "https://example.org"}
            answer = await http.post("/v1/jobs/a-1/cancel", headers=headers)
            assert answer.status_code == status, answer.text


ROWS = [
    MetricsRow(step=step, metrics={"reward": step / 7, "loss": 1.0})
    if step % 40
    else MetricsRow(step=step, metrics={"eval/reward": 0.5})
    for step in range(101)
]


def test_columns_are_of_the_metrics_that_were_asked_for() -> None:
    found = columns(ROWS[:3], ["rew*", "eval/reward"], 100)
    assert found.steps == (0, 1, 2) and found.names == ("eval/reward", "loss", "reward")
    assert found.columns == {
        "reward": (None, 0.1428571, 0.2857143),
        "eval/reward": (0.5, None, None),
    }
    assert set(columns(ROWS[:3], [], 100).columns) == {"reward", "loss", "eval/reward"}


def test_columns_of_a_long_run_are_even_steps_and_the_evaluations() -> None:
    found = columns(ROWS, ["reward"], 5)
    assert (found.steps, found.num_steps) == ((0, 25, 40, 50, 75, 80, 100), 101)


@pytest.mark.slow
async def test_a_jobs_columns_are_its_metrics(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    path = f"/v1/jobs/{record.id}/metrics/columns"
    found = (await stack.http.get(f"{path}?names=reward,eval/*&after_step=1&to_step=4")).json()
    assert found["steps"] == [2, 3, 4] and found["num_steps"] == 3
    assert found["columns"]["eval/reward"][:2] == [None, None] and "loss" in found["names"]
    zipped = await stack.http.get(path, headers={"accept-encoding": "gzip"})
    assert zipped.headers["content-encoding"] == "gzip" and zipped.json()["num_steps"] == 9
    refused = await stack.http.get(f"{path}?points=1")
    assert refused.status_code == 422


@pytest.mark.slow
async def test_groups_tell_in_brief_what_their_rollouts_have(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rollouts, "LOOK_S", 60.0)
    sampling = stack.job.sampling.model_copy(update={"prompts_per_step": 6})
    record = await stack.run(sampling=sampling)
    at = f"/v1/jobs/{record.id}"
    listed = (await stack.http.get(f"{at}/rollouts/groups?step=4")).json()
    assert (listed["step"], len(listed["groups"])) == (4, 6) and listed["steps"] == [*range(1, 9)]
    group = listed["groups"][2]
    page = await stack.http.get(f"{at}/rollouts?step=4&after={group['first']}&limit=4&detail=true")
    rollouts = page.json()["rollouts"]
    assert group["rewards"] == [rollout["reward"] for rollout in rollouts]
    assert {rollout["prompt_index"] for rollout in rollouts} == {group["prompt_index"]}
    assert group["prompt"] == rollouts[0]["prompt"] and group["num_tokens"] == [2] * 4
    detail = rollouts[0]["detail"]
    assert detail["row"]["answer"] == group["prompt_index"] and detail["num_tokens"] == 2
    assert detail["tokens"] is None and "is not in the Hugging Face cache" in detail["no_tokens"]
    searched = (await stack.http.get(f"{at}/rollouts/groups?step=4&search=RIGHT")).json()["groups"]
    rights = [[at for at, reward in enumerate(one["rewards"]) if reward] for one in searched]
    assert rights == [one["found"] for one in searched] and rights
    of_prompt = (
        await stack.http.get(f"{at}/rollouts/groups?step=4&search={group['prompt']}")
    ).json()
    assert [0, 1, 2, 3] in [one["found"] for one in of_prompt["groups"]]
    problem = (await stack.http.get(f"{at}/problems/{group['prompt_index']}")).json()
    steps = [one["step"] for one in problem["steps"]]
    assert 4 in steps and steps == sorted(steps, reverse=True) and problem["next_before"] is None
    first = (await stack.http.get(f"{at}/problems/{group['prompt_index']}?limit=1")).json()
    assert [one["step"] for one in first["steps"]] == steps[:1]
    missing = await stack.http.get(f"{at}/rollouts/groups?step=99")
    assert missing.status_code == 404 and "steps 1 to 8 have" in missing.json()["detail"]


@pytest.mark.slow
async def test_run_folders_alone_give_the_same_answers_as_the_orchestrator(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rollouts, "LOOK_S", 60.0)
    sampling = stack.job.sampling.model_copy(update={"prompts_per_step": 6})
    record = await stack.run(sampling=sampling)
    await orchestrator_stack.until_noted(stack.folder(record.id), "succeeded")
    service = create_view(stack.settings, [stack.folder(record.id).path])
    async with in_process(service.app) as http:
        at = f"/v1/jobs/{record.id}"
        for path in (
            *(f"{at}/metrics", f"{at}/metrics/columns?names=reward", f"{at}/rollouts?step=3"),
            *(f"{at}/rollouts/groups?step=3", f"{at}/problems/1", f"{at}/syncs"),
            f"{at}/findings",
        ):
            assert (await http.get(path)).json() == (await stack.http.get(path)).json(), path
        kept = [(await each.get(f"{at}/checkpoints")).json() for each in (http, stack.http)]
        steps = [[one["step"] for one in each["checkpoints"]] for each in kept]
        assert steps[0] == steps[1] != []
        own, theirs = (await http.get(at)).json(), (await stack.http.get(at)).json()
        same = ("id", "name", "status", "step", "steps", "reward", "run_dir", "job", "summary")
        assert {name: own[name] for name in same} == {name: theirs[name] for name in same}
        (listed,) = (await http.get("/v1/jobs")).json()["jobs"]
        assert listed["id"] == record.id and listed["status"] == "succeeded"
        told = (await http.get(f"{at}/events")).json()["events"]
        assert [event["data"]["step"] for event in told] == list(range(1, 9))
        newest = (await http.get(f"{at}/events?last=1")).json()["events"]
        assert newest == told[-1:]
        stream = await http.get(f"{at}/events", headers={"accept": "text/event-stream"})
        assert stream.text.count("event: step") == 8 and stream.text.endswith("{}\n\n")
        assert (await http.get("/version")).json()["read_only"] is True
        assert (await http.get("/")).status_code == 200
        assert (await http.post(f"{at}/cancel")).status_code == 404
        assert (await http.get("/v1/jobs/other-1")).status_code == 404


def test_files_are_small_and_packed_once() -> None:
    files = routes._files()
    assert sum(len(file.zipped or file.data) for file in files.values()) < 152_000
    app = files["app.js"]
    assert gzip.decompress(app.zipped) == app.data
    assert isinstance(json.loads(files["meanings.json"].data), list)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="has no run folder; expected runs/<job>, or runs"):
        run_folders([tmp_path])


async def test_services_say_what_they_serve_and_since_when_they_are_unreachable(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await stack.until((await stack.submit()).id)
    trainer, sampler, reward = (await stack.client.get("/v1/services", ServiceList)).services
    assert trainer.trainer and trainer.trainer.step == record.steps
    assert sampler.sampler and sampler.sampler.version == record.steps
    assert reward.answered_at and reward.gauges["memory_bytes"] > 10e6
    assert [one.error for one in (trainer, sampler, reward)] == [None] * 3
    monkeypatch.setattr(looking, "FRESH_S", 0.0)
    stack.settings.__dict__["reward_url"] = f"http://127.0.0.1:{free_port()}"
    away = (await stack.client.get("/v1/services", ServiceList)).services[-1]
    assert away.error == "it does not answer (ConnectError)" and away.answered_at is None
    stack.settings.__dict__["trainer_url"] = stack.settings.rollout_urls[0]
    odd = (await stack.client.get("/v1/services", ServiceList)).services[0]
    assert (odd.error, odd.trainer) == ("it answers with status 404", None)


async def test_folders_of_deleted_jobs_are_shown_and_an_unreadable_one_hides_none(
    settings: Settings, job: Job, tmp_path: Path
) -> None:
    """`hone rm` keeps the run folder, which is all that is left to look at."""
    for name in ("deleted-1", "other-1", "torn-1"):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        (folder.path / "job.json").write_text(job.model_dump_json())
        folder.write_note(Note(created_at=1.0, finished_at=2.0, status="succeeded"))
    RunFolder(tmp_path / "deleted-1").mark_deleted()
    (tmp_path / "torn-1/job.json").write_text("{")
    assert find_runs(tmp_path)[0].problem == WAS_DELETED
    assert alone(tmp_path / "deleted-1")[1].status == "succeeded"
    service = create_view(settings, run_folders([tmp_path]))
    async with in_process(service.app) as http:
        listed = (await http.get("/v1/jobs")).json()
        shown = {one["id"]: one["status"] for one in listed["jobs"]}
        assert shown == {"deleted-1": "succeeded", "other-1": "succeeded"}
        assert listed["unreadable"] == ["torn-1"]
        torn = await http.get("/v1/jobs/torn-1")
        assert torn.status_code == 422
        assert torn.json()["detail"].startswith(f"{str(tmp_path / 'torn-1')!r} cannot be read: ")
