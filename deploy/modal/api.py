"""The jobs API on Modal: the orchestrator without its workers. It reloads and commits Volumes, and
starts the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from deploy.modal import inside
from deploy.modal.common import RETRIES, SETTINGS
from services.orchestrator.app import create_service
from services.orchestrator.store.lists import JobFilter
from services.orchestrator.store.registrations import TRAINER_REGISTRATION_S
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Conflict, NotFound, Unavailable
from shared.host import logs
from shared.host.logs import get_logger
from shared.settings import Settings, load_settings
from shared.wire import JobSummary

REFRESH_S = 5.0
"""Most seconds until files of other containers are visible."""

PAGE = 100
"""Jobs read at once."""

Scope = Any
StartTrainer = Callable[[], Awaitable[None]]
Forget = Callable[[], Awaitable[None]]


def make_api(
    places: Mapping[str, str], runs: Any, data: Any, start_trainer: StartTrainer
) -> JobsApi:
    """Returns the ASGI application. `places` are the settings that name the other services, `runs`
    and `data` the Volumes of run folders and of data files."""
    os.environ.update(places)
    settings = load_settings()
    logs.configure("orchestrator", settings)
    store = open_store(settings)
    service = create_service(settings, store, works=False)
    return JobsApi(service.app, store, runs, data, start_trainer)


def open_store(settings: Settings) -> Store:
    if settings.redis_url is None:
        raise BadRequest("HONE_REDIS_URL is not set; expected it in the Modal Secret 'hone-redis'")
    return Store(settings.redis_url.get_secret_value(), max_key_jobs=settings.max_key_jobs)


async def has_work(store: Store) -> bool:
    """Returns whether a job waits for the trainer, or runs on it."""
    pages = [await store.list(None, 1, JobFilter(status=one)) for one in ("queued", "running")]
    return any(page.jobs or page.unreadable for page in pages)


async def bring_trainer(store: Store, urls: Sequence[str], start_trainer: StartTrainer) -> None:
    """Starts the trainer if there is work for it, once the services at `urls` answer: until then
    its GPUs would be paid for nothing. If one does not answer, the jobs that wait are paused with
    that reason."""
    if not await has_work(store):
        return
    try:
        await inside.wake(urls)
    except Unavailable as error:
        await _pause(store, [job.id async for job in _waiting(store)], error.detail)
    else:
        await start_trainer()


def gone_s(settings: Settings) -> float:
    """Returns the seconds after which Redis has forgotten a trainer that has ended: both its lease
    and its registration have expired."""
    return max(settings.lease_s, TRAINER_REGISTRATION_S)


async def give_up(store: Store, why: str, called_at: float, forget: Forget) -> None:
    """Pauses the jobs of the trainer's Function, which was called at `called_at` and failed for the
    reason `why`. Otherwise it would be started again and again for them, and cost money. Then the
    failure is forgotten, so that another or a resumed job starts the Function.

    These are the job that it was running or, without one, all jobs that waited for it when it was
    called, unless there is another trainer. Jobs of another trainer stay as they are."""
    others = {each.trainer for each in await store.trainers.all() if each.missing is None}
    cut_off = await store.cut_off()
    if had := [id for id, trainer in cut_off.items() if trainer not in others]:
        await _pause(store, had, _failed(why, "it was running this job"))
    elif not others:
        waited = [job.id async for job in _waiting(store) if job.created_at < called_at]
        because = "it took no job, and there is no other trainer to run this one"
        await _pause(store, waited, _failed(why, because))
    await forget()


def _failed(why: str, because: str) -> str:
    return (
        f"the trainer's Function failed on Modal, {RETRIES + 1} times in a row: {why}. This job is "
        f"paused because {because}. `modal app logs {SETTINGS.modal_name}-trainer` says more; "
        "`hone resume JOB` tries again"
    )


async def _waiting(store: Store) -> AsyncGenerator[JobSummary]:
    """Yields the jobs without a worker."""
    for status in ("queued", "running"):
        after: str | None = None
        while True:
            page = await store.list(after, PAGE, JobFilter(status=status))
            for job in page.jobs:
                if job.place is not None:
                    yield job
            if (after := page.next_after) is None:
                break


async def _pause(store: Store, ids: Sequence[str], why: str) -> None:
    for id in ids:
        with contextlib.suppress(Conflict, NotFound):  # the job was cancelled or deleted
            await store.pause(id, why)


class JobsApi:
    """The ASGI application, around the orchestrator's. Before a request the Volumes are reloaded,
    unless another request is under way: a Volume looks empty during a reload. After a request that
    changed something the files are committed, and the trainer is started if there is work for
    it."""

    def __init__(
        self, app: Any, store: Store, runs: Any, data: Any, start_trainer: StartTrainer
    ) -> None:
        self._app = app
        self._store = store
        self._runs, self._data = runs, data
        self._start_trainer = start_trainer
        self._reloading, self._starting = asyncio.Lock(), asyncio.Lock()
        self._reloaded_at = -REFRESH_S
        self._num_under_way = 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._store.open()
        if scope["type"] != "http" or _is_stream(scope):
            await self._app(scope, receive, send)
            return
        status = await self._answer(scope, receive, send)
        if scope["method"] not in ("GET", "HEAD") and status < 300:
            await self._runs.commit.aio()
            async with self._starting:  # otherwise two requests would start it twice
                if await has_work(self._store):
                    await self._start_trainer()

    async def _answer(self, scope: Scope, receive: Any, send: Any) -> int:
        """Answers the request, and returns the status."""
        status = 500

        async def keep_status(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async with self._reloading:
            await self._reload_if_alone()
            self._num_under_way += 1
        try:
            await self._app(scope, receive, keep_status)
        finally:
            self._num_under_way -= 1
        return status

    async def _reload_if_alone(self) -> None:
        now = time.monotonic()
        if self._num_under_way or now < self._reloaded_at + REFRESH_S:
            return
        self._reloaded_at = now
        for volume in (self._runs, self._data):
            try:
                await volume.reload.aio()
            except Exception as error:
                # errors of Modal, of many classes; files that were visible stay visible
                get_logger().warning("a Volume was not reloaded", reason=str(error))


def _is_stream(scope: Scope) -> bool:
    """Returns whether the answer is an event stream, which lasts for as long as a job and reads
    no file."""
    accept = dict(scope["headers"]).get(b"accept", b"")
    return b"text/event-stream" in accept
