"""Jobs that share a sampler, over HTTP: each is answered by its own version, and a job that no one
names any more is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import Conflict, Failed
from shared.wire import Aborted, AbortRequest, ModelRequest
from tests.contract.test_rollout_adapters import Bench, held, text, until_held

FENCES = {"a": (5, 1), "b": (7, 1), "c": (9, 1)}


def model(job_id: str, *beside: int) -> ModelRequest:
    attempt, epoch = FENCES[job_id]
    return ModelRequest(
        model="tiny",
        max_lora_rank=4,
        job_id=job_id,
        attempt=attempt,
        epoch=epoch,
        beside=beside,
    )


def who(job_id: str) -> dict[str, object]:
    attempt, epoch = FENCES[job_id]
    return {"job_id": job_id, "attempt": attempt, "epoch": epoch}


async def load(bench: Bench, job_id: str, version: int) -> None:
    serving = await bench.reload(bench.publish_adapter(version, job_id, fence=FENCES[job_id]))
    assert (serving.job_id, serving.version) == (job_id, version)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Serves version 3 of `a` and version 1 of `b`."""
    bench = Bench(tmp_path)
    async with bench.client:
        await bench.put(model("a"))
        await load(bench, "a", 3)
        await bench.put(model("b", 5))
        await load(bench, "b", 1)
        yield bench


async def test_each_job_is_answered_by_its_own_version(bench: Bench) -> None:
    assert await text(bench, **who("a"), min_version=3) == "a/v3-5.1"
    assert await text(bench, **who("b"), min_version=1) == "b/v1-7.1"
    with pytest.raises(Conflict, match="'min_version': got 2, serving version 1 of 'b'"):
        await bench.generate(**who("b"), min_version=2)
    await load(bench, "a", 4)
    assert await text(bench, **who("a"), min_version=4) == "a/v4-5.1"
    assert await text(bench, **who("b")) == "b/v1-7.1"
    with pytest.raises(Conflict, match="versions only go up within an epoch"):
        await bench.reload(bench.publish_adapter(3, "a", fence=FENCES["a"]))


async def test_a_load_of_one_job_ends_no_request_of_the_other(bench: Bench) -> None:
    waiting = await bench.frozen_generate(**who("a"))
    await load(bench, "b", 2)
    bench.engine.frozen.set()
    assert (await waiting).rollouts[0].text == "a/v3-5.1"


async def test_a_job_that_the_newest_does_not_name_is_refused_and_its_requests_end(
    bench: Bench,
) -> None:
    waiting = await bench.frozen_generate(**who("a"))
    await bench.put(model("c", 7))
    for refused in (waiting, bench.generate(**who("a"))):
        with pytest.raises(Conflict) as raised:
            await refused
        assert raised.value.code == "stale"
    bench.engine.frozen.set()
    assert await text(bench, **who("b")) == "b/v1-7.1"
    with pytest.raises(Conflict):
        await bench.put(model("a"))


async def test_the_models_weights_are_not_exchanged_under_another_jobs_adapter(
    bench: Bench,
) -> None:
    tensors = {name: tensor + 1 for name, tensor in Bench.base.items()}
    merged = bench.publish(4, job="a", fence=FENCES["a"], **tensors)
    with pytest.raises(Failed, match="the sampler serves job 'b' beside it") as raised:
        await bench.reload(merged)
    assert raised.value.code == "shared"
    assert await text(bench, **who("b")) == "b/v1-7.1"
    body = AbortRequest(job_id="b", attempt=7, epoch=1)
    await bench.client.call("POST", "/abort", body, Aborted, deadline_s=5)
    assert (await bench.reload(merged)).version == 4, "b has left"


async def test_an_older_attempt_of_the_job_loads_nothing(bench: Bench) -> None:
    newer = model("a", 5, 7).model_copy(update={"attempt": 11})
    await bench.put(newer)
    await bench.reload(bench.publish_adapter(3, "a", fence=(11, 1)))
    with pytest.raises(Conflict) as raised:
        await bench.reload(bench.publish_adapter(9, "a", fence=(5, 1)))
    assert raised.value.code == "stale"


async def test_a_request_may_name_a_snapshot_and_what_serves_stays(bench: Bench) -> None:
    old = bench.publish_adapter(1, "z")
    assert await text(bench, **who("a"), snapshot=old) == old.adapter
    assert await text(bench, **who("a")) == "a/v3-5.1"
    assert await text(bench, **who("b"), snapshot=old) == old.adapter
    assert held(bench) == ["a/v3-5.1", "b/v1-7.1", old.adapter], "it is loaded once"
    damaged = old.model_copy(update={"adapter": "z/other", "digest": old.digest[:-1] + "x"})
    with pytest.raises(Failed, match="it was not loaded"):
        await bench.generate(**who("a"), snapshot=damaged)
    with pytest.raises(Conflict, match="superseded"):
        await bench.generate(job_id="a", attempt=4, epoch=1, snapshot=old)


async def test_the_snapshots_that_were_used_last_stay_loaded(bench: Bench) -> None:
    one, two, three = (bench.publish_adapter(version, "z") for version in (1, 2, 3))
    for ref in (one, two, one, three):  # 2 stay: the second one was used longest ago
        await bench.generate(**who("a"), snapshot=ref)
    await until_held(bench, "a/v3-5.1", "b/v1-7.1", one.adapter, three.adapter)


async def test_a_request_may_ask_for_the_models_own_weights(bench: Bench) -> None:
    assert await text(bench, **who("a"), own_weights=True) == "own weights"
    await bench.put(model("c"))
    tensors = {name: tensor + 1 for name, tensor in Bench.base.items()}
    await bench.reload(bench.publish(4, job="c", fence=FENCES["c"], **tensors))
    for weights in ({"own_weights": True}, {"snapshot": bench.publish_adapter(1, "z")}):
        with pytest.raises(Conflict, match="have replaced the model's own"):
            await bench.generate(**who("c"), **weights)
