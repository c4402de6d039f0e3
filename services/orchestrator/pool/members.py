"""Who is in the pool: samplers are found, join, leave, and come back.

    away --PUT /model, reload--> up --a call or a sync fails--> away, asked again by itself

One that settings and registrations name no more leaves once nothing of the job is under way there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from services.orchestrator.errors import SyncFailed
from services.orchestrator.pool.discovery import Registered, sampler_urls
from services.orchestrator.pool.replica import Length, Replica
from services.orchestrator.pool.sampler_loading import NOT_HERE, Push, give_model, load
from services.orchestrator.pool.transport import transport_to
from services.orchestrator.tasks import stop
from shared.errors import BadRequest, HoneError, Unavailable
from shared.host import tracing
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.http.presence import Tell, tell_nobody
from shared.job import SyncMethod
from shared.settings import Settings
from shared.wire import ModelRequest

LOOK_AT_AWAY_S = 0.25
"""How often the pool looks for samplers that are to be asked again."""

DISCOVER_S = 5.0
"""How often the pool looks for samplers that came or left."""

STALE = "stale"


class Members:
    """The samplers of one job, `replicas` by URL, whether up or away. One that joins is brought to
    the model and to `pushed`, the version that serves; if it cannot take that as it was published,
    the method is in `given_up`. `changed` is called whenever there may be more room for groups.
    `headers` go with each request."""

    def __init__(
        self,
        settings: Settings,
        tell: Tell,
        registered: Registered,
        length: Length,
        changed: Callable[[], None],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._tell = tell
        self._registered = registered
        self._length = length
        self._changed = changed
        self._headers = headers
        self.replicas: dict[str, Replica] = {}
        self.pushed: Push | None = None
        self.given_up: set[SyncMethod] = set()
        self._spec: ModelRequest | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._discover_at = self._found_at = 0.0

    async def open(self, spec: ModelRequest) -> None:
        """Finds the samplers and gives them the model: see `Samplers.open`."""
        await self._stop_keeping()
        self._spec, self.pushed = spec, None
        for replica in self.replicas.values():
            replica.end("the job is loaded again")
            replica.by_files = False
        await self._find_some()
        await self._first_up()
        with tracing.detached():  # it lives longer than what it is begun in
            self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        await self._stop_keeping()
        for replica in self.replicas.values():
            await replica.client.close()

    def up(self) -> list[Replica]:
        """Returns the samplers that serve the weights published last."""
        return [replica for replica in self.replicas.values() if replica.up]

    def nobody(self) -> Unavailable:
        """Returns the error of a pool in which none is up."""
        whys = "; ".join(f"{replica.url}: {replica.why}" for replica in self.replicas.values())
        return Unavailable(f"no sampler serves the job ({whys})", code="unreachable")

    def patience_s(self, replica: Replica) -> float:
        """Returns how long it may be away: shortly where another sampler could do it instead."""
        settings = self._settings
        return settings.replica_patience_s if self._others(replica) else settings.patience_s

    def can_do_without(self, replica: Replica, error: BaseException) -> bool:
        """Returns whether the error is this sampler's alone, and another one is there."""
        if not isinstance(error, HoneError) or isinstance(error, BadRequest) or error.code == STALE:
            return False
        return self._others(replica)

    async def take_out(self, replica: Replica, why: str) -> None:
        """Gives it no more groups until it has joined again."""
        if not replica.up:  # another group has said so
            return
        replica.end(why)
        left = f"{len(self.up())} of {len(self.replicas)} samplers are left"
        await self._tell(f"sampler {replica.url} is out: {why}; {left}", True)

    def _others(self, replica: Replica) -> bool:
        return any(other is not replica for other in self.up())

    async def _first_up(self) -> None:
        patience_s = self._settings.patience_s
        joins = {
            asyncio.create_task(self._join(replica, patience_s)): replica
            for replica in self.replicas.values()
            if replica.listed
        }
        try:
            waiting = set(joins)
            while waiting and not self.up():
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=self._settings.replica_patience_s)
        finally:
            await stop(*joins)
        errors = {
            replica: None if join.cancelled() else join.exception()
            for join, replica in joins.items()
        }
        for error in errors.values():
            if error and not (self.up() and isinstance(error, HoneError) and error.code != STALE):
                raise error
        for replica, error in errors.items():
            if not replica.up:
                replica.end(str(error or "it is still starting"))
                await self._tell(f"sampler {replica.url} joins later: {replica.why}", True)

    async def _join(self, replica: Replica, patience_s: float) -> None:
        """Brings the sampler to the model and to the version that serve now."""
        assert self._spec is not None, "the pool was opened"
        settings = self._settings
        replica.configure(await give_model(replica, self._spec, settings, patience_s))
        while (pushed := self.pushed) is not None:
            try:
                await load(replica, pushed, settings, patience_s, late=True)
            except HoneError as error:
                if error.code in NOT_HERE:
                    self.given_up.add(pushed.ref.root.method)
                raise
            if pushed is self.pushed:  # else a newer one was pushed meanwhile
                break
        replica.begin(pushed.ref if pushed else None)
        self._changed()

    async def _keep(self) -> None:
        """Asks samplers that are away again, and finds those that came or left."""
        joins: dict[Replica, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_AT_AWAY_S)
                if time.monotonic() >= self._discover_at:
                    await self.discover()
                for replica in [*self.replicas.values()]:
                    join = joins.get(replica)
                    is_due = not replica.up and time.monotonic() >= replica.retry_at
                    if replica.listed and is_due and (join is None or join.done()):
                        joins[replica] = asyncio.create_task(self._rejoin(replica))
                    if not replica.listed and replica.is_left_alone and (not join or join.done()):
                        del self.replicas[replica.url]
                        await replica.client.close()
        finally:
            await stop(*joins.values())

    async def _rejoin(self, replica: Replica) -> None:
        before = replica.why
        try:
            await self._join(replica, 0.0)
        except HoneError as error:
            replica.failed_sync |= isinstance(error, SyncFailed)
            replica.end(error.detail)
            if error.detail != before:
                get_logger().warning("sampler away", url=replica.url, reason=error.detail)
        except Exception as error:  # a fault of ours: said, and tried again ever less often
            replica.end(f"it could not join: {error!r}")
            get_logger().exception("a sampler could not join", url=replica.url)
        else:
            version = replica.ref.root.version if replica.ref else None
            serves = "the model" if version is None else f"version {version}"
            await self._tell(f"sampler {replica.url} serves {serves}", False)

    async def _find_some(self) -> None:
        """Waits until there is a sampler, as names and registrations may stand for none. Raises
        Unavailable if none comes."""
        end = time.monotonic() + self._settings.patience_s
        is_said = False
        while await self._discover() == 0:
            if time.monotonic() > end:
                raise Unavailable(f"there is no sampler at all: {self._places()}")
            if not is_said:
                await self._tell(f"waiting for a first sampler: {self._places()}", True)
            is_said = True
            await asyncio.sleep(LOOK_AT_AWAY_S)

    def _places(self) -> str:
        return f"HONE_ROLLOUT_URL is {self._settings.rollout_url!r}, which stands for none now"

    async def discover(self) -> None:
        """Looks for samplers that came or left. While Redis is away, they are those of before."""
        try:
            await self._discover()
        except Unavailable as error:
            get_logger().warning("samplers not looked up", reason=error.detail)

    async def _discover(self) -> int:
        """Returns how many samplers there are. Raises StoreUnavailable while Redis is away. Where
        there is none at all, those of before stay for as long as a service may be away: that they
        could not renew their leases, or that a name was not found, ends no sampler."""
        now = time.monotonic()
        self._discover_at = now + DISCOVER_S
        urls = await sampler_urls(self._settings.rollout_urls, self._registered)
        if urls:
            self._found_at = now
        elif now < self._found_at + self._settings.patience_s:
            return 0
        for replica in self.replicas.values():
            replica.listed = replica.url in urls
        for url in urls:
            if url not in self.replicas:
                self.replicas[url] = self._new(url, alone=len(urls) == 1)
        return len(urls)

    def _new(self, url: str, *, alone: bool) -> Replica:
        """Returns one that was not asked yet. Of several, the pool says itself which is away."""
        client = Client(
            "rollout",
            url,
            token=self._settings.bearer(),
            binary=True,
            patience_s=self._settings.patience_s,
            tell=self._tell if alone else tell_nobody,
            transport=transport_to(url),
            headers=self._headers,
        )
        replica = Replica(client, self._length)

        def hear(busy: int) -> None:
            replica.hear(busy)
            self._changed()

        client.poller.heard, client.poller.busy_below = hear, replica.wants_to_hear_below
        return replica

    async def _stop_keeping(self) -> None:
        if self._keeper:
            await stop(self._keeper)
            await asyncio.gather(self._keeper, return_exceptions=True)
