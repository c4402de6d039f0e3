"""Several samplers behind one job: groups go where there is room, and one sampler that fails costs
nothing but time."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.orchestrator.samplers import pool as pool_module
from services.orchestrator.samplers.sampler import FIRST_RETRY_S, Sampler
from shared.errors import BadRequest, Failed, StateLost
from shared.http.service import request_key
from shared.job import Job
from shared.settings import Settings
from tests.support import orchestrator_stack
from tests.support.fake_samplers import FakeSampler, pool_of
from tests.support.pool_stack import Pool, finished, pool_stack
from tests.support.proxy import round_robin

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture


@pytest.fixture
def count() -> int:
    return 2


@pytest.fixture
def max_num_seqs() -> int:
    return 0


@pytest.fixture
def kv_cache_tokens() -> int:
    return 0


@pytest.fixture
async def pool(
    settings: Settings,
    redis_url: str,
    job: Job,
    count: int,
    max_num_seqs: int,
    kv_cache_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncGenerator[Pool]:
    async with (
        pool_of(count, settings, max_num_seqs, kv_cache_tokens) as all_,
        pool_stack(settings, redis_url, job, all_, monkeypatch) as pool,
    ):
        yield pool


async def test_groups_are_shared_out_and_every_sampler_has_each_version(pool: Pool) -> None:
    record = await finished(pool)
    pool.check_groups(record)
    shares = [len(sampler.groups) for sampler in pool.samplers]
    assert sum(shares) == 24 and min(shares) >= 8
    assert [sampler.serving.version for sampler in pool.samplers] == [4, 4]
    assert [sampler.calls["reload"] for sampler in pool.samplers] == [5, 5]


async def test_a_sampler_that_dies_in_a_step_costs_no_group_and_no_recovery(pool: Pool) -> None:
    first, second = pool.samplers

    async def die(_: Any) -> None:
        if second.serving.version == 2 and second.calls["generate"]:
            del second.fault["generate"]
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(second.kill()))
            await asyncio.sleep(30)

    second.fault["generate"] = die
    record = await finished(pool)
    await second.start()
    pool.check_groups(record)
    assert record.recoveries == 0
    assert len(await pool.said(record, f"sampler {second.url} is out: ")) == 1
    assert first.serving.version == 4


async def test_a_fault_of_ours_while_a_sampler_comes_back_is_logged_and_tried_again_later(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pool.samplers
    load, late = Sampler.load_weights, []
    came_back = asyncio.Event()

    async def failing_twice(sampler: Sampler, *args: Any, **options: Any) -> Any:
        if options.get("late"):
            late.append(time.monotonic())
            if len(late) <= 2:
                raise RuntimeError("a fault of ours")
        return await load(sampler, *args, **options)

    async def train(body: Any) -> None:
        if body.step == 2:
            await came_back.wait()
        while body.step == 4 and second.serving.version is None:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Sampler, "load_weights", failing_twice)
    pool.stack.fakes.fault["train_step"] = train
    job_id = (await pool.stack.submit()).id
    while pool.stack.fakes.calls["train_step"] < 2:
        await asyncio.sleep(0.01)
    await second.kill()
    await second.start()
    came_back.set()
    record = await pool.stack.until(job_id)
    assert record.status == "succeeded" and record.recoveries == 0
    pool.check_groups(record)
    assert second.serving.version == 4
    assert late[1] - late[0] >= FIRST_RETRY_S and late[2] - late[1] >= 2 * FIRST_RETRY_S


@pytest.mark.parametrize(
    "error",
    [Failed("loading version 2 failed halfway"), StateLost("the engine process died")],
    ids=["failed", "state lost"],
)
async def test_a_sampler_that_fails_a_sync_is_out_until_it_has_the_version(
    pool: Pool, error: Exception
) -> None:
    _, second = pool.samplers
    left = iter(range(2))

    async def fail(ref: Any) -> None:
        if ref.version == 2 and next(left, None) is not None:
            raise error

    second.fault["reload"] = fail
    slow = pool.stack.job.model_copy(update={"steps": 6})
    pool.stack.fakes.fault["train_step"] = lambda _: asyncio.sleep(0.3)
    record = await finished(pool, slow)
    pool.check_groups(record)
    assert record.recoveries == 0
    out = await pool.said(record, "is out", "serves version")
    assert out[0] == f"sampler {second.url} is out: {error}; 1 of 2 samplers are left"
    assert len(out) == 2 and out[1].startswith(f"sampler {second.url} serves version ")


async def test_a_job_without_any_sampler_left_pauses_with_a_sentence(pool: Pool) -> None:
    pool.stack.settings.__dict__["patience_s"] = 0.3
    for sampler in pool.samplers:

        async def fail(ref: Any) -> None:
            if ref.version == 2:
                raise Failed("no memory for version 2")

        sampler.fault["reload"] = fail
    record = await pool.stack.until((await pool.stack.submit()).id, "paused", "succeeded")
    assert record.status == "paused" and record.error is not None
    assert "weight sync: no memory for version 2" in record.error


async def test_a_sampler_that_what_was_sent_did_not_reach_gets_files_from_then_on(
    pool: Pool,
) -> None:
    """And no one waits for it at each sync."""
    first, second = pool.samplers
    methods: list[tuple[int, str]] = []

    async def deaf(ref: Any) -> None:
        methods.append((ref.version, ref.method))
        if ref.method == "nccl" and ref.version >= 2:
            raise Failed("the trainer did not send version 2", code="not_loaded")

    async def until_it_is_asked_again(_: Any) -> None:
        while len(methods) == 3:
            await asyncio.sleep(0.01)

    second.fault["reload"] = deaf
    first.fault["generate"] = until_it_is_asked_again
    job = pool.stack.job.model_copy(update={"weight_sync": "nccl"})
    record = await finished(pool, job)
    pool.check_groups(record)
    assert methods[:3] == [(0, "nccl"), (1, "nccl"), (2, "nccl")]
    assert set(methods[3:]) <= {(version, "http") for version in (2, 3, 4)}
    assert (first.serving.version, record.recoveries) == (4, 0)


async def sent_beside_one_away(pool: Pool, publish: Any) -> list[str]:
    """Runs a job by nccl whose second sampler takes nothing from version 2 on; returns the events
    of the record that succeeded."""
    second = pool.samplers[1]

    async def lost(ref: Any) -> None:
        if ref.version >= 2:
            raise Failed("the engine does not load", code="not_loaded")

    second.fault["reload"] = lost
    pool.stack.fakes.fault["publish"] = publish
    job = pool.stack.job.model_copy(update={"weight_sync": "nccl"})
    record = await finished(pool, job)
    pool.check_groups(record)
    assert (pool.samplers[0].serving.version, record.recoveries) == (4, 0)
    return [event.message for event in await pool.stack.events(record.id)]


async def test_what_is_sent_is_also_written_while_a_sampler_is_unreachable(pool: Pool) -> None:
    published: list[tuple[int, str]] = []

    async def note(request: Any) -> None:
        published.append((request.version, request.method))

    await sent_beside_one_away(pool, note)
    for version in (3, 4):
        methods = [method for number, method in published if number == version]
        assert methods[:2] == ["nccl", "http"], "as it is sent, for the sampler that joins later"


async def test_files_that_cannot_be_written_cost_the_samplers_that_need_none_nothing(
    pool: Pool,
) -> None:
    async def full(request: Any) -> None:
        if request.method == "http":
            raise Failed("no space left for version 3", code="disk_full")

    said = await sent_beside_one_away(pool, full)
    assert "samplers that are unreachable join later: no space left for version 3" in said


async def blind(ref: Any) -> None:
    if ref.method in ("shm", "disk"):
        raise Failed("'path': got '/w', which is not a folder here", code="not_seen")


async def methods_of(pool: Pool, sampler: FakeSampler) -> list[tuple[int, str]]:
    """Runs the job; returns the versions that the sampler was given, and how."""
    methods: list[tuple[int, str]] = []

    async def note(ref: Any) -> None:
        methods.append((ref.version, ref.method))

    sampler.fault["reload"] = note
    pool.check_groups(await finished(pool))
    return methods


async def test_several_samplers_of_one_host_take_weights_from_shared_memory(pool: Pool) -> None:
    _, second = pool.samplers
    assert await methods_of(pool, second) == [(version, "shm") for version in range(5)]


async def test_a_folder_that_one_of_several_samplers_does_not_see_is_left_for_all(
    pool: Pool,
) -> None:
    first, second = pool.samplers

    second.fault["reload"] = blind
    methods = await methods_of(pool, first)
    assert methods == [(0, "shm"), (0, "disk"), *((version, "delta") for version in range(5))]
    assert [sampler.serving.version for sampler in pool.samplers] == [4, 4]


async def test_a_folder_not_seen_by_one_is_left_also_where_another_one_fails(
    pool: Pool,
) -> None:
    first, second = pool.samplers

    async def failing(ref: Any) -> None:
        if ref.method in ("shm", "disk"):
            raise Failed("vLLM did not load them", code="not_loaded")

    first.fault["reload"], second.fault["reload"] = failing, blind
    record = await finished(pool)
    assert [sampler.serving.version for sampler in pool.samplers] == [4, 4]
    assert record.recoveries == 0 and not await pool.said(record, "did not load")


async def test_a_folder_is_left_once_a_sampler_came_later_that_does_not_see_it(pool: Pool) -> None:
    first, second = pool.samplers
    asked: list[str] = []

    async def blind_to_memory(ref: Any) -> None:
        asked.append(ref.method)
        if ref.method == "shm":
            raise Failed("'path': got '/w', which is not a folder here", code="not_seen")

    async def train(body: Any) -> None:
        if body.step == 2:
            await second.start()
            while len(asked) < 2:  # it is asked again once it is known what it answered
                await asyncio.sleep(0.01)
        while body.step == 4 and second.serving.version is None:
            await asyncio.sleep(0.01)

    second.fault["reload"] = blind_to_memory
    pool.stack.fakes.fault["train_step"] = train
    await second.kill()
    by_memory, by_volume = ((0, "shm"), (1, "shm")), ((2, "disk"), (3, "disk"), (4, "disk"))
    assert await methods_of(pool, first) == [*by_memory, *by_volume]
    assert second.serving.version == 4


async def test_a_slow_group_is_asked_of_another_sampler_and_counted_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "HEDGE_AT", 1e-4)
    _, second = pool.samplers

    async def hang(_: Any) -> None:
        await asyncio.sleep(60)

    second.fault["generate"] = hang
    record = await finished(pool, pool.stack.job.model_copy(update={"steps": 2}))
    pool.check_groups(record)
    assert not second.groups
    ended = [key for request in second.aborted for key in request.keys]
    assert len(ended) == len(set(ended)) == second.calls["generate"]


async def test_a_prompt_that_ends_every_engine_does_not_go_round_for_ever(pool: Pool) -> None:
    for sampler in pool.samplers:

        async def poison(_: Any) -> None:
            raise StateLost("the engine process died")

        sampler.fault["generate"] = poison
    record = await pool.stack.until((await pool.stack.submit()).id, "paused", "succeeded")
    assert record.status == "paused" and "the engine process died" in (record.error or "")


async def test_what_every_sampler_would_answer_alike_is_asked_once(pool: Pool) -> None:
    for sampler in pool.samplers:

        async def refuse(_: Any) -> None:
            raise BadRequest("'temperature': got -1, expected 0 or more")

        sampler.fault["generate"] = refuse
    record = await pool.stack.until((await pool.stack.submit()).id, "paused")
    assert "'temperature'" in (record.error or "")
    assert not await pool.said(record, "is out")


@pytest.mark.parametrize("max_num_seqs", [8])
async def test_no_sampler_gets_a_group_while_it_has_no_free_place(
    pool: Pool,
) -> None:
    """Groups are of 4, so one may begin while any of 8 places is free."""
    for sampler in pool.samplers:
        sampler.fault["generate"] = lambda _: asyncio.sleep(0.05)
    record = await finished(pool)
    pool.check_groups(record)
    assert [sampler.most_busy <= 11 for sampler in pool.samplers] == [True, True]


@pytest.mark.parametrize(("max_num_seqs", "kv_cache_tokens"), [(64, 16)])
async def test_no_sampler_gets_more_than_its_cache_holds(pool: Pool) -> None:
    """A completion may take 4 tokens, so 4 have room; it takes 2 and a quarter of the prompt's one,
    so later 7 do. Groups are of 4, of which the last may begin while there is any room."""
    for sampler in pool.samplers:
        sampler.fault["generate"] = lambda _: asyncio.sleep(0.02)
    record = await finished(pool)
    pool.check_groups(record)
    assert [4 <= sampler.most_busy <= 7 + 3 for sampler in pool.samplers] == [True, True]


@pytest.mark.parametrize("drain", [False, True])
async def test_a_sync_waits_for_groups_under_way_only_if_the_job_says_so(
    pool: Pool, drain: bool
) -> None:
    """Of step 2, one group is under way while step 1 is synced: with staleness 1 it may be."""
    stragglers = 0
    gate = asyncio.Event()

    async def straggle(_: Any) -> None:
        nonlocal stragglers
        key = request_key.get() or ""
        if key.split(":")[3] == "2" and not stragglers:
            stragglers += 1
            await gate.wait()

    for sampler in pool.samplers:
        sampler.fault["generate"] = straggle
    job = pool.stack.job.model_copy(
        update={"steps": 2, "max_staleness": 1, "drain_before_sync": drain}
    )
    job_id = (await pool.stack.submit(job)).id
    while pool.stack.fakes.calls["publish"] < 2:
        await asyncio.sleep(0.01)
    if drain:
        await asyncio.sleep(0.3)
        assert sorted(sampler.serving.version or 0 for sampler in pool.samplers) == [0, 1]
    else:
        while [sampler.serving.version for sampler in pool.samplers] != [1, 1]:
            await asyncio.sleep(0.01)
    gate.set()
    record = await pool.stack.until(job_id)
    assert record.status == "succeeded"
    pool.check_groups(record)


async def test_one_url_that_two_samplers_answer_at_is_refused_with_what_to_do(pool: Pool) -> None:
    """A reload would reach only one of them."""
    first, second = pool.samplers
    async with round_robin(first.url, second.url) as url:
        pool.stack.settings.__dict__["rollout_url"] = url
        record = await pool.stack.until((await pool.stack.submit()).id, "paused", "succeeded")
    assert record.status == "paused" and record.error is not None
    said = rf"{url} answers as two samplers '(r0' and 'r1|r1' and 'r0)', as a load balancer does"
    assert re.search(said, record.error)
    assert "name each sampler in HONE_ROLLOUT_URL" in record.error
    assert not first.groups and not second.groups


@pytest.mark.parametrize("count", [3])
async def test_a_load_balancer_among_the_samplers_costs_no_group(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "REPLICA_SHARE", 1.0)
    first, second, third = pool.samplers
    async with round_robin(first.url, second.url) as url:
        pool.stack.settings.__dict__["rollout_url"] = f"{url},{third.url}"
        record = await finished(pool)
    pool.check_groups(record)
    assert record.recoveries == 0
    assert (len(first.groups), len(second.groups), len(third.groups)) == (0, 0, 24)
    (said,) = await pool.said(record, "joins later")
    assert "answers as two samplers" in said


async def test_two_samplers_of_one_name_behind_one_url_are_distinguished(pool: Pool) -> None:
    first, second = pool.samplers
    second.name = "r0"
    await second.kill()
    await second.start()
    async with round_robin(first.url, second.url) as url:
        pool.stack.settings.__dict__["rollout_url"] = url
        record = await pool.stack.until((await pool.stack.submit()).id, "paused", "succeeded")
    assert "answers as two engines of the name 'r0'" in (record.error or "")


@pytest.mark.parametrize("count", [1])
@pytest.mark.parametrize("name", ["r0", "r7"])
async def test_a_sampler_started_again_while_it_is_asked_who_it_is_gets_the_model_again(
    pool: Pool, name: str
) -> None:
    """It is no load balancer: what has died does not answer again."""
    (sampler,) = pool.samplers

    async def die(_: Any) -> None:
        if sampler.calls["weights"] == 3:
            sampler.name = name
            sampler.forget()

    sampler.fault["weights"] = die
    record = await finished(pool)
    pool.check_groups(record)
    assert record.recoveries == 0
    assert sampler.calls["model"] == 2 and sampler.serving.version == 4


@pytest.mark.parametrize("count", [1])
async def test_a_sampler_that_dies_whenever_it_has_the_model_pauses_the_job_in_the_end(
    pool: Pool,
) -> None:
    (sampler,) = pool.samplers

    async def die(_: Any) -> None:
        sampler.forget()

    sampler.fault["weights"] = die
    record = await pool.stack.until((await pool.stack.submit()).id, "paused", "succeeded")
    assert record.status == "paused"
    assert f"{sampler.url} was restarted 3 times while it was given the model" in str(record.error)


@pytest.mark.parametrize("count", [1])
async def test_a_new_engine_of_the_same_name_is_out_until_it_has_the_jobs_model(pool: Pool) -> None:
    """A service that starts an engine by itself (HONE_ROLLOUT_MODEL) starts it as no job asked."""
    (sampler,) = pool.samplers
    engines: list[str] = []

    async def start_anew(ref: Any) -> None:
        engines.append(sampler.serving.boot_id)
        if ref.version == 2 and len(engines) == 3:
            another = {"boot_id": "by itself", "model": "of the settings"}
            sampler.serving = sampler.serving.model_copy(update=another)

    sampler.fault["reload"] = start_anew
    record = await finished(pool)
    pool.check_groups(record)
    assert sampler.calls["model"] == 2 and sampler.serving.version == 4
    assert sampler.serving.boot_id not in ("by itself", engines[0])


async def test_another_sampler_at_the_same_url_is_out_until_it_has_the_model(pool: Pool) -> None:
    _, second = pool.samplers

    async def become_another(ref: Any) -> None:
        if ref.version == 2:
            second.serving = second.serving.model_copy(update={"replica": "r7"})

    second.fault["reload"] = become_another
    record = await finished(pool)
    pool.check_groups(record)
    assert record.recoveries == 0
    (said,) = await pool.said(record, "is out")
    assert f"sampler 'r7' answers at {second.url}, and 'r1' did when the model was loaded" in said


@pytest.mark.parametrize("value", ["rollout:8001", "ftp://a:1", "http://"])
def test_a_place_that_is_no_url_is_named(value: str) -> None:
    with pytest.raises(ValueError, match="expected for example"):
        Settings(rollout_url=f"http://a:1,{value}")


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 20))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_killed_at_any_moment_every_group_is_there_once(pool: Pool, seed: int) -> None:
    """One of two samplers is killed at a random moment, of sampling or of a sync, and comes back
    without a model."""
    choose = random.Random(seed)
    victim = choose.choice(pool.samplers)
    moment = choose.randrange(1, 25)
    seen = Counter[str]()
    killed = asyncio.Event()

    async def count(_: Any) -> None:
        seen["all"] += 1
        if seen["all"] == moment:
            killed.set()
        await asyncio.sleep(choose.random() * 0.03)

    for sampler in pool.samplers:
        sampler.fault |= {"generate": count, "reload": count}
    job_id = (await pool.stack.submit()).id
    await killed.wait()
    await asyncio.sleep(choose.random() * 0.03)
    await victim.kill()
    await asyncio.sleep(choose.random() * 0.3)
    await victim.start()
    record = await pool.stack.until(job_id, "succeeded", "failed", "paused")
    assert (record.status, record.error) == ("succeeded", None)
    pool.check_groups(record)
