"""`Client`, the orchestrator as a Python object for synchronous code, and `Background`, the event
loop in a thread of its own where its calls run.

So the client works where a loop already runs (a notebook), and Ctrl-C is never lost: it is raised
where the caller waits. If it were a cancellation in the loop, the interrupted code could swallow
it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from hone.async_client import AsyncClient
from hone.calling import URL
from shared import wire
from shared.errors import BadRequest

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")

CLOSE_S = 1.0
"""Seconds for running work to end."""

INTERRUPTED_S = 12.0
"""Seconds that interrupted work has to clean up."""


class Background:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hone-client", daemon=True
        )
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. When interrupted, it cancels the work and waits for its
        end, at most `INTERRUPTED_S`."""
        if self.is_closed:
            work.close()
            raise BadRequest("the client is closed; expected a new one")
        ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(work))
            begun[0].add_done_callback(ended.put)

        def cancel() -> None:
            begun[0].cancel()

        self._loop.call_soon_threadsafe(begin)
        try:
            task = ended.get()
        except BaseException:  # Ctrl-C; raised again
            self._loop.call_soon_threadsafe(cancel)
            with contextlib.suppress(Empty):
                ended.get(timeout=INTERRUPTED_S)
            raise
        return task.result()

    def iterate(
        self, stream: AsyncGenerator[T], told: SimpleQueue[T | U | None] | None = None
    ) -> Iterator[T | U]:
        """Yields the items of `stream`, and in between the items that it puts into `told`. When
        interrupted, the rest of the stream is cancelled."""
        items = SimpleQueue[T | U | None]() if told is None else told

        async def pump() -> None:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    items.put(item)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        future.add_done_callback(lambda _: items.put(None))
        try:
            while (item := items.get()) is not None:
                yield item
            future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels running work, and ends the thread."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=CLOSE_S)

        if self.is_closed:
            return
        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# --- the client ----------------------------------------------------------------------------------


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Returns the method of `Client` that waits for the result of `method`."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(lambda client: method(client, *args, **kwargs))

    return call


class Client:
    """As `AsyncClient`, but its methods wait for the result. Ctrl-C first ends the call in an
    orderly way, within seconds: a submission is withdrawn, an evaluation cancelled."""

    def __init__(self, url: str = URL, *, token: str | None = None) -> None:
        self._asynchronous = AsyncClient(url, token=token)
        self._background = Background()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._asynchronous.url

    def run(self, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `ask`, called with the asynchronous client."""
        return self._background.run(ask(self._asynchronous))

    def close(self) -> None:
        """Doing it again changes nothing."""
        if not self._background.is_closed:
            self._background.run(self._asynchronous.close())
            self._background.close()

    ping = _blocking(AsyncClient.ping)
    submit = _blocking(AsyncClient.submit)
    withdraw = _blocking(AsyncClient.withdraw)
    dry_run = _blocking(AsyncClient.dry_run)
    plan = _blocking(AsyncClient.plan)
    get = _blocking(AsyncClient.get)
    list = _blocking(AsyncClient.list)
    cancel = _blocking(AsyncClient.cancel)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    resume_all = _blocking(AsyncClient.resume_all)
    delete = _blocking(AsyncClient.delete)
    recover = _blocking(AsyncClient.recover)
    metrics = _blocking(AsyncClient.metrics)
    findings = _blocking(AsyncClient.findings)
    rollouts = _blocking(AsyncClient.rollouts)
    held_out = _blocking(AsyncClient.held_out)
    regrade = _blocking(AsyncClient.regrade)
    evaluate = _blocking(AsyncClient.evaluate)
    push = _blocking(AsyncClient.push)
    groups = _blocking(AsyncClient.groups)
    checkpoints = _blocking(AsyncClient.checkpoints)
    checkpoint_files = _blocking(AsyncClient.checkpoint_files)
    download = _blocking(AsyncClient.download)
    upload = _blocking(AsyncClient.upload)
    wait = _blocking(AsyncClient.wait)
    lease_episodes = _blocking(AsyncClient.lease_episodes)
    renew_leases = _blocking(AsyncClient.renew_leases)
    end_episode = _blocking(AsyncClient.end_episode)
    models = _blocking(AsyncClient.models)
    chat = _blocking(AsyncClient.chat)
    create_key = _blocking(AsyncClient.create_key)
    keys = _blocking(AsyncClient.keys)
    revoke_key = _blocking(AsyncClient.revoke_key)

    def events(
        self,
        job: str,
        *,
        after: str = "0",
        last: int | None = None,
        follow: bool = False,
        progress: Callable[[wire.JobProgress], None] | None = None,
    ) -> Iterator[wire.Event]:
        """As `AsyncClient.events`; `progress` is called by the thread that asks for events."""
        told = SimpleQueue[wire.Event | wire.JobProgress | None]()
        stream = self._asynchronous.events(
            job, after=after, last=last, follow=follow, progress=told.put if progress else None
        )
        for one in self._background.iterate(stream, told):
            if isinstance(one, wire.Event):
                yield one
            elif progress:
                progress(one)
