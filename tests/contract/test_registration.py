"""Samplers that register themselves: who may, for how long, and what a running job makes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from hone.commands.doctor import examine_stack
from services.orchestrator.app import create_service
from services.orchestrator.samplers import discovery
from services.orchestrator.samplers import pool as pool_module
from services.orchestrator.samplers.discovery import is_one_host, sampler_urls
from services.orchestrator.samplers.pool import Pool as SamplerPool
from services.orchestrator.samplers.status import Caller
from services.orchestrator.store import registrations
from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.leases import resource
from services.orchestrator.store.store import Store
from services.rollout import app as sampler_app
from services.rollout.app import registered
from shared.errors import BadRequest, Conflict, HoneError
from shared.host.processes import free_port
from shared.http.client import Client
from shared.http.operations import DrainState
from shared.job import Job
from shared.settings import Settings
from shared.wire import (
    ModelRequest,
    RegisteredSampler,
    Registration,
    SamplerList,
    ServingWeights,
    Unregistered,
)
from tests.support import orchestrator_stack
from tests.support.fake_samplers import FakeSampler, pool_of
from tests.support.job_records import JOB
from tests.support.orchestrator_stack import orchestrator_client
from tests.support.pool_stack import Pool, pool_stack
from tests.support.rollout_bench import RolloutBench
from tests.support.running import served

pytestmark = pytest.mark.slow

job, store = orchestrator_stack.job, orchestrator_stack.store  # fixtures
URL = "http://127.0.0.1:8001"


@pytest.fixture
async def client(settings: Settings, redis_url: str) -> AsyncGenerator[Client]:
    """Of an orchestrator that takes registrations."""
    settings = settings.model_copy(update={"rollout_url": "registered"})
    async with orchestrator_client(settings, redis_url) as client:
        yield client


async def register(client: Client, replica: str, url: str = URL, **more: Any) -> RegisteredSampler:
    body = Registration(url=url, **more)
    path = f"/v1/samplers/{replica}"
    return await client.call("PUT", path, body, RegisteredSampler, deadline_s=10)


async def unregister(client: Client, replica: str, of: str = "") -> Unregistered:
    return await client.call(
        "DELETE", f"/v1/samplers/{replica}{of}", None, Unregistered, deadline_s=10
    )


async def listed(client: Client) -> list[str]:
    return [each.replica for each in (await client.get("/v1/samplers", SamplerList)).samplers]


# --- who may, and for how long --------------------------------------------------------------------


async def test_a_lease_ends_unless_the_sampler_renews_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "SAMPLER_REGISTRATION_S", 1.5)
    body = Registration(url=URL)
    first = await store.samplers.register("stays", body)
    await store.samplers.register("goes", Registration(url="http://127.0.0.1:8002"))
    assert await store.samplers.urls() == ["http://127.0.0.1:8002", URL]
    while len(found := await store.samplers.all()) > 1:
        last = await store.samplers.register("stays", body)
        await asyncio.sleep(0.01)
    assert [each.replica for each in found] == ["stays"]
    assert last.expires_at > first.expires_at
    while await store.samplers.all():
        await asyncio.sleep(0.01)


async def test_the_second_of_two_samplers_of_one_name_is_refused(
    client: Client,
) -> None:
    await register(client, "r0")
    with pytest.raises(Conflict, match=r"'r0' is registered at http://127.0.0.1:8001, got .*:8002"):
        await register(client, "r0", "http://127.0.0.1:8002")
    await unregister(client, "r0")
    assert (await register(client, "r0", "http://127.0.0.1:8002")).replica == "r0"


async def test_registering_and_leaving_twice_is_doing_so_once(client: Client) -> None:
    await register(client, "host:8001")
    shown = await register(client, "host:8001", job_id="demo-1", version=3)
    assert (shown.url, shown.job_id, shown.version) == (URL, "demo-1", 3)
    assert await listed(client) == ["host:8001"]
    for _ in range(2):
        assert (await unregister(client, "host:8001")).replica == "host:8001"
    assert await listed(client) == []


async def test_an_earlier_life_of_a_sampler_does_not_unregister_the_next_one(
    client: Client,
) -> None:
    await register(client, "r0", boot_id="first")
    await register(client, "r0", boot_id="second")
    await unregister(client, "r0", "?boot_id=first")
    assert await listed(client) == ["r0"]
    await unregister(client, "r0", "?boot_id=second")
    assert await listed(client) == []
    await register(client, "r0", boot_id="third")
    await unregister(client, "r0")
    assert await listed(client) == []


async def test_a_url_that_is_none_of_a_service_is_refused(client: Client) -> None:
    for url, why in (
        ("ftp://127.0.0.1:8001", "is no URL; expected for example http://host:8001"),
        ("127.0.0.1:8001", "is no URL; expected for example http://host:8001"),
        ("http://127.0.0.1:port", "is no URL; expected for example http://host:8001"),
        ("http://127.0.0.1:8001\n", "has a blank, a character beyond ASCII, or more than 1000"),
        ("http://user:secret@127.0.0.1:8001", "holds a user or a password"),
        ("http://127.0.0.1:8001/elsewhere", "continues after host and port"),
        ("http://127.0.0.1:8001?a=b", "continues after host and port"),
    ):
        with pytest.raises(ValueError, match=why):
            Registration(url=url)
        with pytest.raises(ValueError, match=why) as caught:
            Settings(rollout_advertise_url=url)
        assert "HONE" in str(caught.value) or "rollout_advertise_url" in str(caught.value)
        body = Registration.model_construct(url=url, job_id=None, version=None)
        with pytest.raises(BadRequest, match=why):
            await client.call("PUT", "/v1/samplers/r0", body, RegisteredSampler, deadline_s=10)


async def test_a_name_that_is_none_is_refused(client: Client) -> None:
    for replica in ("-r0", "a%20b", "a" * 101):
        with pytest.raises(BadRequest, match="replica"):
            await register(client, replica)


async def test_without_a_token_only_samplers_of_this_machine_register(client: Client) -> None:
    with pytest.raises(BadRequest, match="no HONE_TOKEN"):
        await register(client, "r0", "http://10.0.0.7:8001")


async def test_registering_needs_the_token(settings: Settings, redis_url: str) -> None:
    token: Any = {"token": "a-long-secret", "rollout_url": "registered"}
    settings = Settings(runs_dir=settings.runs_dir, **token)
    store = Store(redis_url)
    await store.open()
    transport = httpx.ASGITransport(app=create_service(settings, store).app)
    for given, status in ((None, 401), ("a-long-guess!", 401), ("a-long-secret", 200)):
        client = Client("orchestrator", "http://h", token=given, transport=transport)
        try:
            await register(client, "r0", "http://10.0.0.7:8001")
            found = 200
        except HoneError as error:
            found = error.status
        assert found == status
        await client.close()
    await store.close()


async def test_where_no_job_would_use_it_a_sampler_is_refused(
    settings: Settings, redis_url: str
) -> None:
    async with orchestrator_client(settings, redis_url) as client:
        with pytest.raises(BadRequest, match='does not have "registered" among its places'):
            await register(client, "r0")


# --- the sampler's side --------------------------------------------------------------------------


async def test_a_sampler_renews_its_lease_and_unregisters_when_it_drains(
    registering: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins before the orchestrator does, and is there once that is."""
    monkeypatch.setattr(sampler_app, "RETRY_S", 0.05)
    monkeypatch.setattr(registrations, "SAMPLER_REGISTRATION_S", 0.6)
    serving = [ServingWeights(replica="r0")]
    draining = DrainState("rollout")
    async with (
        registered(registering, lambda: serving[0], draining),
        listening(registering, store),
        asyncio.timeout(90),
    ):
        while not (found := await store.samplers.all()):
            await asyncio.sleep(0.01)
        assert (found[0].replica, found[0].url, found[0].version) == ("r0", URL, None)
        serving[0] = ServingWeights(replica="r0", job_id="demo-1", version=7)
        while (await store.samplers.all())[0].version != 7:
            await asyncio.sleep(0.01)
        checks = {check.name: check for check in await examine_stack(registering)}
        assert checks["lease of r0"].detail.endswith("serves version 7 of demo-1")
        assert checks["rollout r0"].detail.startswith(f"not running at {URL}")
        draining.begin()
        while await store.samplers.all():
            await asyncio.sleep(0.01)


@pytest.fixture
def registering(settings: Settings) -> Settings:
    """The settings of a sampler that registers, and of the orchestrator where it does."""
    urls = {"rollout_advertise_url": URL, "rollout_url": "registered"}
    orchestrator_url = f"http://127.0.0.1:{free_port()}"
    return settings.model_copy(update=urls | {"orchestrator_url": orchestrator_url})


@contextlib.asynccontextmanager
async def listening(settings: Settings, store: Store) -> AsyncGenerator[None]:
    """An orchestrator, at the URL that the settings name."""
    port = int(settings.orchestrator_url.rpartition(":")[2])
    async with served(create_service(settings, store).server(port)):
        yield


async def test_whatever_goes_wrong_at_a_renewal_the_next_one_comes(
    registering: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_app, "RETRY_S", 0.05)
    monkeypatch.setattr(registrations, "SAMPLER_REGISTRATION_S", 0.6)
    version, faults = 1, [RuntimeError("of no kind that is known")]

    def serving() -> ServingWeights:
        if version == 2 and faults:
            raise faults.pop()
        return ServingWeights(replica="r0", job_id="demo-1", version=version)

    async with (
        listening(registering, store),
        registered(registering, serving, DrainState("rollout")),
        asyncio.timeout(90),
    ):
        while not await store.samplers.all():
            await asyncio.sleep(0.01)
        version = 2
        while faults or [each.version for each in await store.samplers.all()] != [2]:
            await asyncio.sleep(0.01)


async def test_a_sampler_that_was_refused_leaves_the_other_one_of_its_name_registered(
    registering: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_app, "RETRY_S", 0.05)
    asked: list[str] = []

    def serving() -> ServingWeights:
        asked.append("r0")
        return ServingWeights(replica="r0")

    async with listening(registering, store), asyncio.timeout(90):
        other = "http://127.0.0.1:8002"
        taken = await store.samplers.register("r0", Registration(url=other))
        async with registered(registering, serving, DrainState("rollout")):
            while len(asked) < 3:
                await asyncio.sleep(0.01)
        assert [each.url for each in await store.samplers.all()] == [taken.url]


async def test_the_rollout_service_is_registered_from_its_start_to_its_end(
    registering: Settings, store: Store, tmp_path: Path
) -> None:
    where = registering.model_dump(include={"rollout_advertise_url", "orchestrator_url"})
    bench = RolloutBench(tmp_path, **where)
    app = bench.service.app
    async with listening(registering, store):
        async with app.router.lifespan_context(app), asyncio.timeout(90):
            while not (found := await store.samplers.all()):
                await asyncio.sleep(0.01)
            assert [(each.replica, each.url) for each in found] == [("here:1", URL)]
        assert await store.samplers.all() == []
    await bench.client.close()


async def test_a_sampler_that_does_not_say_where_it_is_registers_nowhere(
    settings: Settings,
) -> None:
    draining, asked = DrainState("rollout"), list[str]()

    def serving() -> ServingWeights:
        asked.append("what serves")
        return ServingWeights(replica="r0")

    async with registered(settings, serving, draining):
        await asyncio.sleep(0)
    assert asked == [] and not draining.has_begun()


# --- a running job -------------------------------------------------------------------------------


@pytest.fixture
async def pool(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Pool]:
    monkeypatch.setattr(registrations, "SAMPLER_REGISTRATION_S", 600.0)  # no one says it again here
    async with (
        pool_of(2, settings) as all_,
        pool_stack(settings, redis_url, job, all_, monkeypatch, "registered") as pool,
    ):
        yield pool


async def take_part(pool: Pool, sampler: FakeSampler) -> None:
    await register(pool.stack.client, sampler.name, sampler.url)


async def test_a_job_is_taken_with_its_first_sampler_and_finds_others_on_its_way(
    pool: Pool,
) -> None:
    first, second = pool.samplers

    async def train(body: Any) -> None:
        if body.step == 2:
            await take_part(pool, second)
        while body.step == 3 and second.serving.version is None:
            await asyncio.sleep(0.01)

    pool.stack.fakes.fault["train_step"] = train
    job_id = (await pool.stack.submit()).id
    async with asyncio.timeout(90):
        while not (waiting := await pool.stack.get(job_id)).waits_for:
            await asyncio.sleep(0.01)
    (obstacle,) = waiting.waits_for.values()
    why = (
        "takes no job: HONE_ROLLOUT_URL is 'registered', and no sampler is registered; start one "
        "with HONE_ROLLOUT_ADVERTISE_URL. See: hone doctor"
    )
    assert (waiting.status, obstacle.why) == ("queued", why)
    assert not pool.stack.fakes.calls["job"]
    await take_part(pool, first)
    record = await pool.stack.until(job_id)
    assert (record.status, record.error, record.recoveries) == ("succeeded", None, 0)
    pool.check_groups(record)
    assert [sampler.serving.version for sampler in pool.samplers] == [4, 4]
    assert min(len(sampler.groups) for sampler in pool.samplers) >= 3


async def test_a_sampler_that_leaves_gets_no_further_groups(pool: Pool) -> None:
    for sampler in pool.samplers:
        await take_part(pool, sampler)
    _, second = pool.samplers
    asked: list[int] = []

    async def train(body: Any) -> None:
        asked.append(second.calls["generate"])
        if body.step == 2:
            await unregister(pool.stack.client, second.name)
            await asyncio.sleep(0.2)  # the pool looks every 0.05 s

    pool.stack.fakes.fault["train_step"] = train
    record = await pool.stack.until((await pool.stack.submit()).id)
    assert (record.status, record.recoveries) == ("succeeded", 0)
    pool.check_groups(record)
    assert 0 < asked[0] < asked[1] == asked[2] == asked[3]


async def test_a_sampler_that_leaves_while_it_loads_ends_its_load(pool: Pool) -> None:
    for sampler in pool.samplers:
        await take_part(pool, sampler)
    _, second = pool.samplers

    async def load(ref: Any) -> None:
        if ref.version == 2:
            await unregister(pool.stack.client, second.name)
            await asyncio.sleep(0.5)  # the pool looks every 0.05 s

    second.fault["reload"] = load
    record = await pool.stack.until((await pool.stack.submit()).id, "succeeded", "paused")
    assert (record.status, record.error, record.recoveries) == ("succeeded", None, 0)
    pool.check_groups(record)


async def test_while_no_sampler_is_registered_at_all_a_job_keeps_those_it_has(pool: Pool) -> None:
    """All leases end together where the orchestrator, or Redis, could not be reached."""
    for sampler in pool.samplers:
        await take_part(pool, sampler)

    async def train(body: Any) -> None:
        if body.step == 2:
            for sampler in pool.samplers:
                await unregister(pool.stack.client, sampler.name)
            await asyncio.sleep(0.5)  # the pool looks every 0.05 s

    pool.stack.fakes.fault["train_step"] = train
    record = await pool.stack.until((await pool.stack.submit()).id, "succeeded", "paused")
    assert (record.status, record.error, record.recoveries) == ("succeeded", None, 0)
    pool.check_groups(record)


async def test_a_sampler_that_redirects_is_not_followed(pool: Pool) -> None:
    first, second = pool.samplers
    seen: list[bytes] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        where = f"location: {second.url}/model".encode()
        writer.write(b"HTTP/1.1 307 Go\r\ncontent-length: 0\r\n" + where + b"\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    await take_part(pool, first)
    port = server.sockets[0].getsockname()[1]
    await register(pool.stack.client, "elsewhere", f"http://127.0.0.1:{port}")
    record = await pool.stack.until((await pool.stack.submit()).id)
    server.close()
    assert record.status == "succeeded" and seen
    pool.check_groups(record)
    assert not second.calls and len(first.groups) == 24


async def test_while_redis_is_unreachable_the_samplers_are_those_of_before(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOOK_AT_AWAY_S", 0.01)
    monkeypatch.setattr(discovery, "DISCOVER_S", 0.0)
    asked: list[str] = []
    async with pool_of(1, settings) as (fake,), asyncio.timeout(90):

        async def urls() -> list[str]:
            asked.append("again")
            if len(asked) > 1:
                raise StoreUnavailable("Redis is unreachable")
            return [fake.url]

        settings = settings.model_copy(update={"rollout_url": "registered"})
        samplers = SamplerPool(Caller(JOB, settings), urls)
        await samplers.open(ModelRequest(model="m"))
        while len(asked) < 4:
            await asyncio.sleep(0.01)
        assert samplers.one().url == fake.url
        await samplers.close()


async def test_where_samplers_are_may_be_said_in_several_ways_at_once() -> None:
    async def two() -> list[str]:
        return ["http://b:1/", "http://a:1"]

    assert await sampler_urls(("http://a:1", "registered"), two) == ("http://a:1", "http://b:1")
    assert await sampler_urls(("http://a:1/", "http://a:1")) == ("http://a:1",)
    here, there = "http://127.0.0.1:1", "http://a:1"
    assert is_one_host((there,)) and not is_one_host(("registered",))
    assert is_one_host((here, "http://localhost:2"))
    assert not is_one_host((here, there))
    assert not is_one_host((here, "registered"))
    assert resource("registered") == "registered"
    assert Settings(rollout_url="registered,http://a:1").rollout_urls == (
        "registered",
        "http://a:1",
    )
