"""The `openai` client, with nothing changed but its address: files, graders, jobs, models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from services.orchestrator.extensions.openai.calling import Calls
from services.orchestrator.extensions.openai.fine_tuning import add_grader_routes
from services.orchestrator.store import keys
from shared.errors import BadRequest, Unavailable
from shared.http.operations import client_gone
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import Checkpoint
from tests.support import orchestrator_stack
from tests.support.lazily import Package
from tests.support.orchestrator_stack import Stack
from tests.support.reward_service import running_service

anthropic, openai = Package("anthropic"), Package("openai")

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

GRADER: Any = {
    "type": "string_check",
    "name": "same",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}

METHOD: Any = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}


def openai_client(app: FastAPI) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
    )


@pytest.fixture
async def client(stack: Stack) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai_client(stack.app) as client:
        yield client


async def upload(client: openai.AsyncOpenAI, count: int) -> str:
    rows = [
        {"messages": [{"role": "user", "content": f"{number}?"}], "answer": str(number)}
        for number in range(count)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = await client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
    return file.id


async def create(client: openai.AsyncOpenAI, **more: Any) -> Any:
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {
            "grader": GRADER,
            "hyperparameters": {"batch_size": 4, "n_epochs": 2, "eval_interval": 2},
        },
    }
    return await client.fine_tuning.jobs.create(
        model="owner/model",
        training_file=await upload(client, 6),
        validation_file=await upload(client, 2),
        method=method,
        **more,
    )


async def ended(client: openai.AsyncOpenAI, job_id: str) -> Any:
    async with asyncio.timeout(90):
        while (job := await client.fine_tuning.jobs.retrieve(job_id)).finished_at is None:
            await asyncio.sleep(0.02)
    return job


async def test_a_job_is_submitted_followed_and_listed(client: openai.AsyncOpenAI):
    job = await create(client, suffix="sums", seed=3, metadata={"team": "a"})
    assert job.object == "fine_tuning.job" and job.id.startswith("sums-")
    done = await ended(client, job.id)
    assert (done.status, done.fine_tuned_model, done.error) == ("succeeded", job.id, None)
    assert (done.seed, done.metadata) == (3, {"team": "a"})
    assert done.method.reinforcement.hyperparameters.n_epochs == 2
    assert done.trained_tokens and done.trained_tokens > 0

    events = [event async for event in client.fine_tuning.jobs.list_events(job.id, limit=3)]
    assert next(event.message for event in events if event.type == "message") == "succeeded"
    steps = [event.data["step"] for event in events if event.type == "metrics"]  # type: ignore[index]
    assert steps[0] == 3 and sorted(set(steps)) == [0, 1, 2, 3], "two passes over 6 rows, by 4"
    assert len({event.id for event in events}) == len(events)

    checkpoints = [one async for one in client.fine_tuning.jobs.checkpoints.list(job.id)]
    assert checkpoints[0].step_number == 3 and checkpoints[0].fine_tuning_job_id == job.id

    other = await create(client)
    listed = [one.id async for one in client.fine_tuning.jobs.list(limit=1)]
    assert listed == [other.id, job.id]
    newest = await client.fine_tuning.jobs.list_events(job.id, limit=2)
    assert newest.data == events[:2] and newest.has_more
    by_metadata = await client.fine_tuning.jobs.list(metadata={"team": "a"})
    assert [one.id for one in by_metadata.data] == [job.id]
    await ended(client, other.id)


async def test_a_list_of_checkpoints_continues_after_one_that_was_removed(
    stack: Stack, client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    job = await ended(client, (await create(client)).id)
    listed = client.fine_tuning.jobs.checkpoints.list
    for step in range(10, 20):
        if step > 17:
            (tmp_path / f"{step}").mkdir()
        made = Checkpoint(step=step, path=f"{tmp_path}/{step}", size_bytes=1).model_dump_json()
        await stack.store._redis.hset(keys.checkpoints(job.id), str(step), made)
    there = [one.step_number for one in (await listed(job.id)).data]
    assert there[:2] == [19, 18] and 15 not in there
    on = await listed(job.id, after=f"ftckpt-{job.id}-15")
    assert ([one.step_number for one in on.data], on.has_more) == (there[2:], False)
    on = await listed(job.id, after=f"ftckpt-{job.id}-19", limit=1)
    assert ([one.step_number for one in on.data], on.has_more) == ([18], len(there) > 2)
    with pytest.raises(openai.UnprocessableEntityError, match="expected the id of a checkpoint"):
        await listed(job.id, after=f"ftckpt-{job.id}-99")


async def test_a_list_continues_past_records_that_cannot_be_read(
    stack: Stack, client: openai.AsyncOpenAI
):
    ids = [(await create(client)).id for _ in range(4)]
    for job_id in ids:
        await ended(client, job_id)
    for job_id in (ids[1], ids[2]):
        await stack.store._redis.hset(keys.job(job_id), "job", "{")
    assert [job.id async for job in client.fine_tuning.jobs.list(limit=1)] == [ids[3], ids[0]]
    first = await client.fine_tuning.jobs.list(limit=3)
    assert [job.id for job in first.data] == [ids[3], ids[0]] and not first.has_more
    for event in ("ftevent-0-0", "ftevent-00-0"):
        page = await client.fine_tuning.jobs.list_events(ids[0], after=event)
        assert page.data == [] and not page.has_more


async def test_a_job_of_the_jobs_api_is_none_of_openais(stack: Stack, client: openai.AsyncOpenAI):
    record = await stack.submit(stack.job.model_copy(update={"steps": 1}))
    with pytest.raises(openai.NotFoundError, match="GET /v1/jobs/"):
        await client.fine_tuning.jobs.retrieve(record.id)
    assert (await client.fine_tuning.jobs.list()).data == []
    await stack.until(record.id)


async def test_a_job_is_paused_resumed_and_cancelled(stack: Stack, client: openai.AsyncOpenAI):
    held = asyncio.Event()

    async def hold(_: Any) -> None:
        await held.wait()

    stack.fakes.fault["train_step"] = hold
    first, second = await create(client), await create(client)
    assert (await client.fine_tuning.jobs.pause(second.id)).status == "paused"  # type: ignore[comparison-overlap]
    assert (await client.fine_tuning.jobs.resume(second.id)).status == "queued"
    assert (await client.fine_tuning.jobs.cancel(second.id)).status == "cancelled"
    await client.fine_tuning.jobs.cancel(first.id)
    assert (await ended(client, first.id)).status == "cancelled"
    held.set()
    with pytest.raises(openai.ConflictError):
        await client.fine_tuning.jobs.resume(first.id)


async def test_chats_and_preferences_are_learned_from(stack: Stack, client: openai.AsyncOpenAI):
    chats = [said("user", "1?"), said("assistant", "one")]
    pair = {
        "input": {"messages": chats[:1]},
        "preferred_output": chats[1:],
        "non_preferred_output": [said("assistant", "two")],
    }
    for row, method in (
        ({"messages": chats}, None),
        (pair, {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 1, "batch_size": 2}}}),
    ):
        content = "".join(json.dumps(row) + "\n" for _ in range(4)).encode()
        file = await client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
        given = {"method": method} if method else {}
        job = await client.fine_tuning.jobs.create(
            model="owner/model", training_file=file.id, validation_file=file.id, **given
        )
        assert (await ended(client, job.id)).status == "succeeded"
        shown = await client.fine_tuning.jobs.retrieve(job.id)
        assert (
            shown.method is not None
            and shown.method.type == (method or {"type": "supervised"})["type"]
        )
        rows = stack.folder(job.id).metrics()
        assert "eval/loss" in rows[-1].metrics
    assert len(stack.fakes.trained[-1].examples) == 4, "two pairs"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def test_what_cannot_be_is_refused_as_openai_does(stack: Stack, client: openai.AsyncOpenAI):
    for method, error in (
        ({"type": "reinforcement"}, "'reinforcement' is missing, which has the grader"),
        ({"type": "supervised", "dpo": {}}, "type is 'supervised' and 'dpo' is set"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=error):
            await client.fine_tuning.jobs.create(
                model="owner/model", training_file="file-x", method=method
            )
    knobs = {"n_epochs": 10**18}  # more passes than a job may have steps
    many = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": knobs}}
    rows = await upload(client, 6)
    for model, method, error in (
        ("gpt-4o-mini", METHOD, "ids of the Hugging Face hub have"),
        ("owner/model", many, "'steps': got"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=error):
            await client.fine_tuning.jobs.create(model=model, training_file=rows, method=method)
    with pytest.raises(openai.UnprocessableEntityError, match=r"'hone\.request'"):
        await create(client, extra_body={"hone": {"request": {"x": 1}}})
    with pytest.raises(BadRequest, match=r"'job\.request': unknown key 'x'"):
        await stack.submit(stack.job.model_copy(update={"request": {"x": 1}}))
    for file, error in (
        ("file-x", "'training_file': got 'file-x'"),
        ("file-" + "0" * 24, "no uploaded file"),
    ):
        with pytest.raises(openai.APIStatusError, match=error) as refused:
            await client.fine_tuning.jobs.create(
                model="owner/model",
                training_file=file,
                method=METHOD,
            )
        assert refused.value.status_code in (404, 422)
    assert (await client.fine_tuning.jobs.list()).data == [], "nothing half-done stays"


async def test_a_job_asked_for_again_with_its_key_is_the_same(client: openai.AsyncOpenAI):
    file, key = await upload(client, 2), {"Idempotency-Key": "mine"}
    asked: Any = {"model": "owner/model", "training_file": file, "method": METHOD}
    ids = [
        (await client.fine_tuning.jobs.create(**asked, extra_headers=headers)).id
        for headers in (key, key, {})
    ]
    assert ids[0] == ids[1] != ids[2]
    with pytest.raises(openai.ConflictError, match="'mine' was used for job"):
        await client.fine_tuning.jobs.create(**asked, seed=1, extra_headers=key)
    for job_id in (ids[0], ids[2]):
        await ended(client, job_id)


async def test_graders_are_validated_and_run_by_the_reward_service(settings: Settings):
    with running_service() as reward:
        service = Service("orchestrator", settings.model_copy(update={"reward_url": reward.url}))
        add_grader_routes(service, service.settings)
        async with openai_client(service.app) as client:
            alpha = client.fine_tuning.alpha.graders
            assert (await alpha.validate(grader=GRADER)).grader is not None
            values: Any = {"type": "python_value", "target": "target", "numbers": "numbers"}
            assert (await alpha.validate(grader=values)).grader is not None, "columns come later"
            answer = await alpha.run(grader=GRADER, model_sample="4", item={"answer": "4"})
            assert (answer.reward, answer.metadata.type) == (1.0, "string_check")
            answer = await alpha.run(grader=GRADER, model_sample="5", item={"answer": "4"})
            assert (answer.reward, answer.metadata.errors.other_error) == (0.0, False)
            with pytest.raises(openai.UnprocessableEntityError, match="operation"):
                await alpha.validate(grader=GRADER | {"operation": "equals"})


async def test_a_model_is_called_where_it_is_served(stack: Stack, client: openai.AsyncOpenAI):
    app = stack.fakes.service("rollout").app

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        served = [{"id": name, "object": "model"} for name in ("owner/model", "policy", "sums-1")]
        return JSONResponse({"object": "list", "data": served})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> JSONResponse | StreamingResponse:
        body = await request.json()
        text = f"{body['model']} says {body['messages'][0]['content']}"
        if text.endswith("goodbye"):  # another job's weights come before it is sampled
            stack.fakes.serving = stack.fakes.serving.model_copy(update={"job_id": "sums-3"})
        said = {"role": "assistant", "content": text}
        if body.get("stream"):
            chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": said}]}
            lines = [f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]
            return StreamingResponse(iter(lines), media_type="text/event-stream")
        choices = [{"index": 0, "message": said}]
        return JSONResponse({"object": "chat.completion", "choices": choices})

    @app.post("/v1/responses", response_model=None)
    @app.post("/v1/messages", response_model=None)
    async def other(request: Request) -> JSONResponse:
        model = (await request.json())["model"]
        said = [{"type": "text", "text": f"{request.url.path} of {model}"}]
        return JSONResponse({"id": "1", "object": "response", "output": [], "content": said})

    assert [model.id async for model in client.models.list()] == ["owner/model", "policy", "sums-1"]
    assert (await client.models.retrieve("owner/model")).id == "owner/model"
    with pytest.raises(openai.NotFoundError, match="'sums-2' is not served now"):
        await client.models.retrieve("sums-2")
    hello: Any = [{"role": "user", "content": "hello"}]
    answer = await client.chat.completions.create(model="sums-1", messages=hello)
    assert answer.choices[0].message.content == "sums-1 says hello"
    stream = await client.chat.completions.create(model="sums-1", messages=hello, stream=True)
    assert [chunk.choices[0].delta.content async for chunk in stream] == ["sums-1 says hello"]
    with pytest.raises(openai.NotFoundError, match="'sums-2' is not served now"):
        await client.chat.completions.create(model="sums-2", messages=hello)
    stack.fakes.serving = stack.fakes.serving.model_copy(update={"job_id": "sums-2"})
    answer = await client.chat.completions.create(model="sums-2", messages=hello)
    assert answer.choices[0].message.content == "policy says hello", "the job trains all weights"
    assert (await client.responses.create(model="policy", input="hello")).id == "1"
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=stack.app))
    claude = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="a", http_client=http)
    message = await claude.messages.create(model="sums-2", messages=hello, max_tokens=9)
    assert message.content[0].text == "/v1/messages of policy"  # pyright: ignore
    message = await claude.beta.messages.create(model="policy", messages=hello, max_tokens=9)
    assert message.content[0].text == "/v1/messages of policy"  # pyright: ignore
    assert [model.id async for model in client.models.list()][-1] == "sums-2"
    goodbye: Any = [{"role": "user", "content": "goodbye"}]
    once = client.with_options(max_retries=0)
    with pytest.raises(
        openai.InternalServerError, match="loaded another job's weights during the call"
    ):
        await once.chat.completions.create(model="sums-2", messages=goodbye)
    answer = await client.chat.completions.create(model="sums-3", messages=goodbye)
    assert answer.choices[0].message.content == "policy says goodbye"


async def test_while_a_sampler_starts_the_call_is_told_so_and_since_when(
    stack: Stack, client: openai.AsyncOpenAI
):
    starts = "starting the engine for 'tiny', since 12:03:04 UTC (46 s)"

    @stack.fakes.service("rollout").app.get("/v1/models")
    async def models() -> None:
        raise Unavailable(starts, code="starting")

    client = client.with_options(max_retries=0)
    for call in (
        client.models.list(),
        client.completions.create(model="policy", prompt="hello"),
        client.models.retrieve("policy"),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await call
        assert (caught.value.status_code, caught.value.code) == (503, "starting")
        url = stack.settings.rollout_url
        assert caught.value.body["message"] == (  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
            f"no model is served now: the sampler at {url}: {starts}"
        )


async def test_a_call_ends_at_the_sampler_when_its_client_disconnects(stack: Stack):
    began, ended = asyncio.Event(), asyncio.Event()
    app = stack.fakes.service("rollout").app

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "policy"}]})

    @app.post("/v1/completions", response_model=None)
    async def hold(request: Request) -> JSONResponse:
        await request.body()
        began.set()
        await client_gone(request)
        ended.set()
        return JSONResponse({})

    messages = iter([{"type": "http.request", "body": b'{"model": "policy"}'}])

    async def receive() -> Any:
        if message := next(messages, None):
            return message
        await began.wait()
        return {"type": "http.disconnect"}

    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    calls = Calls(stack.settings, stack.store)
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(calls.pass_on(Request(scope, receive)), 10)
    await asyncio.wait_for(ended.wait(), 60)


async def test_a_body_that_is_no_json_and_routes_that_are_missing_are_refused(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="the body is no JSON"):
        await client.post(
            "/chat/completions",
            cast_to=object,
            content=b"[" * 100_000,
            options={"headers": {"content-type": "application/json"}},
        )
    with pytest.raises(openai.APIStatusError, match="no route DELETE /v1/models/x; this path has"):
        await client.models.delete("x")
    with pytest.raises(openai.NotFoundError, match="no route POST /v1/batches"):
        await client.batches.create(
            completion_window="24h", endpoint="/v1/chat/completions", input_file_id="file-1"
        )
