"""`Client`, the orchestrator as a Python object for synchronous code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from hone.async_client import AsyncClient
from hone.background import Background
from hone.calling import URL
from shared import wire

T = TypeVar("T")
P = ParamSpec("P")


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
    experiments = _blocking(AsyncClient.experiments)
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
