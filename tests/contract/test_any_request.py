"""Whatever is sent to a service, it answers as its OpenAPI document says, and never with a 5xx."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import requests
from fastapi.responses import JSONResponse
from huggingface_hub.errors import RepositoryNotFoundError

from services.orchestrator.app import create_service as create_orchestrator
from services.orchestrator.store.store import Store
from services.reward.app import create_service as create_reward
from services.rollout.weights.copies import Fetcher
from services.trainer.app import create_service as create_trainer
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import JobRecord, ModelRequest, ServingWeights, SubmitRequest
from tests.contract.test_trainer_contract import OneRank
from tests.support import orchestrator_stack, rollout_bench
from tests.support.fake_services import FakeServices
from tests.support.fuzzing import TIMEOUT_S, Fuzzed, fuzz
from tests.support.rollout_bench import RolloutBench
from tests.support.running import served
from tests.support.trainer_fakes import make_trainer

job = orchestrator_stack.job  # a fixture

NUM_JOBS = 8

Target = Callable[[], contextlib.AbstractAsyncContextManager[Fuzzed]]


def hurry(case: Any) -> None:
    """Lets no request wait for operations as long as it may."""
    if isinstance(case.body, dict) and "wait_s" in case.body:
        case.body["wait_s"] = 0.01


def near(job: Job, file_id: str) -> Callable[[Any], None]:
    """Puts a job that can run in place of half of those that are submitted, with one section of
    what was made up: else hardly any would be accepted."""
    rng = random.Random(0)
    good = job.model_copy(update={"steps": 1}).model_dump(mode="json", exclude_unset=True)

    def adjust(case: Any) -> None:
        hurry(case)
        if not isinstance(case.body, dict) or rng.random() < 0.5:
            return
        if "job" in case.body:
            made_up = case.body["job"] if isinstance(case.body["job"], dict) else {}
            key = rng.choice([*made_up, "name"])
            case.body["job"] = good | {key: made_up.get(key, "demo"), "steps": 1}
        elif "training_file" in case.body:
            case.body["training_file"] = file_id
            case.body["hone"] = {"steps": 1, "data": {"columns": {}}}

    return adjust


async def uploaded(url: str) -> str:
    """Returns the id of a file with rows."""
    async with httpx.AsyncClient(base_url=url) as http:
        rows = b"".join(b'{"prompt": "%d?", "answer": "1"}\n' % number for number in range(8))
        file = {"file": ("rows.jsonl", rows)}
        made = await http.post("/v1/files", files=file, data={"purpose": "fine-tune"})
        return made.raise_for_status().json()["id"]


@pytest.fixture
def targets(
    settings: Settings,
    redis_url: str,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Target]:
    """Each service as it is, with fakes where it meets an engine, the Hub or another service."""

    @contextlib.asynccontextmanager
    async def orchestrator() -> AsyncGenerator[Fuzzed]:
        without_hub(monkeypatch)
        fakes, store = FakeServices(settings), Store(redis_url)
        serve_a_model(fakes)
        await store.open()
        async with fakes.running(settings) as own:
            service = create_orchestrator(own, store)
            async with served(service.server(0)) as url, Client("orchestrator", url) as client:
                body, file_id = SubmitRequest(job=job), await uploaded(url)
                ids = [
                    (await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)).id
                    for _ in range(NUM_JOBS)
                ]
                known = {"job_id": ids, "file_id": [file_id], "model_id": ["policy"]}
                yield Fuzzed(service, url, known, near(job, file_id))

    @contextlib.asynccontextmanager
    async def rollout() -> AsyncGenerator[Fuzzed]:
        at_once = functools.partial(Fetcher, patience_s=0.0)
        monkeypatch.setattr(rollout_bench, "Fetcher", at_once)
        bench = RolloutBench(tmp_path / "rollout")

        def wake(case: Any, _answer: Any) -> None:
            """What is paused would wait for ever, and what sleeps is unavailable, as it should."""
            for engine in bench.engines:
                engine.frozen.set()
            if case.path == "/sleep":
                model = {"model": f"tiny-{len(bench.engines)}"}
                requests.put(f"{url}/model", json=model, timeout=TIMEOUT_S).raise_for_status()

        async with served(bench.service.server(0)) as url, Client("rollout", url) as client:
            spec = ModelRequest(model="tiny")
            await client.call("PUT", "/model", spec, ServingWeights, deadline_s=60)
            yield Fuzzed(bench.service, url, {}, hurry, wake, frozenset({"POST /reload_weights"}))

    @contextlib.asynccontextmanager
    async def trainer() -> AsyncGenerator[Fuzzed]:
        rank = OneRank(make_trainer(tmp_path)[0])
        service = create_trainer(settings, rank.trainer, rank.run, {})
        async with served(service.server(0)) as url:
            yield Fuzzed(service, url, {}, hurry)

    @contextlib.asynccontextmanager
    async def reward() -> AsyncGenerator[Fuzzed]:
        service = create_reward(settings)
        async with served(service.server(0)) as url:
            yield Fuzzed(service, url, {}, hurry)

    return {"orchestrator": orchestrator, "rollout": rollout, "trainer": trainer, "reward": reward}


def without_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the Hub have nothing."""
    absent = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))

    def unknown(*_: Any, **__: Any) -> None:
        raise RepositoryNotFoundError("404", response=absent)  # type: ignore[arg-type]

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unknown)


def serve_a_model(fakes: FakeServices) -> None:
    app = fakes.service("rollout").app

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})


async def check(target: Target, num_cases: int) -> None:
    async with target() as fuzzed:
        findings = await asyncio.to_thread(fuzz, fuzzed, num_cases)
    for kind, shown in findings.faults.items():
        print(f"--- {kind}\n{shown}")
    print(f"{num_cases} requests, by status: {dict(sorted(findings.statuses.items()))}")
    assert not findings.faults
    assert sum(findings.statuses.values()) >= num_cases


@pytest.mark.slow
@pytest.mark.parametrize("name", ["orchestrator", "rollout", "trainer", "reward"])
async def test_a_service_answers_as_documented(targets: dict[str, Target], name: str) -> None:
    await check(targets[name], 50)


ODD_VALUES = (
    *(None, True, 0, -1, 2**31, 2**63, -(10**400), 1e308, 0.5),
    *("", " ", "\x00", "\ud800", "é" * 200, "../..", "x-1", "NaN", "{{ x", "file-" + 24 * "0"),
    *([], {}, [[]], {"": ""}, [None], {"x": 1}),
)


def with_one_change(rng: random.Random, document: Any) -> Any:
    """Returns the document with one value, anywhere in it, replaced, removed or added."""
    if not isinstance(document, dict | list) or not document or rng.random() < 0.2:
        return rng.choice(ODD_VALUES)
    if isinstance(document, list):
        place = rng.randrange(len(document))
        return [*document[:place], with_one_change(rng, document[place]), *document[place + 1 :]]
    key = rng.choice([*document])
    what = rng.random()
    if what < 0.1:
        return {name: value for name, value in document.items() if name != key}
    if what < 0.2:
        return document | {f"{key}s": document[key]}
    return document | {key: with_one_change(rng, document[key])}


async def check_changed_jobs(target: Target, job: Job, num_cases: int) -> None:
    """Sends a job that trains, or one that only evaluates, with one change, as JSON."""
    rng = random.Random(0)
    good = job.model_copy(update={"steps": 1}).model_dump(mode="json")
    models = {"models": [{"name": "a", "model": "owner/model"}]}
    evaluates = good | {"steps": 0, "evaluation": good["evaluation"] | models}
    statuses = Counter[int]()
    async with target() as fuzzed, httpx.AsyncClient(base_url=fuzzed.url, timeout=60) as http:
        for _ in range(num_cases):
            content = json.dumps(with_one_change(rng, {"job": rng.choice([good, evaluates])}))
            headers = {"content-type": "application/json"}
            answer = await http.post("/v1/jobs/dry_run", content=content, headers=headers)
            statuses[answer.status_code] += 1
            assert answer.status_code in (200, 400, 404, 409, 422), f"{answer.text}\n{content}"
            assert answer.status_code == 200 or answer.json()["detail"], content
    print(f"{num_cases} changed jobs, by status: {dict(sorted(statuses.items()))}")
    assert statuses[422] > num_cases / 4, "most changes are faults"


@pytest.mark.slow
async def test_a_job_with_one_change_is_tried_or_refused_by_a_sentence(
    targets: dict[str, Target], job: Job
) -> None:
    await check_changed_jobs(targets["orchestrator"], job, 40)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_3000_jobs_with_one_change_are_tried_or_refused_by_a_sentence(
    targets: dict[str, Target], job: Job
) -> None:
    await check_changed_jobs(targets["orchestrator"], job, 3000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["orchestrator", "rollout", "trainer", "reward"])
async def test_a_service_answers_any_of_2000_requests_as_documented(
    targets: dict[str, Target], name: str
) -> None:
    await check(targets[name], 2000)
