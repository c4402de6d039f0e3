"""The sampler that takes turns with the trainer on one GPU: asleep it has no weights, and the next
version wakes it, weights first and cache last."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import Conflict, Failed, StateLost, Unavailable
from shared.wire import ModelRequest, ServingWeights, SleepRequest
from tests.contract.test_rollout_transfer import sent
from tests.support.rollout_bench import SPEC, RolloutBench

SLEEPS = "the sampler sleeps while the trainer has its GPU; it wakes with the next weights"


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    bench = RolloutBench(tmp_path)
    async with bench.client:
        await bench.put()
        await bench.reload(bench.publish(1))
        bench.engine.calls.clear()
        yield bench


async def sleep(bench: RolloutBench, epoch: int = 0) -> ServingWeights:
    body = SleepRequest(job_id="job", epoch=epoch)
    return await bench.client.call("POST", "/sleep", body, ServingWeights, deadline_s=2)


async def assert_asleep(bench: RolloutBench) -> None:
    with pytest.raises(Unavailable, match=SLEEPS):
        await bench.generate()
    ready = await bench.raw("GET", "/readyz")
    assert (ready.status_code, SLEEPS in ready.text) == (503, True)
    assert (await bench.raw("GET", "/healthz")).status_code == 200


async def test_asleep_nothing_serves_and_requests_are_to_be_sent_again(
    serving: RolloutBench,
) -> None:
    answer = await sleep(serving)
    assert (answer.version, answer.digest, answer.model) == (None, None, "tiny")
    await assert_asleep(serving)
    await sleep(serving)
    assert serving.engine.calls == ["sleep"]


async def test_the_next_version_wakes_weights_first_and_the_cache_last(
    serving: RolloutBench,
) -> None:
    await sleep(serving)
    answer = await serving.reload(serving.publish(2))
    assert answer.version == 2
    assert serving.engine.calls == ["sleep", "wake weights", "v2", "wake cache", 2, "resume"]
    assert (await serving.generate()).rollouts[0].spans[0].version == 2


@pytest.mark.parametrize("takes_turns", [True, False])
async def test_the_next_jobs_first_version_wakes_what_a_cancelled_job_left_asleep(
    serving: RolloutBench, takes_turns: bool
) -> None:
    await sleep(serving)
    await serving.abort()
    who = {"job_id": "next", "attempt": 1, "epoch": 1}
    await serving.put(SPEC.model_copy(update=who))
    if takes_turns:
        body = SleepRequest.model_validate(who)
        await serving.client.call("POST", "/sleep", body, ServingWeights, deadline_s=2)
    await assert_asleep(serving)
    await serving.reload(serving.publish(0, "next", fence=(1, 1)))
    assert serving.engine.calls == ["sleep", "wake weights", "v0", "wake cache", 0, "resume"]
    assert (await serving.raw("GET", "/readyz")).status_code == 200
    (rollout,) = (await serving.generate(**who, min_version=0)).rollouts
    assert rollout.versions == (0,)


async def test_what_is_under_way_ends_when_the_sampler_goes_to_sleep(
    serving: RolloutBench,
) -> None:
    task = await serving.frozen_generate()
    await sleep(serving)
    with pytest.raises(StateLost, match=SLEEPS):
        await task


async def test_a_load_that_fails_while_waking_leaves_nothing_that_samples(
    serving: RolloutBench,
) -> None:
    await sleep(serving)
    serving.engine.fail_load = RuntimeError("out of memory")
    with pytest.raises(StateLost, match=r"failed halfway \(RuntimeError: out of memory\)"):
        await serving.reload(serving.publish(2))
    with pytest.raises(StateLost, match="failed halfway"):
        await serving.generate()
    serving.engine.fail_load = None
    await serving.reload(serving.publish(2))
    assert serving.engine.calls[-5:] == ["wake weights", "v2", "wake cache", 2, "resume"]


async def test_a_trainer_that_sends_nothing_leaves_it_asleep(serving: RolloutBench) -> None:
    await sleep(serving)
    ref = sent(serving, 2)
    serving.engine.fail_meeting = Failed("the trainer did not send version 2", code="not_met")
    with pytest.raises(Failed, match="did not send"):
        await serving.reload(ref)
    await assert_asleep(serving)
    assert serving.engine.calls[-2:] == ["sleep", "meet"]
    assert "resume" not in serving.engine.calls


async def test_a_sleep_that_failed_ends_in_a_new_engine(serving: RolloutBench) -> None:
    serving.engine.fail_sleep = RuntimeError("Memory usage increased after sleeping")
    with pytest.raises(StateLost, match=r"going to sleep failed \(RuntimeError: Memory usage"):
        await sleep(serving)
    await serving.put()
    assert len(serving.engines) == 2


async def test_a_model_that_is_asked_for_again_stays_asleep_and_another_one_does_not(
    serving: RolloutBench,
) -> None:
    await sleep(serving)
    await serving.put()
    await assert_asleep(serving)
    await serving.put(ModelRequest(model="other"))
    assert (await serving.generate()).rollouts


async def test_a_superseded_job_sends_no_one_to_sleep(serving: RolloutBench) -> None:
    await sleep(serving, epoch=2)
    with pytest.raises(Conflict) as caught:
        await sleep(serving, epoch=1)
    assert caught.value.code == "stale"
