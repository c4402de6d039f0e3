"""The queue on a real Redis: who gets a job, who is refused, and what a retry does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from services.orchestrator.store import connection, identity, keys, leases
from services.orchestrator.store import store as store_module
from services.orchestrator.store.connection import StoreEmptied, StoreUnavailable
from services.orchestrator.store.leases import MAX_TRIES, Lease, LeaseLost, resource
from services.orchestrator.store.lists import JobFilter
from services.orchestrator.store.records import Submission, UnreadableRecord, new_job_id
from services.orchestrator.store.registrations import RegisteredTrainer
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Conflict, NotFound
from shared.http.connecting import Presence, no_notify
from shared.job import DataSpec, EvaluationSpec, HeldOutSpec
from shared.wire import JobSummary, Obstacle, UploadedFile
from tests.support import orchestrator_stack
from tests.support.job_records import JOB
from tests.support.link import Link

TRAINER = "http://trainer"
RUNS = Path("/runs")
REDIS = Presence("Redis", no_notify)

# fixtures: of one orchestrator, and of another
store, other = orchestrator_stack.store, orchestrator_stack.store


@pytest.fixture
async def raw(redis_url: str) -> AsyncGenerator[Any]:
    client = redis.from_url(redis_url, decode_responses=True)
    yield client
    await client.aclose()


async def expire(raw: Any) -> None:
    """What the time of a lease does, at once."""
    await raw.delete(*await raw.keys("hone:lease:*"))


async def submit(store: Store, **changes: Any) -> str:
    return (await store.submit(Submission(JOB.model_copy(update=changes), RUNS))).id


async def take(store: Store, trainer: str = TRAINER, lease_s: float = 30) -> Lease:
    lease = await store.take("worker", trainer, lease_s)
    assert lease is not None
    return lease


async def finish(store: Store, lease: Lease) -> None:
    await store.report(lease, "status", "succeeded", {"status": "succeeded"}, status="succeeded")


def uploaded(digit: str) -> UploadedFile:
    return UploadedFile(
        id="file-" + 24 * digit,
        bytes=1,
        created_at=1_700_000_000,
        filename="rows.jsonl",
        purpose="fine-tune",
    )


async def messages(store: Store, job_id: str) -> list[str]:
    return [event.message for event in await store.events(job_id, "0")]


# --- leases


@pytest.mark.parametrize(
    ("own", "taken_by_another"), [("ready", False), ("away", True), ("silent", True)]
)
async def test_a_job_that_was_cut_off_is_left_to_its_own_trainer_if_that_is_ready(
    store: Store, other: Store, raw: Any, own: str, taken_by_another: bool
) -> None:
    cut, queued = await submit(store), await submit(store)
    await store.halt(await take(store, "one:1"), None)
    await store.trainers.register(
        "one:1/a", "one:1", ["s:1"], "no answer" if own == "away" else None
    )
    assert 9_000 < await raw.pttl("hone:trainer:one:1/a") <= 10_000
    if own == "silent":  # for ten seconds
        await raw.delete("hone:trainer:one:1/a")
    lease = await take(other, "two:1")
    assert lease.job_id == (cut if taken_by_another else queued)
    assert (await take(store, "one:1")).job_id == (queued if taken_by_another else cut)


async def test_interrupted_jobs_are_left_to_trainers_that_may_not_be_registered_yet(
    store: Store, other: Store
) -> None:
    cut, queued = await submit(store), await submit(store)
    await store.halt(await take(store, "one:1"), None)
    assert await other.take("worker", "two:1", 30.0, own_only=True) is None
    own = await store.take("worker", "one:1", 30.0, own_only=True)
    assert own is not None and own.job_id == cut
    lease = await other.take("worker", "two:1", 30.0, own_only=True)
    assert lease is not None and lease.job_id == queued


async def test_registrations_of_trainers_are_read_only_where_a_job_of_another_one_waits(
    store: Store, raw: Any
) -> None:
    async def num_read() -> int:
        stats = await raw.info("commandstats")
        return stats.get("cmdstat_smembers", {}).get("calls", 0)

    await submit(store)
    await store.halt(await take(store, "one:1"), None)
    before = await num_read()
    await take(store, "one:1")
    assert await store.take("worker", "two:1", 30) is None
    assert await num_read() == before
    await expire(raw)
    await take(store, "two:1")
    assert await num_read() == before + 1


async def test_a_cut_off_job_goes_elsewhere_if_its_trainer_has_another_job(
    store: Store, other: Store
) -> None:
    cut = await submit(store)
    await store.halt(await take(store, "one:1"), None)
    await store.trainers.register("one:1/a", "one:1", ["s:1"], None)
    assert await other.take("b", "two:1", 30) is None
    await submit(store)
    assert await store.take("c", "three:1", 30, ["s:1"])
    assert (await take(other, "two:1")).job_id == cut


async def test_a_job_that_waits_says_why_each_trainer_takes_none(store: Store) -> None:
    running = await submit(store)
    assert await store.take("a", "one:1", 30, ["s1:1"])
    for name, samplers in (("one:1", "s1:1"), ("two:1", "s2:1"), ("three:1", "s1:1")):
        await store.trainers.register(f"{name}/a", name, [samplers], None)
    await store.trainers.register("four:1/a", "four:1", ["s4:1"], "no connection")
    for host, away in (("a", "no route"), ("b", None)):
        await store.trainers.register(f"five:1/{host}", "five:1", ["s5:1"], away)
    waiting = await submit(store)
    found = await store.get(waiting)
    taken = {"one:1": Obstacle(job=running), "three:1": Obstacle(job=running)}
    away = {"four:1": Obstacle(away="no connection")}
    assert found.place == 1
    assert found.waits_for == {**taken, **away}


@pytest.mark.parametrize("order", ["AB", "BA"])
async def test_one_trainer_is_given_to_one_worker(store: Store, other: Store, order: str) -> None:
    first, second = (store, other) if order == "AB" else (other, store)
    ids = [await submit(store) for _ in range(2)]
    lease = await take(first)
    assert lease.job_id == ids[0]
    assert await second.take("b", TRAINER, 30) is None
    assert await first.take("a", TRAINER, 30) is None
    await finish(first, lease)
    assert (await take(second)).job_id == ids[1]


async def test_of_many_takers_at_once_one_gets_a_job(redis_url: str, store: Store) -> None:
    for _ in range(8):
        await submit(store)
    stores = [Store(redis_url) for _ in range(8)]
    for _ in range(5):
        leases = await asyncio.gather(*(each.take("w", TRAINER, 30) for each in stores))
        (lease,) = [lease for lease in leases if lease]
        await finish(store, lease)
    for each in stores:
        await each.close()


async def test_another_trainer_takes_another_job(store: Store, other: Store) -> None:
    ids = [await submit(store) for _ in range(2)]
    leases = [await take(store, "http://one"), await take(other, "http://two")]
    assert [lease.job_id for lease in leases] == ids
    assert await store.take("w", "http://three", 30) is None, "both jobs have a worker"


async def test_a_sampler_that_a_job_has_is_given_to_no_other(
    store: Store, other: Store, raw: Any
) -> None:
    ids = [await submit(store) for _ in range(2)]
    first = await store.take("a", "trainer-1:1", 60, ["sampler-1:1", "sampler-2:1"])
    assert first is not None
    assert await other.take("b", "trainer-2:1", 30, ["sampler-2:1", "sampler-3:1"]) is None
    await raw.pexpire("hone:lease:sampler-2:1", 30_000)
    await store.beat(first)
    assert await raw.pttl("hone:lease:sampler-2:1") > 30_000, "it is renewed with the trainer's"
    await finish(store, first)
    second = await other.take("b", "trainer-2:1", 30, ["sampler-2:1", "sampler-3:1"])
    assert second is not None and second.job_id == ids[1]
    assert sorted(await raw.keys("hone:lease:*")) == [
        f"hone:lease:{name}:1" for name in ("sampler-2", "sampler-3", "trainer-2")
    ]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://Trainer.example:8002/", "trainer.example:8002"),
        ("http://trainer.example.", "trainer.example:80"),
        ("https://trainer.example", "trainer.example:443"),
        ("http://10.0.0.7:8002", "10.0.0.7:8002"),
        ("http://[fd00::1]:8002", "fd00::1:8002"),
        ("http://localhost:8002", "this-host:8002"),
        ("http://127.0.0.1:8002/", "this-host:8002"),
        ("http://[::1]:8002", "this-host:8002"),
        ("http://This-Host:8002", "this-host:8002"),
    ],
)
def test_a_lease_is_on_the_same_service_however_its_url_is_spelt(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "This-Host")
    assert resource(url) == name


@pytest.mark.slow
async def test_attempts_grow_over_all_jobs_and_over_an_emptied_redis(
    store: Store, raw: Any, tmp_path: Path
) -> None:
    before = int(time.time())
    attempts: list[int] = []
    for _ in range(3):
        await submit(store)
        lease = await take(store)
        attempts.append(lease.attempt)
        await finish(store, lease)
    assert attempts[0] >= before and attempts == sorted(set(attempts))
    await raw.flushall()
    assert await store.check(tmp_path) is None, "no run folder says that it had jobs"
    while time.time() < attempts[-1] + 1:  # in the long run, leases are rarer than one per second
        await asyncio.sleep(0.1)
    await submit(store)
    assert (await take(store)).attempt > attempts[-1]


async def test_a_lease_that_expired_can_do_nothing_even_if_no_one_took_over(store: Store) -> None:
    job_id = await submit(store)
    lease = await take(store, lease_s=0.2)
    await asyncio.sleep(0.3)
    for act in (
        lambda: store.beat(lease),
        lambda: store.report(lease, "log", "late"),
        lambda: store.halt(lease, "late"),
    ):
        with pytest.raises(LeaseLost):
            await act()
    assert (await store.get(job_id)).status == "running"
    again = await take(store)
    assert again.job_id == job_id and again.attempt > lease.attempt


async def test_beats_keep_a_lease_and_an_older_worker_is_refused(
    store: Store, other: Store
) -> None:
    job_id = await submit(store)
    first = await take(store, lease_s=2)
    for _ in range(4):
        await asyncio.sleep(0.7)
        assert await store.beat(first) is None
    assert await other.take("b", TRAINER, 30) is None
    await asyncio.sleep(2.2)
    second = await take(other)
    assert (second.job_id, (await other.get(job_id)).attempts) == (job_id, 2)
    for act in (
        lambda: store.beat(first),
        lambda: store.report(first, "step", "late", {"step": 7}, step=7),
        lambda: store.halt(first, "late"),
    ):
        with pytest.raises(LeaseLost):
            await act()
    assert (await other.get(job_id)).step == 0 and "late" not in await messages(other, job_id)


async def test_a_job_that_was_cut_off_continues_before_the_next_one(store: Store) -> None:
    ids = [await submit(store) for _ in range(2)]
    assert (await take(store, lease_s=0.1)).job_id == ids[0]
    await asyncio.sleep(0.2)
    assert (await take(store)).job_id == ids[0]


async def test_a_lease_given_back_is_free_at_once(store: Store, other: Store) -> None:
    ids = [await submit(store) for _ in range(2)]
    lease = await take(store)
    await store.halt(lease, None)
    assert (await store.get(ids[0])).status == "queued"
    again = await take(other)
    assert again.job_id == ids[0] and again.attempt > lease.attempt
    await store.pause(ids[0])
    assert await other.beat(again) == "pause"
    await store.resume(ids[0])
    assert await other.beat(again) is None, "the pause was called off"
    await other.halt(again, None)
    assert (await store.get(ids[0])).status == "queued"
    again = await take(other)
    await store.pause(ids[0])
    await store.cancel(ids[0])
    await other.halt(again, None)
    assert (await store.get(ids[0])).status == "cancelled"
    paused = await take(other)
    await other.halt(paused, "the judge is unreachable")
    record = await store.get(ids[1])
    assert (record.status, record.error) == ("paused", "the judge is unreachable")
    await store.cancel(ids[1])
    record = await store.get(ids[1])
    assert (record.status, record.error) == ("cancelled", None) and record.finished_at
    with pytest.raises(Conflict, match="was cancelled"):
        await store.resume(ids[1])


async def test_a_job_that_kills_its_workers_pauses_and_the_next_one_runs(store: Store) -> None:
    ids = [await submit(store) for _ in range(2)]
    for _ in range(MAX_TRIES):
        assert (await take(store, lease_s=0.005)).job_id == ids[0]
        await asyncio.sleep(0.02)
    assert (await take(store)).job_id == ids[1]
    record = await store.get(ids[0])
    assert (record.status, record.finished_at) == ("paused", None)
    assert record.error is not None and record.error.startswith("gave up after 20 attempts")
    await store.cancel(ids[1])
    assert (await store.resume(ids[0])).status == "queued"


async def test_a_job_that_is_left_counts_a_failed_attempt(store: Store) -> None:
    job_id = await submit(store)
    first = await take(store, "trainer-1")
    await store.report(first, "step", "a step", {"step": 1}, step=1)
    await store.leave(first, "another attempt has it")
    found = [first.tries]
    for number in range(2, 22):
        lease = await take(store, f"trainer-{number}")
        found.append(lease.tries)
        await store.leave(lease, "another attempt has it")
    assert found == [1, *range(1, 21)]
    assert await store.take("worker", "trainer-22", 30) is None
    record = await store.get(job_id)
    assert record.status == "paused" and "gave up after 20 attempts" in str(record.error)
    assert (await messages(store, job_id))[-3:] == [
        "another attempt has it",
        "queued",
        record.error,
    ]
    assert (await store.resume(job_id)).status == "queued"


async def test_what_would_be_taken_is_known_before_and_what_is_skipped_waits(store: Store) -> None:
    first, second = await submit(store), await submit(store)
    assert await store.peek("trainer-1") == first
    assert await store.peek("trainer-1", (), [first]) == second
    assert await store.peek("trainer-1", (), [first, second]) is None
    await store.hold(first, "data.train cannot be read")
    await store.hold(first, "data.train cannot be read")
    held = await store.get(first)
    assert (held.status, held.attempts, held.waits) == ("queued", 0, "data.train cannot be read")
    events = [event.message for event in await store.events(first, "0")]
    assert events.count("waits: data.train cannot be read") == 1
    lease = await store.take("worker", "trainer-1", 30.0, (), [first])
    assert lease is not None and lease.job_id == second
    assert (await take(store, "trainer-2")).job_id == first
    assert (await store.get(first)).waits is None


async def test_what_a_job_of_a_killed_worker_waited_for_is_not_shown_on(
    store: Store, other: Store
) -> None:
    job_id = await submit(store)
    lease = await take(store)
    await store.beat(lease, "step 1", "the trainer service is unreachable since 12:00:00 UTC (9 s)")
    await other.open()  # within the lease
    assert (await store.get(job_id)).waits is None
    unreachable = "the trainer service is unreachable since 12:00:00 UTC"
    await store.beat(lease, "step 1", f"{unreachable} (10 s)")
    assert (await store.get(job_id)).waits  # its worker lives after all


async def test_a_job_that_ends_after_the_clock_went_back_is_the_newest_ended(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEEP_JOBS", 2)
    store, now = Store(redis_url), time.time()
    ids: list[str] = []
    for at in (now, now + 1, now - 3600):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        ids.append(await submit(store))
        await finish(store, await take(store))
    assert [await store.status(job_id) for job_id in ids] == [None, "succeeded", "succeeded"]
    await store.close()


async def test_a_registration_that_cannot_be_read_stops_no_other(store: Store, raw: Any) -> None:
    await store.trainers.register("good", "trainer-1", ["s1"], "no answer from caf\u00e9 \ud800")
    await store.trainers.register("other", "trainer-2", ["s2"], None)
    for name, text in {"a": "{", "b": '{"trainer": "t"}', "c": '"t"', "d": r'["\ud800"]'}.items():
        await raw.sadd(keys.TRAINERS, name)
        await raw.set(keys.TRAINER + name, text)
    found = await store.trainers.all()
    assert sorted(found, key=lambda each: each.trainer) == [
        RegisteredTrainer("trainer-1", "no answer from caf\u00e9 ?"),
        RegisteredTrainer("trainer-2", None, free=True),
    ]
    job_id = await submit(store)
    assert (await store.get(job_id)).waits_for
    assert (await take(store)).job_id == job_id
    await submit(store)
    await take(store, "trainer-2")
    assert [each.free for each in await store.trainers.all()] == [False, False]


async def test_a_job_that_kills_its_workers_is_cancelled_if_that_was_asked_for(
    store: Store,
) -> None:
    job_id = await submit(store)
    for _ in range(MAX_TRIES):
        await take(store, lease_s=0.005)
        await asyncio.sleep(0.02)
    await store.cancel(job_id)
    assert await store.take("worker", TRAINER, 30) is None
    assert (await store.get(job_id)).status == "cancelled"


@pytest.mark.parametrize(("ask", "status"), [("cancel", "cancelled"), ("pause", "paused")])
async def test_what_a_worker_was_asked_before_it_went_is_done_when_the_job_is_to_be_taken(
    store: Store, raw: Any, ask: str, status: str
) -> None:
    job_id, next_id = await submit(store), await submit(store)
    await take(store)
    assert (await getattr(store, ask)(job_id)).status == "running"
    await expire(raw)
    assert (await take(store)).job_id == next_id
    record = await store.get(job_id)
    assert (record.status, record.attempts) == (status, 1)
    assert record.error == ("paused on request" if ask == "pause" else None)


async def test_a_paused_job_has_the_code_of_its_reason_until_it_is_resumed(store: Store) -> None:
    job_id = await submit(store)
    assert (await store.pause(job_id)).pause_reason == "requested"
    assert (await store.resume(job_id)).pause_reason is None
    await store.halt(await take(store), "a disk is full")
    (listed,) = (await store.list(None, 10)).jobs
    assert listed.pause_reason == (await store.get(job_id)).pause_reason == "error"
    await store.resume(job_id)
    await store.halt(await take(store), "another job waits", "preempted")
    assert (await store.get(job_id)).pause_reason == "preempted"
    assert (await store.cancel(job_id)).pause_reason is None


async def test_a_job_that_was_to_be_cancelled_is_not_paused_instead(store: Store, raw: Any) -> None:
    job_id = await submit(store)
    await take(store)
    await store.cancel(job_id)
    await expire(raw)
    assert (await store.pause(job_id)).status == "cancelled"


@pytest.mark.parametrize(("ask", "status"), [("cancel", "cancelled"), ("pause", "paused")])
async def test_an_unowned_job_is_stopped_at_once(store: Store, ask: str, status: str) -> None:
    job_id = await submit(store)
    await take(store, lease_s=0.05)
    await asyncio.sleep(0.1)
    assert (await store.get(job_id)).place == 1
    assert (await getattr(store, ask)(job_id)).status == status
    assert await store.take("b", TRAINER, 30) is None


async def test_only_a_step_that_was_not_done_before_counts_attempts_again(
    store: Store, raw: Any
) -> None:
    """A job that kills its worker and the trainer would else be replayed for ever."""
    job_id = await submit(store)
    tries: list[str | None] = []
    for step in (4, 2, 4, 5):
        lease = await take(store, lease_s=0.2)
        await store.report(lease, "step", "done", {"step": step})
        tries.append(await raw.hget(keys.job(job_id), "tries"))
        await asyncio.sleep(0.25)
    assert tries == ["0", "1", "2", "0"]


async def test_a_worker_that_stops_takes_back_its_own_attempt_and_no_other(
    store: Store, raw: Any
) -> None:
    job_id = await submit(store)
    tries: list[str | None] = []
    for does_step in (False, True, True):
        lease = await take(store)
        if does_step:
            await store.report(lease, "step", "done", {"step": len(tries)})
        await store.halt(lease, None)
        tries.append(await raw.hget(keys.job(job_id), "tries"))
    await take(store, lease_s=0.05)
    await expire(raw)
    await store.halt(await take(store), None)
    tries.append(await raw.hget(keys.job(job_id), "tries"))
    assert tries == ["0", "0", "0", "1"]


# --- heartbeat


@contextlib.asynccontextmanager
async def linked(redis_url: str, folder: Path) -> AsyncGenerator[tuple[Store, Link]]:
    at = folder / "link.sock"
    async with Link(Path(redis_url.removeprefix("unix://")), at) as link:
        store = Store(f"unix://{at}")
        yield store, link
        await store.close()


@pytest.mark.slow
async def test_a_worker_that_redis_cannot_be_reached_from_stops_within_its_lease(
    redis_url: str, tmp_path: Path, other: Store
) -> None:
    """Its connections hang, as with a cut network; another worker takes the job over, and nothing
    that the first one then sends counts."""
    job_id = await submit(other)
    async with linked(redis_url, tmp_path) as (store, link):
        taken_at = time.monotonic()
        lease = await take(store, lease_s=5)
        beat = asyncio.create_task(leases.keep(store.beat, lease, taken_at, REDIS))
        await asyncio.sleep(1)
        assert not beat.done()
        link.stall()
        cut_at = time.monotonic()
        with pytest.raises(LeaseLost, match="no heartbeat"):
            await beat
        stopped_at = time.monotonic()
        assert 2.0 < stopped_at - cut_at < 5.0
        while not (second := await other.take("b", TRAINER, 30)):
            await asyncio.sleep(0.02)
        assert second.job_id == job_id and time.monotonic() > stopped_at, "stopped before"
        late = asyncio.create_task(store.report(lease, "log", "late"))
        await asyncio.sleep(0.1)
        link.mend()
        with pytest.raises(LeaseLost):
            await late
        assert "late" not in await messages(other, job_id)


async def test_a_redis_that_stands_still_stops_the_worker_within_its_lease(
    store: Store, raw: Any
) -> None:
    await submit(store)
    pid = (await raw.info("server"))["process_id"]
    taken_at = time.monotonic()
    lease = await take(store, lease_s=4)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(LeaseLost, match="no heartbeat"):
            await leases.keep(store.beat, lease, taken_at, REDIS)
        assert 2.0 < time.monotonic() - taken_at < 4.0
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
async def test_a_short_silence_of_redis_costs_nothing(store: Store, raw: Any) -> None:
    await submit(store)
    pid = (await raw.info("server"))["process_id"]
    taken_at = time.monotonic()
    lease = await take(store, lease_s=3)
    beat = asyncio.create_task(leases.keep(store.beat, lease, taken_at, REDIS))
    await asyncio.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)
    os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(2.5)
    assert not beat.done() and await store.beat(lease) is None
    await store.pause(lease.job_id)
    assert await beat == "pause"


async def test_a_folder_of_runs_that_hangs_does_not_keep_heartbeats_waiting(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reads do not come back, and they have taken every thread of the pool."""
    await store.check(tmp_path)
    monkeypatch.setattr(identity, "LOOK_AT_NOTE_S", 0.01)
    mended, hung = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hung.set()
        mended.wait()

    monkeypatch.setattr(identity, "_noted", hang)
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    pool.submit(mended.wait)
    await submit(store)
    try:
        async with asyncio.timeout(60):
            while not hung.is_set():
                await asyncio.sleep(0.01)
            assert await store.beat(await take(store)) is None
    finally:
        mended.set()


async def test_followers_do_not_keep_heartbeats_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    monkeypatch.setattr(connection, "MAX_FOLLOWERS", 5)
    crowded = Store(redis_url)
    job_id = await submit(crowded)
    lease = await take(crowded)
    (last,) = (await crowded.events(job_id, "0"))[-1:]
    followers = [
        asyncio.create_task(crowded.events(job_id, last.id, block_s=20)) for _ in range(20)
    ]
    await asyncio.sleep(0.3)
    async with asyncio.timeout(15):
        assert await crowded.beat(lease) is None
        assert (await crowded.get(job_id)).status == "running"
    for follower in followers:
        follower.cancel()
    await asyncio.gather(*followers, return_exceptions=True)
    await crowded.close()


# --- ids, keys, retries


def test_ids_have_65_random_bits_and_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "n" * 40
    assert len(new_job_id(long)) == 61
    assert len({new_job_id("demo") for _ in range(20_000)}) == 20_000
    random = {new_job_id("demo")[-13:] for _ in range(500)}
    assert {digit for digits in random for digit in digits} == set(
        "0123456789abcdefghjkmnpqrstvwxyz"
    )
    ids: list[str] = []
    for now in (1_000_000_000, 1_763_700_000, 1_763_700_001, 4_102_444_800):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        ids.append(new_job_id("demo"))
    assert ids == sorted(ids)


async def test_an_id_that_is_another_jobs_is_never_answered_as_that_job(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Submission.__module__}.new_job_id", lambda name: f"{name}-same")
    first = await store.submit(Submission(JOB, RUNS))
    for job in (JOB, JOB.model_copy(update={"steps": 3})):
        with pytest.raises(Conflict, match="there is a job 'demo-same' already"):
            await store.submit(Submission(job, Path("/runs"), "key"))
    (only,) = (await store.list(None, 10)).jobs
    assert only.model_dump() == first.model_dump(include=set(JobSummary.model_fields))


def twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every script is sent again, as after an answer that was lost on its way."""

    def sent_twice(script: Any) -> Any:
        async def send(**request: Any) -> str:
            first, again = await script(**request), await script(**request)
            assert again == first, "a retry is answered as the first time"
            return first

        return send

    registered = store._connection._scripts
    for name, script in registered.items():
        monkeypatch.setitem(registered, name, sent_twice(script))


async def test_a_script_whose_answer_was_lost_is_sent_again_and_happens_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice(store, monkeypatch)
    job_id = await submit(store)
    assert len((await store.list(None, 10)).jobs) == 1
    lease = await take(store)
    await store.report(lease, "step", "step 1", {"step": 1}, step=1)
    await store.pause(job_id)
    await store.resume(job_id)
    await store.pause(job_id)
    await store.halt(lease, None)
    await store.resume(job_id)
    lease = await take(store)
    assert (await store.get(job_id)).attempts == 2
    await finish(store, lease)
    await store.cancel(await submit(store))
    assert await messages(store, job_id) == [
        "queued",
        "running",
        "step 1",
        "pausing",
        "not pausing after all",
        "pausing",
        "paused on request",
        "queued",
        "running",
        "succeeded",
    ]
    await store.delete(job_id)


async def test_reports_at_the_same_time_all_arrive(store: Store) -> None:
    job_id = await submit(store)
    lease = await take(store)
    await asyncio.gather(*(store.report(lease, "log", str(n)) for n in range(50)))
    assert set(await messages(store, job_id)) >= {str(n) for n in range(50)}


async def test_a_step_is_reported_again_only_if_its_event_is_missing(store: Store) -> None:
    job_id = await submit(store)
    lease = await take(store)

    async def report(type: str, step: int, *, missing_only: bool = False) -> None:
        message = f"{type} {step}"
        await store.report(
            lease, type, message, {"step": step}, step=step, missing_only=missing_only
        )

    await report("eval", 0, missing_only=True)
    await report("step", 1)
    await report("step", 1, missing_only=True)
    await report("step", 2, missing_only=True)
    await report("eval", 2, missing_only=True)
    await report("step", 1)  # replayed after the trainer went back
    await report("step", 2, missing_only=True)
    shown = [text for text in await messages(store, job_id) if text.startswith(("step", "eval"))]
    assert shown == ["eval 0", "step 1", "step 2", "eval 2", "step 1", "step 2"]


# --- what is stored


async def test_a_record_with_fields_of_another_version_is_read(store: Store, raw: Any) -> None:
    job_id = await submit(store)
    spec = json.loads(await raw.hget(keys.job(job_id), "job"))
    spec["sampling"]["invented"] = 1
    await raw.hset(keys.job(job_id), mapping={"job": json.dumps(spec), "later": "x"})
    assert (await store.get(job_id)).job == JOB


@pytest.mark.parametrize("damage", [{"job": "{}"}, {"job": "no json"}])
async def test_a_job_that_cannot_be_read_is_listed_by_what_can(
    store: Store, raw: Any, damage: dict[str, str]
) -> None:
    job_id = await submit(store)
    await raw.hset(keys.job(job_id), mapping=damage)
    assert [(one.id, one.status) for one in (await store.list(None, 2)).jobs] == [
        (job_id, "queued")
    ]
    with pytest.raises(UnreadableRecord, match="cannot be read by this version"):
        await store.get(job_id)


@pytest.mark.parametrize("damage", [{"steps": "many"}, {"created_at": "once"}])
async def test_a_record_that_cannot_be_read_is_named_and_hides_no_other(
    store: Store, raw: Any, damage: dict[str, str]
) -> None:
    ids = [await submit(store) for _ in range(3)]
    await raw.hset(keys.job(ids[1]), mapping=damage)
    page = await store.list(None, 2)
    assert [record.id for record in page.jobs] == [ids[2]]
    assert page.unreadable == (ids[1],) and page.next_after is not None
    assert [record.id for record in (await store.list(page.next_after, 2)).jobs] == [ids[0]]
    with pytest.raises(UnreadableRecord, match=f"the record of job '{ids[1]}'.*cannot be read"):
        await store.get(ids[1])
    assert (await store.pause(ids[1])).status == "paused"
    assert (await store.resume(ids[1])).status == "queued"
    assert (await store.cancel(ids[1])).status == "cancelled"
    assert await store.ended_run_dir(ids[1]) == RUNS / ids[1]
    await store.delete(ids[1])
    assert (await store.list(None, 10)).unreadable == ()


async def test_a_list_has_the_jobs_that_fit_all_that_is_asked_for(store: Store) -> None:
    a = await submit(store, metadata={"team": "math", "run": "1"})
    b = await submit(store, name="other-one", metadata={"team": "math"})
    c = await submit(store, request={"model": "m"})
    await store.pause(a)

    async def found(**wanted: Any) -> list[str]:
        return [one.id for one in (await store.list(None, 10, JobFilter(**wanted))).jobs]

    assert await found() == [c, b, a]
    assert await found(status="paused") == [a]
    assert await found(name="other-one") == [b]
    assert await found(name="other") == [] == await found(name="demo", status="running")
    assert await found(metadata={"team": "math"}) == [b, a]
    assert await found(metadata={"team": "math", "run": "1"}) == [a]
    assert await found(metadata={"team": "x"}) == []
    assert await found(metadata=None) == [c]
    assert await found(openai=True) == [c]
    page = await store.list(None, 1, JobFilter(metadata={"team": "math"}))
    assert ([one.id for one in page.jobs], page.next_after is None) == ([b], False)
    page = await store.list(b, 1, JobFilter(metadata={"team": "math"}))
    assert ([one.id for one in page.jobs], page.next_after) == ([a], None)


async def test_a_page_continues_after_a_job_that_was_removed_meanwhile(store: Store) -> None:
    ids = [await submit(store) for _ in range(6)]
    page = await store.list(None, 2)
    for removed in ids[4:]:  # the jobs of the first page
        await store.cancel(removed)
        await store.delete(removed)
    rest = await store.list(page.next_after, 3)
    assert [one.id for one in rest.jobs] == ids[3:0:-1]
    assert rest.next_after is not None
    await store.cancel(ids[3])
    await store.delete(ids[3])
    assert [one.id for one in (await store.list(rest.next_after, 3)).jobs] == ids[:1]


async def test_a_page_may_begin_after_the_id_of_a_job_that_is_gone(
    store: Store, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time in it; what is not the id of a job that ever was is refused."""
    old, gone = await submit(store), await submit(store)
    await raw.zincrby(keys.JOBS, -100, old)
    later = time.time() + 100
    monkeypatch.setattr("time.time", lambda: later)
    new = await submit(store)
    assert [one.id for one in (await store.list(gone, 9)).jobs] == [old]
    await store.cancel(gone)
    await store.delete(gone)
    assert [one.id for one in (await store.list(gone, 9)).jobs] == [old]
    assert [one.id for one in (await store.list(new, 9)).jobs] == [old]
    for wrong in ("demo-1", f"{new}:x", f"{new}:", ":1", "demo", "é"):
        with pytest.raises(NotFound, match="to list jobs after"):
            await store.list(wrong, 9)


async def test_a_file_is_removed_or_submitted_with_but_not_both(store: Store) -> None:
    file, other = uploaded("a"), uploaded("b")
    held_out = EvaluationSpec(sets={"hard": HeldOutSpec(source=file.id)})
    changes: tuple[Any, ...] = (
        {"data": DataSpec(train="x", eval=file.id)},
        {"evaluation": held_out},
    )
    for named in changes:
        job_id = await submit(store, **named)
        with pytest.raises(Conflict, match=f"in use by job '{job_id}', which is queued"):
            await store.removals.add(file)
        await store.cancel(job_id)
    await store.removals.add(other)
    with pytest.raises(BadRequest, match=f"'{other.id}' was removed while the job was submitted"):
        await submit(store, data=DataSpec(train=other.id))
    await store.removals.add(file)
    await store.removals.add(file)
    await store.removals.undo(other.id)
    assert await store.removals.created_at(file.id) == 1_700_000_000
    assert await store.removals.created_at(other.id) is None
    await submit(store, data=DataSpec(train=other.id))


async def test_events_are_read_from_the_newest_back(store: Store) -> None:
    job_id = await submit(store)
    await store.pause(job_id)
    await store.resume(job_id)
    events = await store.events(job_id, "0")
    assert len(events) == 3
    assert await store.newest_events(job_id, None, 2) == [events[2], events[1]]
    assert await store.newest_events(job_id, events[1].id, 2) == [events[0]]


async def test_what_is_no_job_does_not_stop_the_queue(store: Store, raw: Any) -> None:
    ids = [await submit(store) for _ in range(3)]
    await raw.delete(keys.job(ids[0]), keys.job(ids[1]))
    await raw.set(keys.job(ids[1]), "a text")
    assert (await store.list(None, 10)).unreadable == (ids[1],)
    assert (await take(store)).job_id == ids[2]
    assert await store.ended_run_dir(ids[1]) is None
    assert (await store.delete(ids[1])).id == ids[1]


async def test_a_status_of_another_version_is_unchanged(store: Store, raw: Any) -> None:
    job_id = await submit(store)
    await raw.hset(keys.job(job_id), "status", "dreaming")
    with pytest.raises(UnreadableRecord, match=r"the record of job .*cannot be read"):
        await store.cancel(job_id)
    assert await store.status(job_id) == "dreaming"


async def test_an_event_that_cannot_be_read_is_shown_at_its_place(store: Store, raw: Any) -> None:
    job_id = await submit(store)
    id = await raw.xadd(keys.events(job_id), {"type": "later", "data": "{}", "message": "m"})
    await store.pause(job_id)
    shown = await store.events(job_id, "0")
    assert [event.message for event in shown][::2] == ["queued", "paused on request"]
    assert (shown[1].id, shown[1].level) == (id, "warning")
    assert "this event cannot be read" in shown[1].message


async def test_jobs_that_fell_out_of_the_lists_are_put_back_at_the_start(
    store: Store, other: Store, raw: Any
) -> None:
    ids = [await submit(store) for _ in range(3)]
    await store.pause(ids[0])
    await raw.delete(keys.QUEUE)
    assert await store.take("w", TRAINER, 30) is None
    await other.open()
    assert (await take(store)).job_id == ids[1], "what is paused stays paused"


async def test_an_emptied_redis_is_asked_for_nothing_until_it_is_accepted(
    store: Store, raw: Any, tmp_path: Path
) -> None:
    before = await submit(store)
    lease = await take(store)
    await raw.flushall()
    for act in (
        lambda: store.report(lease, "log", "late"),
        lambda: store.beat(lease),
        lambda: store.take("w", TRAINER, 30),
        lambda: submit(store),
        lambda: store.get(before),
        lambda: store.list(None, 10),
        lambda: store.samplers.all(),
    ):
        with pytest.raises(StoreEmptied, match="Redis was emptied"):
            await act()
    assert await raw.keys("*") == []
    assert await store.check(tmp_path) is None
    job_id = await submit(store)
    assert (await take(store)).job_id == job_id


async def test_an_id_of_no_job_is_not_found(store: Store) -> None:
    job_id = await submit(store)
    for id in ("nope", "x:events", f"{job_id}:events", "X", "../x", "", "demo\n"):
        for act in (store.get, store.cancel, store.pause, store.resume, store.delete):
            with pytest.raises(NotFound, match="no job"):
                await act(id)


async def test_a_bad_event_id_is_the_callers_fault(store: Store) -> None:
    job_id = await submit(store)
    for id in ("yesterday", "", "-1", "1-2-3", f"{2**64}-0", f"0-{2**64}", "١"):
        with pytest.raises(BadRequest, match="expected an event's id"):
            await store.events(job_id, id)
    assert await store.events(job_id, f"{2**64 - 1}-{2**64 - 1}") == [], "the largest"


# --- what is removed


async def test_an_ended_job_is_deleted_with_all_its_keys(
    store: Store, other: Store, raw: Any
) -> None:
    record = await store.submit(Submission(JOB, Path("/runs"), "key-1"))
    for status in ("queued", "running", "paused"):
        if status == "running":
            lease = await take(store)
            await store.report(lease, "checkpoint", "c", {"step": 3, "path": "/c", "size_bytes": 1})
            assert [c.step for c in await store.checkpoints(record.id)] == [3]
        if status == "paused":
            await store.halt(lease, "why")
        with pytest.raises(Conflict, match=f"is {status}; cancel it before"):
            await store.delete(record.id)
    await store.cancel(record.id)
    for _ in range(2):
        assert (await store.delete(record.id)).id == record.id
    left = set(await raw.keys("*"))
    calls = {key for key in left if key.startswith(keys.CALL)}
    assert left - calls == {
        keys.STORE,
        keys.ATTEMPTS,
        keys.SUBMITTED,
        keys.DELETED + record.id,
    }
    with pytest.raises(NotFound):
        await store.get(record.id)
    again = await store.submit(Submission(JOB, Path("/runs"), "key-1"))
    assert again.id != record.id, "its idempotency key is forgotten as well"
    by_another = await other.submit(Submission(JOB, Path("/runs"), "key-1"))
    assert by_another.id == again.id, "each orchestrator of this Redis knows the key"


async def test_of_the_ended_jobs_the_newest_are_kept(
    redis_url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEEP_JOBS", 2)
    limited = Store(redis_url)
    queued = await submit(limited)
    ids = [await submit(limited) for _ in range(4)]
    for job_id in (ids[1], ids[0], ids[3], ids[2]):
        await limited.cancel(job_id)
    assert [record.id for record in (await store.list(None, 10)).jobs] == [ids[3], ids[2], queued]
    await limited.close()


async def test_of_the_events_the_newest_are_kept(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEEP_EVENTS", 100)
    limited = Store(redis_url)
    await limited.open()
    job_id = await submit(limited)
    lease = await take(limited)
    for number in range(500):
        await limited.report(lease, "log", str(number))
    shown = await messages(limited, job_id)
    assert shown[-100:] == [str(number) for number in range(400, 500)]
    assert len(shown) < 350, "Redis removes whole nodes of up to 100 entries"
    await limited.close()


async def test_every_script_compiles(raw: Any) -> None:
    assert {"take", "beat", "report", "halt"} < keys.SCRIPTS
    for name in keys.SCRIPTS:
        assert await raw.script_load(keys.source(name)), name


def test_scripts_keep_a_calls_answer_longer_than_it_is_retried() -> None:
    attempts = connection.RETRIES + 1
    assert attempts * (connection.SOCKET_TIMEOUT_S + 5 + 2.0) < keys.CALL_TTL_S


async def test_a_redis_that_is_unreachable_is_unavailable(tmp_path: Path) -> None:
    store = Store(f"unix://{tmp_path}/nothing.sock")
    lease = Lease("demo-1", 1, TRAINER, 1)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="HONE_REDIS_URL"):
        await store.beat(lease)
    assert time.monotonic() - began < 1, "a beat does not retry"
    await store.close()


# --- a Redis that refuses


@pytest.mark.parametrize(
    ("refuse", "mend", "sentence"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", r"\(OOM\): its memory is full: raise"),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", r"\(READONLY\): .* leads to a replica"),
        (
            "ACL SETUSER default -evalsha",
            "ACL SETUSER default +@all",
            r"\(NOPERM\): its user lacks",
        ),
    ],
)
async def test_what_redis_refuses_for_a_while_is_unavailable_and_says_what_to_do(
    store: Store, raw: Any, refuse: str, mend: str, sentence: str
) -> None:
    lease = (await submit(store), await take(store))[1]
    await raw.execute_command(*refuse.split())
    with pytest.raises(StoreUnavailable, match=rf"^Redis cannot be used {sentence}"):
        await store.report(lease, "log", "hello")
    await raw.execute_command(*mend.split())
    await store.report(lease, "log", "hello")
    assert (await messages(store, lease.job_id))[-1] == "hello"


async def test_a_record_that_may_not_be_read_now_is_no_record_that_cannot_be_read(
    store: Store, raw: Any
) -> None:
    job_id = await submit(store)
    await raw.execute_command("ACL", "SETUSER", "default", "-hgetall")
    with pytest.raises(StoreUnavailable, match="NOPERM"):
        await store.get(job_id)


@pytest.mark.parametrize(
    ("key", "kind"), [("hone:queue", "zset"), ("hone:job:{id}:events", "stream")]
)
async def test_a_key_that_another_program_wrote_is_named(
    store: Store, raw: Any, key: str, kind: str
) -> None:
    job_id = await submit(store)
    await raw.delete(key.format(id=job_id))
    await raw.set(key.format(id=job_id), "mine")
    with pytest.raises(StoreUnavailable) as raised:
        await store.pause(job_id)
    assert raised.value.code == "wrong_type"
    assert raised.value.detail == (
        "Redis cannot be used (WRONGTYPE): a key of Hone has a value of another type, so another "
        "program writes into this database: give Hone a database of its own, or remove the key; "
        f"'{key.format(id=job_id)}' is a string, expected a {kind}"
    )


async def test_a_model_that_made_room_stays_paused_once_someone_pauses_it(store: Store) -> None:
    job_id = await submit(store)
    await store.halt(await take(store), "preempted: another job waits", "preempted")
    assert (await store.get(job_id)).pause_reason == "preempted"
    await store.resume_preempted(job_id)
    assert (await store.get(job_id)).status == "queued"
    await store.halt(await take(store), "preempted: another job waits", "preempted")
    assert (await store.pause(job_id)).status == "paused"
    record = await store.get(job_id)
    assert (record.pause_reason, record.error) == ("requested", "paused on request")
    await store.pause(job_id)
    await store.resume_preempted(job_id)  # the program's next operation
    assert (await store.get(job_id)).status == "paused"
    assert (await messages(store, job_id)).count("paused on request") == 1
    assert (await store.resume(job_id)).status == "queued"
