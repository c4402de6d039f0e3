"""AReaL's online routes over the real application: sessions become groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.pushing import areal
from services.orchestrator.pushing.groups import Pushing
from services.orchestrator.runs.pushed import PushedQueue
from shared.errors import Unavailable
from shared.job import Job
from tests.contract.test_pushed import pushed_job
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

stack = orchestrator_stack.stack  # a fixture


@pytest.fixture
def job(tmp_path: Path) -> Job:
    sampling = {"prompts_per_step": 1, "group_size": 2, "max_tokens": 8}
    return pushed_job(tmp_path, sampling=sampling, steps=2, max_staleness=1)


async def start(stack: Stack, task: str, **more: Any) -> dict[str, str]:
    """Starts a session as soon as a job runs that has room for it."""
    async with asyncio.timeout(60):
        while True:
            body = {"task_id": task, **more}
            answer = await stack.http.post("/v1/rl/start_session", json=body)
            if answer.status_code == 200:
                return answer.json()
            assert answer.status_code in (409, 429), answer.text
            await asyncio.sleep(0.05)


async def post(stack: Stack, key: str, path: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    answer = await stack.http.post(path, json=body, headers=headers)
    return answer.status_code, answer.json()


async def ask(stack: Stack, key: str) -> str:
    """Returns the id of the answer to one call."""
    says = [{"role": "user", "content": "w3"}]
    status, body = await post(stack, key, "/v1/chat/completions", model="policy", messages=says)
    assert status == 200, body
    return body["id"]


async def test_sessions_of_a_task_are_a_group(stack: Stack) -> None:
    record = await stack.submit()
    one, other, alone = [await start(stack, task) for task in ("a", "a", "b")]
    first = await ask(stack, one["api_key"])
    await ask(stack, one["api_key"])
    await ask(stack, other["api_key"])
    await ask(stack, alone["api_key"])
    key = one["api_key"]
    assert await post(stack, key, "/v1/rl/set_reward", reward=0.5) == (200, {"message": "success"})
    await post(stack, key, "/v1/rl/set_reward", reward=0.25, interaction_id=first)
    ended = {"message": "success", "interaction_count": 2}
    assert await post(stack, key, "/v1/rl/end_session") == (200, ended)
    assert await post(stack, key, "/v1/rl/end_session") == (200, ended)
    await post(stack, alone["api_key"], "/v1/rl/end_session")
    counts = (await stack.http.get(f"/v1/jobs/{record.id}/groups")).json()
    assert counts["accepted"] == 0
    await post(stack, other["api_key"], "/v1/rl/set_reward", reward=-1.0)
    again = await start(stack, "b", api_key=other["api_key"])  # ends the session of this key
    assert again["api_key"] == other["api_key"] != again["session_id"]
    async with asyncio.timeout(30):
        while not stack.fakes.trained:
            await asyncio.sleep(0.05)
    examples = stack.fakes.trained[0].examples
    assert [example.advantage > 0 for example in examples] == [True, False]
    batch = stack.folder(record.id).batch(1)
    assert [score.value for score in batch.scores[0]] == [0.75, -1.0]
    assert batch.version == 0
    await ask(stack, again["api_key"])
    await post(stack, again["api_key"], "/v1/rl/set_reward", reward=1.0)
    await post(stack, again["api_key"], "/v1/rl/end_session")
    assert (await stack.until(record.id)).status == "succeeded"
    assert [score.value for score in stack.folder(record.id).batch(2).scores[0]] == [None, 1.0]


async def test_a_session_whose_last_turn_was_lost_ends_with_its_answers(stack: Stack) -> None:
    record = await stack.submit()
    keys = [(await start(stack, "a"))["api_key"] for _ in range(2)]
    for key in keys:
        await ask(stack, key)
        await post(stack, key, "/v1/rl/set_reward", reward=1.0)
    session = stack.sessions.find(api_key=keys[0])
    assert session is not None
    session._lost = Unavailable("every sampler is unreachable")
    for key in keys:
        assert (await post(stack, key, "/v1/rl/end_session"))[0] == 200
    assert (await stack.http.get(f"/v1/jobs/{record.id}/groups")).json()["accepted"] == 1
    await stack.post(f"{record.id}/cancel")


async def test_sessions_close_with_their_job(stack: Stack) -> None:
    record = await stack.submit()
    key = (await start(stack, "a"))["api_key"]
    await ask(stack, key)
    await stack.post(f"{record.id}/cancel")
    await stack.until(record.id)
    async with asyncio.timeout(10):
        while len(stack.sessions):
            await asyncio.sleep(0.05)
    says = [{"role": "user", "content": "w3"}]
    assert (await post(stack, key, "/v1/chat/completions", messages=says))[0] == 410


async def test_a_key_that_starts_two_sessions_at_once_has_one(stack: Stack) -> None:
    record = await stack.submit()
    key = (await start(stack, "a"))["api_key"]
    await post(stack, key, "/v1/rl/end_session")
    await asyncio.gather(*(start(stack, task, api_key=key) for task in ("b", "c")))
    assert len(stack.sessions) == 1
    assert (await post(stack, key, "/v1/rl/end_session"))[0] == 200
    assert not len(stack.sessions)
    await stack.post(f"{record.id}/cancel")


async def test_a_job_has_so_many_open_sessions(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(areal, "MAX_OPEN", 2)
    record = await stack.submit()
    first, _ = [(await start(stack, "a"))["api_key"] for _ in range(2)]
    refused = await stack.http.post("/v1/rl/start_session", json={"task_id": "a"})
    assert refused.status_code == 429 and refused.headers["retry-after"] == "10"
    assert "has 2 open sessions, expected fewer than 2 for another" in refused.json()["detail"]
    assert "idle for 1800 s (environment.episode_s) ends by itself" in refused.json()["detail"]
    await post(stack, first, "/v1/rl/end_session")
    await start(stack, "a")
    await stack.post(f"{record.id}/cancel")


async def test_sessions_of_tasks_that_do_not_repeat_fill_the_room_and_are_told(
    stack: Stack,
) -> None:
    record = await stack.submit()  # room for 2 groups of 2 sessions
    for task in ("a", "b", "c", "d"):
        key = (await start(stack, task))["api_key"]
        await ask(stack, key)
        await post(stack, key, "/v1/rl/set_reward", reward=1.0)
        assert (await post(stack, key, "/v1/rl/end_session"))[0] == 200
    refused = await stack.http.post("/v1/rl/start_session", json={"task_id": "e"})
    assert refused.status_code == 429
    assert (
        "has 4 sessions that wait for others of their tasks, expected fewer than 4"
        in (refused.json()["detail"])
    )
    told = (
        "0 of the 1 that step 1 needs are here; 4 sessions wait in 4 tasks, none of which has "
        "sampling.group_size of them yet (see environment.group_by)"
    )
    async with asyncio.timeout(20):
        while told not in ((await stack.get(record.id)).doing or ""):
            await asyncio.sleep(0.05)
    again = await stack.http.post("/v1/rl/start_session", json={"task_id": "a"})
    assert again.status_code == 200, "it may make a group whole"
    await stack.post(f"{record.id}/cancel")


async def test_an_idle_session_is_stored_if_it_has_a_reward(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(areal, "LOOK_S", 0.05)
    sampling = {"prompts_per_step": 1, "group_size": 2, "max_tokens": 8}
    environment = {"kind": "pushed", "episode_s": 1.5}
    record = await stack.submit(
        pushed_job(tmp_path, sampling=sampling, environment=environment, steps=1)
    )
    keys = [(await start(stack, "a"))["api_key"] for _ in range(3)]
    for key in keys:
        await ask(stack, key)
    queue = PushedQueue(stack.folder(record.id).path)
    fault = Unavailable("Redis is unreachable")
    monkeypatch.setattr(Pushing, "record", failing_once(Pushing.record, fault))
    for key in keys[:2]:
        assert (await post(stack, key, "/v1/rl/set_reward", reward=1.0))[0] == 200
    async with asyncio.timeout(30):
        while len(stack.sessions) or not queue.look(lambda found: found.num_accepted):
            await asyncio.sleep(0.05)
    ended = {"message": "success", "interaction_count": 1}
    assert await post(stack, keys[0], "/v1/rl/end_session") == (200, ended)
    for path, body in (("set_reward", {"reward": 2.0}), ("end_session", {})):
        status, told = await post(stack, keys[2], f"/v1/rl/{path}", **body)
        assert status == 410 and "was idle for long" in told["detail"]
    assert (await stack.until(record.id)).status == "succeeded"
    batch = stack.folder(record.id).batch(1)
    assert [score.value for score in batch.scores[0]] == [1.0, 1.0]


async def test_a_session_that_could_not_be_stored_at_its_end_is_stored_later(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(areal, "LOOK_S", 0.5)
    record = await stack.submit()
    key = (await start(stack, "a"))["api_key"]
    await ask(stack, key)
    fault = Unavailable("Redis is unreachable")
    monkeypatch.setattr(Pushing, "record", failing_once(Pushing.record, fault))
    assert (await post(stack, key, "/v1/rl/end_session"))[0] == 503
    assert (await post(stack, key, "/v1/rl/set_reward", reward=1.0))[0] == 410
    queue = PushedQueue(stack.folder(record.id).path)
    async with asyncio.timeout(30):
        while not queue.look(lambda found: len(found.sessions)):
            await asyncio.sleep(0.05)
    ended = {"message": "success", "interaction_count": 1}
    assert await post(stack, key, "/v1/rl/end_session") == (200, ended)
    await stack.post(f"{record.id}/cancel")


def failing_once(method: Any, error: Exception) -> Any:
    """Returns a method that raises the error at its first call."""
    faults = [error]

    async def call(self: Any, *args: Any) -> Any:
        if faults:
            raise faults.pop()
        return await method(self, *args)

    return call


async def test_sessions_are_refused_with_a_reason(stack: Stack) -> None:
    none = await stack.http.post("/v1/rl/start_session", json={"task_id": "a"})
    assert none.status_code == 409 and "which are none" in none.json()["detail"]
    record = await stack.submit()
    key = (await start(stack, "a"))["api_key"]
    status, body = await post(stack, key, "/v1/rl/set_reward", reward=1.0)
    assert status == 422 and "expected one of the 0 answers of session 'a-" in body["detail"]
    assert await post(stack, key, "/v1/rl/end_session") == (
        200,
        {"message": "success", "interaction_count": 0},
    )
    status, body = await post(stack, "sk-hone-x", "/v1/rl/end_session")
    assert status in (401, 410), body
    await stack.post(f"{record.id}/cancel")
