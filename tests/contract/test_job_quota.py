"""How many jobs of one API key may wait, run or be paused: counted in Redis, for all orchestrators
together. And whose ended jobs are forgotten first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import redis.asyncio as redis
from pydantic import SecretStr

from services.orchestrator.api.access import Keys
from services.orchestrator.app import create_service
from services.orchestrator.store import keys
from services.orchestrator.store import store as store_module
from services.orchestrator.store.records import Submission, find_runs
from services.orchestrator.store.run_folders import accept
from services.orchestrator.store.store import Store
from shared.errors import Busy
from shared.http.gate import caller
from shared.settings import Settings
from shared.wire import ApiKey
from tests.support.in_process import in_process
from tests.support.job_records import JOB

RUNS = Path("/runs")
FULL = (
    "API key 'al' has 2 jobs that have not ended, paused ones included, and may have no more "
    "(setting HONE_MAX_KEY_JOBS): cancel some, or submit again when some have ended"
)


async def opened(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Store]:
    monkeypatch.setattr(store_module, "KEEP_JOBS", 4)
    store = Store(redis_url, max_key_jobs=2)
    await store.open()
    yield store
    await store.close()


store, other = pytest.fixture(opened, name="store"), pytest.fixture(opened, name="other")


def by(name: str) -> ApiKey:
    return ApiKey(name=name, access="own", created_at=0)


async def submit(store: Store, name: str | None, key: str | None = None) -> str:
    submission = Submission(JOB, RUNS, key, by=by(name) if name else None)
    return (await store.submit(submission)).id


async def is_full(store: Store, name: str = "al") -> bool:
    """Submits, and cancels again what was accepted."""
    try:
        await store.cancel(await submit(store, name))
    except Busy as error:
        assert (error.detail, error.retry_after_s) == (FULL, 3600)
        return True
    return False


async def test_two_orchestrators_at_once_accept_no_job_too_many(store: Store, other: Store) -> None:
    asked = [submit(each, "al") for _ in range(10) for each in (store, other)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(each, str) for each in found) == 2
    assert {str(each) for each in found if not isinstance(each, str)} == {FULL}
    for name in ("a", "al-1", "al0", "ala", None):  # neighbours of "al" in the order of names
        for _ in range(2):
            await submit(store, name)
    await submit(store, None)  # HONE_TOKEN's have no quota


async def test_what_a_job_counts_from_its_submission_to_its_end(
    store: Store, other: Store, redis_url: str
) -> None:
    first, second = await submit(store, "al", "key-1"), await submit(store, "al")
    assert await submit(other, "al", "key-1") == first, "it is the same job"
    await store.pause(first)
    assert await is_full(store), "a paused job counts"
    assert (await other.resume(first)).status == "queued", "and needs no other place"
    lease = await store.take("worker", "http://trainer", 30)
    assert lease and lease.job_id == first
    assert await is_full(other), "a running job counts"
    raw = redis.from_url(redis_url)
    await raw.delete(keys.UNENDED)  # the lists are completed from the hashes
    await raw.aclose()
    assert not await is_full(other)
    await other.open()
    assert await is_full(other), "a restart counts anew"
    await store.halt(lease, None)
    lease = await store.take("worker", "http://trainer", 30)
    assert lease and lease.job_id == first
    await store.report(lease, "status", "failed", {"status": "failed"}, status="failed")
    assert not await is_full(store), "a failed job does not count"
    await store.open()
    third = await submit(store, "al")
    assert await is_full(store)
    await store.cancel(second)
    await store.delete(second)
    assert not await is_full(store) and (await store.get(third)).status == "queued"


async def test_jobs_that_are_recovered_count(settings: Settings, redis_url: str) -> None:
    settings.runs_dir.mkdir(parents=True)
    store = Store(redis_url, max_key_jobs=2)
    await store.open()
    await store.check(settings.runs_dir)
    for _ in range(2):
        await accept(store, Submission(JOB, settings.runs_dir, by=by("al")))
    raw = redis.from_url(redis_url)
    await raw.flushall()
    await raw.aclose()
    again = Store(redis_url, max_key_jobs=2)
    await again.open()
    await again.check(settings.runs_dir)
    await again.recover(find_runs(settings.runs_dir), settings.runs_dir)
    assert await is_full(again)
    await store.close()
    await again.close()


async def test_a_refused_submission_is_a_429_and_leaves_no_folder(
    settings: Settings, store: Store
) -> None:
    settings.runs_dir.mkdir(parents=True)
    settings = settings.model_copy(update={"token": SecretStr("root-token-of-the-stack")})
    header = {"authorization": f"Bearer {Keys(settings.runs_dir).create('al', 'own').secret}"}
    ids = {
        (await accept(store, Submission(JOB, settings.runs_dir, f"al/{n}", by=by("al")))).id
        for n in range(2)
    }
    async with in_process(create_service(settings, store, works=False).app) as http:
        body = {"job": JOB.model_dump(mode="json")}
        refused = await http.post("/v1/jobs", json=body, headers=header)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3600")
        assert refused.json()["detail"] == FULL
        model = {
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "m",
            "lora_config": {"rank": 8},
        }
        refused = await http.post("/api/v1/create_model", json=model, headers=header)
        assert (refused.status_code, refused.json()["detail"]) == (429, FULL)
        known = await http.post("/v1/jobs", json=body, headers=header | {"idempotency-key": "1"})
        assert known.status_code == 200 and known.json()["id"] in ids
    assert {path.name for path in settings.runs_dir.glob("demo-*")} == ids


async def test_a_key_that_submits_and_cancels_forgets_its_own_ended_jobs(store: Store) -> None:
    """Four ended jobs are kept."""
    hers = await submit(store, "alice")
    await store.cancel(hers)
    roots = await submit(store, None)
    await store.cancel(roots)
    his: list[str] = []
    for _ in range(6):
        his.append(await submit(store, "bob"))
        await store.cancel(his[-1])
    assert [each.id for each in (await store.list(None, 10)).jobs] == [his[5], his[4], roots, hers]
    hers_too = await submit(store, "alice")
    await store.cancel(hers_too)
    listed = [each.id for each in (await store.list(None, 10)).jobs]
    assert listed == [hers_too, his[5], his[4], roots], "two each: the oldest of all is forgotten"


async def test_an_api_key_may_withdraw_so_many_submissions(
    store: Store, other: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_WITHDRAWN", 2)
    caller.set(by("al"))
    for key in ("1", "2", "1"):
        assert await store.withdraw(key) is None
    for each in (store, other):
        with pytest.raises(Busy, match="API key 'al' has withdrawn 2 submissions within 24 hours"):
            await each.withdraw("3")
    raw = redis.from_url(redis_url)
    assert 86_000 < await raw.ttl(f"{keys.WITHDRAWN}al") <= 86_400
    later = time.time() + 86_401
    monkeypatch.setattr(time, "time", lambda: later)
    assert await store.withdraw("3") is None
    assert await raw.zcard(f"{keys.WITHDRAWN}al") == 1
    await raw.aclose()
    for number in range(4):
        caller.set(by("ala") if number < 2 else None)
        assert await store.withdraw(f"of another {number}") is None
