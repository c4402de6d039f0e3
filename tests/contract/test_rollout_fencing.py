"""Who the sampler refuses as superseded, and what happens to what they have under way. Fences are
`(attempt, epoch)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import Conflict, Failed
from shared.wire import ModelRequest, RolloutGroup, Sampling, ServingWeights
from tests.support.rollout_bench import RolloutBench


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    """Version 5 of "job", attempt 2, epoch 1."""
    bench = RolloutBench(tmp_path)
    async with bench.client:
        await bench.put(model_of("job", (2, 1)))
        await bench.reload(bench.publish(5, fence=(2, 1)))
        yield bench


def model_of(job: str | None, fence: tuple[int, int]) -> ModelRequest:
    return ModelRequest(model="tiny", job_id=job, attempt=fence[0], epoch=fence[1])


def who(fence: tuple[int, int], job: str | None = "job") -> dict[str, object]:
    return {"job_id": job, "attempt": fence[0], "epoch": fence[1]}


async def assert_refused(work: object, code: str) -> None:
    with pytest.raises(Conflict) as caught:
        await work  # pyright: ignore[reportGeneralTypeIssues]
    assert caught.value.code == code


async def test_a_job_is_answered_by_its_own_weights_of_its_own_epoch(serving: RolloutBench) -> None:
    group = await serving.generate(**who((2, 1)), min_version=5)
    assert (group.rollouts[0].versions, group.rollouts[0].text) == ((5,), "job:2:1:5")


@pytest.mark.parametrize(
    ("fence", "job", "code"),
    [
        ((1, 9), "job", "stale"),
        ((2, 0), "job", "stale"),
        ((1, 0), "other", "stale"),
        ((2, 2), "job", "out_of_order"),
        ((3, 0), "job", "out_of_order"),
        ((2, 1), "other", "out_of_order"),
        ((3, 0), "other", "out_of_order"),
    ],
)
async def test_a_caller_that_does_not_match_what_serves_is_told_which_way(
    serving: RolloutBench, fence: tuple[int, int], job: str, code: str
) -> None:
    await assert_refused(serving.generate(**who(fence, job)), code)
    assert serving.engine.samples == 0


async def test_a_zombies_reload_and_model_are_refused(serving: RolloutBench) -> None:
    await assert_refused(serving.reload(serving.publish(9, fence=(1, 7))), "stale")
    await assert_refused(serving.reload(serving.publish(9, fence=(2, 0))), "stale")
    await assert_refused(serving.reload(serving.publish(9, job="old", fence=(1, 0))), "stale")
    await assert_refused(serving.put(model_of("job", (2, 0))), "stale")
    assert (await serving.client.get("/weights", ServingWeights)).version == 5


async def test_a_newer_epoch_may_go_back_and_ends_what_the_older_has_under_way(
    serving: RolloutBench,
) -> None:
    waiting = await serving.frozen_generate(**who((2, 1)), sampling=Sampling(n=4, max_tokens=4))
    assert (await serving.reload(serving.publish(3, fence=(2, 2)))).version == 3
    await assert_refused(waiting, "stale")
    assert serving.engine.under_way == 0
    assert (await serving.generate(**who((2, 2)), min_version=3)).rollouts[0].versions == (3,)
    await assert_refused(serving.generate(**who((2, 1)), min_version=3), "stale")


async def test_a_newer_version_of_the_same_epoch_continues_with_what_is_under_way(
    serving: RolloutBench,
) -> None:
    waiting = await serving.frozen_generate(**who((2, 1)))
    await serving.reload(serving.publish(6, fence=(2, 1)))
    assert (await waiting).rollouts[0].versions == (5, 6)


async def test_a_newer_workers_model_ends_what_the_older_has_under_way(
    serving: RolloutBench,
) -> None:
    waiting = await serving.frozen_generate(**who((2, 1)))
    await serving.put(model_of("job", (3, 1)))
    await assert_refused(waiting, "stale")
    assert len(serving.engines) == 1
    await assert_refused(serving.reload(serving.publish(6, fence=(2, 1))), "stale")
    await assert_refused(serving.generate(**who((3, 1))), "out_of_order")
    await serving.reload(serving.publish(5, fence=(3, 1)))
    assert (await serving.generate(**who((3, 1)))).rollouts[0].versions == (5,)


async def test_a_second_jobs_reload_makes_the_first_stale(serving: RolloutBench) -> None:
    waiting = await serving.frozen_generate(**who((2, 1)))
    await serving.reload(serving.publish(0, job="next", fence=(3, 1)))
    await assert_refused(waiting, "stale")
    await assert_refused(serving.generate(**who((2, 1))), "stale")
    assert (await serving.generate(**who((3, 1), "next"))).rollouts[0].versions == (0,)


async def test_of_two_jobs_with_the_same_fence_the_one_loaded_last_is_answered(
    serving: RolloutBench,
) -> None:
    waiting = await serving.frozen_generate(**who((2, 1)))
    await serving.reload(serving.publish(0, job="next", fence=(2, 1)))
    await assert_refused(waiting, "out_of_order")
    await assert_refused(serving.generate(**who((2, 1))), "out_of_order")


async def test_requests_by_hand_continue_over_another_epoch(serving: RolloutBench) -> None:
    by_hand = await serving.frozen_generate()
    await serving.reload(serving.publish(3, fence=(2, 2)))
    assert (await by_hand).rollouts[0].versions == (5, 3)


async def test_a_model_by_hand_fences_no_one(serving: RolloutBench) -> None:
    waiting = await serving.frozen_generate(**who((2, 1)))
    await serving.put(model_of(None, (0, 0)))
    serving.engine.frozen.set()
    assert (await waiting).rollouts[0].versions == (5,)


async def test_a_zombies_reload_that_waits_for_a_newer_one_is_refused(
    serving: RolloutBench,
) -> None:
    serving.engine.loading.clear()
    newer = asyncio.create_task(serving.reload(serving.publish(5, fence=(3, 1))))
    while serving.engine.calls.count("v5") < 2:
        await asyncio.sleep(0.001)
    zombie = asyncio.create_task(serving.reload(serving.publish(6, fence=(2, 1))))
    late = asyncio.create_task(serving.generate(**who((2, 1))))
    await asyncio.sleep(0.02)
    serving.engine.loading.set()
    assert (await newer).attempt == 3
    await assert_refused(zombie, "stale")
    await assert_refused(late, "stale")


async def test_a_request_of_the_new_epoch_during_its_load_comes_too_early(
    serving: RolloutBench,
) -> None:
    serving.engine.loading.clear()
    newer = asyncio.create_task(serving.reload(serving.publish(3, fence=(2, 2))))
    while "v3" not in serving.engine.calls:
        await asyncio.sleep(0.001)
    await assert_refused(serving.generate(**who((2, 2))), "out_of_order")
    serving.engine.loading.set()
    await newer
    assert (await serving.generate(**who((2, 2)))).rollouts[0].versions == (3,)


async def test_a_newer_reload_that_is_not_loaded_still_makes_the_older_stale(
    serving: RolloutBench,
) -> None:
    bad = serving.publish(6, fence=(3, 0)).model_copy(update={"digest": "xxh3-0"})
    with pytest.raises(Failed, match="expected xxh3-0"):
        await serving.reload(bad)
    await assert_refused(serving.generate(**who((2, 1))), "stale")
    assert (await serving.client.get("/weights", ServingWeights)).fence == (2, 1)


async def test_an_abort_ends_what_is_under_way_and_refuses_what_comes_later(
    serving: RolloutBench,
) -> None:
    waiting = [await serving.frozen_generate(**who((2, 1))) for _ in range(3)]
    by_hand = await serving.frozen_generate()
    assert await serving.abort("job", 2, 1) == 3
    for task in waiting:
        await assert_refused(task, "stale")
    assert serving.engine.under_way == 1
    await assert_refused(serving.generate(**who((2, 1))), "stale")
    await assert_refused(serving.reload(serving.publish(6, fence=(2, 1))), "stale")
    assert await serving.abort("job", 2, 1) == 0
    serving.engine.frozen.set()
    assert (await by_hand).rollouts[0].versions == (5,)


async def test_an_abort_touches_no_newer_epoch_and_no_other_job(serving: RolloutBench) -> None:
    waiting: asyncio.Task[RolloutGroup] = await serving.frozen_generate(**who((2, 1)))
    assert await serving.abort("job", 2, 0) == 0
    assert await serving.abort("other", 9, 9) == 0
    serving.engine.frozen.set()
    assert (await waiting).rollouts[0].versions == (5,)


async def test_a_job_that_continues_after_an_abort_is_answered(serving: RolloutBench) -> None:
    await serving.abort("job", 2, 1)
    await serving.put(model_of("job", (4, 1)))
    await serving.reload(serving.publish(5, fence=(4, 1)))
    assert (await serving.generate(**who((4, 1)))).rollouts[0].versions == (5,)


async def test_an_aborted_load_is_not_undone_but_serves_no_one(serving: RolloutBench) -> None:
    serving.engine.loading.clear()
    loading = asyncio.create_task(serving.reload(serving.publish(6, fence=(2, 1))))
    while "v6" not in serving.engine.calls:
        await asyncio.sleep(0.001)
    await serving.abort("job", 2, 1)
    serving.engine.loading.set()
    assert (await loading).version == 6
    await assert_refused(serving.generate(**who((2, 1))), "stale")


async def test_a_client_that_disconnects_leaves_nothing_to_be_ended(serving: RolloutBench) -> None:
    waiting = await serving.frozen_generate(**who((2, 1)))
    await serving.service.operations.close()
    with pytest.raises(Failed, match="its client disconnected"):
        await waiting
    assert (serving.engine.under_way, await serving.abort("job", 2, 1)) == (0, 0)
