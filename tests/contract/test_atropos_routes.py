"""Atropos' trajectory API over the real application: what an environment sends becomes groups.
`make compat` runs the package itself."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.api.access import Shares
from services.orchestrator.extensions.pushed import atropos, groups
from services.orchestrator.extensions.pushed.groups import CheckedGroup, GroupIntake, Model
from shared.errors import Busy
from shared.http.gate import caller
from shared.job import Job
from shared.wire import ApiKey, PushedGroup, ScoredGroup
from tests.contract.test_pushed import pushed_job
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

stack = orchestrator_stack.stack  # a fixture


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return pushed_job(tmp_path, sampling={"prompts_per_step": 1, "group_size": 2}, steps=2)


def scored(token: int, **more: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 9, token, 4], [1, 9, token, 5, 6]],
        "masks": [[-100, -100, token, 4], [-100, -100, -100, 5, 6]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, 1.0, -0.5, -0.75]],
        "env_id": 0,
        "ref_logprobs": None,
        "generation_params": {"temperature": 1.0},
        **more,
    }


async def running(stack: Stack, job: Job | None = None) -> str:
    record = await stack.submit(job)
    async with asyncio.timeout(60):
        while (await stack.get(record.id)).status != "running":
            await asyncio.sleep(0.05)
    return f"/v1/jobs/{record.id}/atropos"


ENV = {"max_token_length": 16, "desired_name": "count", "weight": 1.0, "group_size": 2}


async def test_an_environments_groups_are_trained(stack: Stack) -> None:
    url = await running(stack)
    registered = (await stack.http.post(f"{url}/register-env", json=ENV)).json()
    assert registered["checkpoint_dir"].endswith("/checkpoints")
    assert {**registered, "checkpoint_dir": ""} == {
        **{"status": "success", "env_id": 0, "wandb_name": "count_0", "checkpoint_dir": ""},
        **{"starting_step": 0, "checkpoint_interval": 50, "num_steps": 2},
    }
    other = {**ENV, "weight": 3.0, "min_batch_allocation": None}
    second = (await stack.http.post(f"{url}/register-env", json=other)).json()
    assert (second["env_id"], second["wandb_name"]) == (1, "count_1")
    assert (await stack.http.get(f"{url}/info")).json() == {"batch_size": 2, "max_token_len": 16}
    wandb = (await stack.http.get(f"{url}/wandb_info")).json()
    assert wandb == {"group": "pushed", "project": None}
    status = await stack.http.request("GET", f"{url}/status-env", json={"env_id": 0})
    assert status.json() == {
        **{"current_step": 0, "queue_size": 0, "env_weight": 0.25, "unallocated_fraction": 1.0},
        **{"self_queue_size": 0, "max_group_size": 2},
    }
    content = gzip.compress(json.dumps(scored(7)).encode())
    zipped = {"content-type": "application/json", "content-encoding": "gzip"}
    sent = await stack.http.post(f"{url}/scored_data", content=content, headers=zipped)
    assert sent.json() == {"status": "received", "groups_processed": 1}, sent.text
    says = [{"role": "user", "content": "w9"}]
    said = [[*says, {"role": "assistant", "content": c}] for c in ("w8 w4", "w8 w5 w6")]
    more = scored(8, messages=said, overrides=[{"set_advantage_to_zero": True}, None])
    listed = await stack.http.post(f"{url}/scored_data_list", json=[more])  # waits for its step
    assert listed.json() == {"status": "received", "groups_processed": 1}, listed.text
    record = await stack.until(url.split("/")[3])
    assert record.status == "succeeded"
    first, second = stack.fakes.trained[0].examples
    assert first.prompt_token_ids == [1, 9] == second.prompt_token_ids
    assert (first.token_ids, first.sampled) == ([7, 4], [1, 1])
    assert (second.token_ids, second.sampled) == ([7, 5, 6], [0, 1, 1])
    assert second.old_logprobs == [1.0, -0.5, -0.75] and first.advantage > 0 > second.advantage
    assert stack.fakes.trained[1].examples[0].advantages == [0.0, 0.0]
    batch = stack.folder(record.id).batch(2)
    assert batch.prompts[0].content == tuple(says)
    assert batch.groups[0].rollouts[1].messages == (said[1][1],)
    ended = (await stack.http.get(f"{url}/status")).json()
    assert ended == {"current_step": 3, "queue_size": 0}  # by which an environment ends


async def test_data_that_cannot_be_trained_on_and_a_trainers_routes_are_refused(
    stack: Stack,
) -> None:
    url = await running(stack)
    for change, detail in (
        ({"scores": [1.0]}, "'scores': got 1; expected 2, as many as tokens"),
        ({"masks": [[-100, 9], [-100]]}, "'masks' of sequence 0: got 2; expected 4"),
        ({"images": [1]}, "'images' is set; expected none"),
        ({"tokens": [[1, 9, 7, 99], [1, 9, 7, 5, 6]]}, "got 99 at token 1; expected 0 to 23"),
    ):
        answer = await stack.http.post(f"{url}/scored_data", json=scored(7, **change))
        assert answer.status_code == 422 and detail in answer.json()["detail"]
    for answer in (await stack.http.get(f"{url}/batch"), await stack.http.post(f"{url}/register")):
        assert answer.status_code == 409 and "is a route for a trainer" in answer.json()["detail"]
    share = await stack.http.post(f"{url}/register-env", json={**ENV, "min_batch_allocation": 0.5})
    assert "got 0.5, expected none" in share.json()["detail"]
    unknown = await stack.http.request("GET", f"{url}/status-env", json={"env_id": 4})
    assert "got 4; expected one of the 0 that /register-env gave" in unknown.json()["detail"]
    await stack.post(f"{url.split('/')[3]}/cancel")


async def test_a_group_that_waits_for_room_is_checked_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, score = list[PushedGroup](), groups.scored_group

    def scored_group(group: PushedGroup, model: Model) -> ScoredGroup:
        checked.append(group)
        return score(group, model)

    monkeypatch.setattr(groups, "scored_group", scored_group)
    monkeypatch.setattr(atropos, "LOOK_S", 0.01)
    may_train = asyncio.Event()
    stack.fakes.fault["train_step"] = lambda _: may_train.wait()
    url = await running(stack)
    job_id = url.split("/")[3]
    assert (await stack.http.post(f"{url}/scored_data", json=scored(7))).status_code == 200
    waiting = asyncio.create_task(stack.http.post(f"{url}/scored_data", json=scored(8)))
    await asyncio.sleep(0.3)
    assert not waiting.done() and len(checked) == 2
    may_train.set()
    assert (await waiting).json() == {"status": "received", "groups_processed": 1}
    assert (await stack.until(job_id)).status == "succeeded" and len(checked) == 2


async def test_what_waits_for_room_is_bounded_and_taken_in_order(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each body counts as 10,000 bytes, and is taken if as many as its key has are left."""
    monkeypatch.setattr(atropos, "LEAST_BYTES", 10_000)
    monkeypatch.setattr(atropos, "MAX_WAITING_BYTES", 60_000)
    may_train = asyncio.Event()
    stack.fakes.fault["train_step"] = lambda _: may_train.wait()
    settings = {"prompts_per_step": 1, "group_size": 2}
    url = await running(stack, pushed_job(tmp_path, sampling=settings, steps=4))

    async def push(token: int) -> httpx.Response:
        return await stack.http.post(f"{url}/scored_data", json=scored(token))

    assert (await push(7)).status_code == 200
    looks, store = list[str](), GroupIntake.store

    async def spy(self: GroupIntake, job_id: str, checked: CheckedGroup) -> Any:
        looks.append(str(checked.group.rollouts[0].token_ids[0]))
        return await store(self, job_id, checked)

    waiting: list[asyncio.Task[httpx.Response]] = []
    for token in (8, 10, 11):
        waiting.append(asyncio.create_task(push(token)))
        await asyncio.sleep(0.3)
    refused = await push(12)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
    assert refused.json()["detail"].startswith(
        "30000 bytes of the API key's groups wait for room in their jobs, and 30000 are left"
    )
    monkeypatch.setattr(GroupIntake, "store", spy)
    await asyncio.sleep(1.2)
    assert looks and {*looks} == {"8"}, "only the first in the line looks for room"
    may_train.set()
    assert [(await each).status_code for each in waiting] == [200, 200, 200]
    record = await stack.until(url.split("/")[3])
    assert record.status == "succeeded"
    trained = [each.examples[0].token_ids[0] for each in stack.fakes.trained]
    assert trained == [7, 8, 10, 11]


def test_an_api_key_leaves_others_as_much_as_it_holds() -> None:
    shares = Shares()

    def num_taken(name: str) -> int:
        caller.set(ApiKey(name=name, access="own", created_at=0))
        for num in range(20):
            try:
                held.enter_context(shares.hold(100, 1200, lambda *of: Busy(repr(of))))
            except Busy as error:
                said.append(error.detail)
                return num
        return 20

    said: list[str] = []
    with contextlib.ExitStack() as held:
        assert num_taken("alice") == 6, "half of all"
        assert num_taken("bob") == 3, "half of what is left"
        assert said == ["(600, 600)", "(300, 300)"]
    assert num_taken("bob") == 6
    caller.set(None)


async def test_a_job_has_so_many_environments_and_silent_ones_do_not_count(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atropos, "MAX_ENVIRONMENTS", 2)
    environment = {"kind": "pushed", "episode_s": 2.0}
    url = await running(stack, pushed_job(tmp_path, environment=environment))

    async def register() -> httpx.Response:
        return await stack.http.post(f"{url}/register-env", json=ENV)

    async def share(number: int) -> float:
        status = await stack.http.request("GET", f"{url}/status-env", json={"env_id": number})
        return status.json()["env_weight"]

    answers = await asyncio.gather(*(register() for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
    (refused,) = [answer for answer in answers if answer.status_code == 429]
    assert "has 2 environments, expected fewer than 2" in refused.json()["detail"]
    assert "without a request for 2 s (environment.episode_s)" in refused.json()["detail"]
    assert refused.headers["retry-after"] == "10" and await share(0) == await share(1) == 0.5
    for _ in range(5):
        await asyncio.sleep(0.5)
        weight = await share(0)
    assert weight == 1.0 and (await register()).json()["env_id"] == 2
    assert await share(1) == pytest.approx(1 / 3), "it was only away"
    await stack.post(f"{url.split('/')[3]}/cancel")
