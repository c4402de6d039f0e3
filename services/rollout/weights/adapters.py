"""The LoRA adapters that an engine holds beside its model: the newest of each job, older ones while
requests use them, and the snapshots that requests named last.

    loaded --a newer one of the job, or too many jobs--> retired --no request uses it--> unloaded

A job's adapter stays after the job has ended, and is called by the job's id. Every load has its own
number, so that no cached prefix of another load is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from services.rollout.engine import Adapter, Engine
from services.rollout.weights.copies import Copies, Copy
from shared.errors import BadRequest, HoneError
from shared.host.logs import get_logger
from shared.wire import AdapterWeights

_call: ContextVar[contextlib.ExitStack | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Adapters that are found by name in this block stay loaded until the block ends."""
    with contextlib.ExitStack() as stack:
        token = _call.set(stack)
        try:
            yield
        finally:
            _call.reset(token)


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in the engine, used by `num_users` requests. `job_id` is the adapter's own name if
    it was loaded without a job. A `retired` adapter gets no new requests."""

    adapter: Adapter
    job_id: str
    copy: Copy
    num_users: int = 0
    retired: bool = False

    @property
    def by_hand(self) -> bool:
        return self.adapter.name == self.job_id


class LoadedAdapters:
    """The adapters of one engine, for at most `limit` jobs. `serving` is the adapter that was
    loaded last and serves; None if the model's own weights serve. `kept` are the jobs that share
    the engine: their adapters stay loaded beyond the limit too."""

    def __init__(self, engine: Engine, copies: Copies, limit: int) -> None:
        self._engine = engine
        self._copies = copies
        self._limit = limit
        self._newest: dict[str, LoadedAdapter] = {}  # by job, in the order of loading
        self._held: dict[str, LoadedAdapter] = {}  # by the adapter's name, also retired ones
        self._snapshots: dict[str, LoadedAdapter] = {}  # by name, in the order of last use
        self._numbers = itertools.count(1)
        self._unloading: set[asyncio.Task[None]] = set()
        self.serving: LoadedAdapter | None = None
        self.kept: frozenset[str] = frozenset()

    async def load(self, ref: AdapterWeights, copy: Copy) -> None:
        """Makes this adapter serve. Retires the job's previous adapter, an adapter of the same name
        that was loaded without a job, and beyond the limit the adapter of the job whose last load
        is longest ago. Raises Failed if the engine refuses it; then no adapter serves."""
        self.drop(ref.adapter)
        adapter = Adapter(ref.adapter, next(self._numbers), ref.version, copy.folder)
        await self._load(held := LoadedAdapter(adapter, ref.job_id, copy))
        self.serving = held
        self._retire_beyond_limit()

    async def load_by_hand(self, name: str, copy: Copy) -> None:
        """Makes this adapter available by `name`, in place of an adapter of that name. The served
        weights stay. Raises as `load` does, and BadRequest for the name of a job's adapter."""
        if (known := self._named(name)) and not known.by_hand:
            self._copies.remove(copy)
            raise BadRequest(
                f"'lora_name': {name!r} is the adapter of a job; expected another name"
            )
        await self._load(
            LoadedAdapter(Adapter(name, next(self._numbers), 0, copy.folder), name, copy)
        )
        self._retire_beyond_limit()

    def snapshot(self, name: str) -> LoadedAdapter | None:
        """Returns the adapter of that name, if it is loaded."""
        if name in self._snapshots:
            self._snapshots[name] = self._snapshots.pop(name)
        return self._held.get(name)

    async def load_snapshot(self, ref: AdapterWeights, copy: Copy) -> LoadedAdapter:
        """Loads an adapter for requests that name it. The served weights stay, and beyond the limit
        the snapshot that was used longest ago is retired. Raises as `load` does."""
        adapter = Adapter(ref.adapter, next(self._numbers), ref.version, copy.folder)
        held = LoadedAdapter(adapter, ref.job_id, copy)
        await self._load_into_engine(held)
        self._held[ref.adapter] = self._snapshots[ref.adapter] = held
        while len(self._snapshots) > self._limit:
            self._retire(self._snapshots.pop(next(iter(self._snapshots))))
        return held

    def drop(self, name: str) -> bool:
        """Unloads the adapter that was loaded without a job under `name`. Returns whether there was
        one."""
        held = self._newest.get(name)
        if held is None or not held.by_hand:
            return False
        self._retire(self._newest.pop(name))
        return True

    async def _load_into_engine(self, held: LoadedAdapter) -> None:
        try:
            await self._engine.load_adapter(held.adapter)
        except BaseException:  # undone and raised again, for every kind of error
            self._copies.remove(held.copy)
            raise

    async def _load(self, held: LoadedAdapter) -> None:
        await self._load_into_engine(held)
        before = self._newest.pop(held.job_id, None)
        self._newest[held.job_id] = self._held[held.adapter.name] = held
        if before:
            self._retire(before)

    def _retire_beyond_limit(self) -> None:
        """Retires the adapters that were loaded longest ago, except adapters that serve and the
        newest."""
        *older, _ = self._newest
        spare = [
            name
            for name in older
            if name not in self.kept and self._newest[name] is not self.serving
        ]
        for name in spare[: max(0, len(self._newest) - self._limit)]:
            self._retire(self._newest.pop(name))

    def forget(self) -> None:
        """Retires all adapters, because the weights that they were trained on are replaced."""
        gone = [*self._newest.values(), *self._snapshots.values()]
        self._newest, self._snapshots, self.serving = {}, {}, None
        for held in gone:
            self._retire(held)

    @contextlib.contextmanager
    def using(self, held: LoadedAdapter | None) -> Iterator[Adapter | None]:
        """Keeps the adapter loaded during a request."""
        if held is None:
            yield None
            return
        held.num_users += 1
        try:
            yield held.adapter
        finally:
            held.num_users -= 1
            self._unload_unused(held)

    def of_job(self, job_id: str | None) -> LoadedAdapter | None:
        """Returns the job's newest adapter; for None the adapter that serves."""
        return self._newest.get(job_id) if job_id else self.serving

    def names(self) -> dict[str, Adapter]:
        """Returns the newest adapters by their jobs' ids."""
        return {job_id: held.adapter for job_id, held in self._newest.items()}

    def knows(self, name: str | None) -> bool:
        return self._named(name) is not None

    def find(self, name: str | None) -> Adapter | None:
        """Returns the adapter by a job's id or its own name; for None the adapter that serves. It
        stays loaded until `one_call` ends."""
        held, stack = self._named(name), _call.get()
        if held and stack:
            stack.enter_context(self.using(held))
        return held.adapter if held else None

    def __bool__(self) -> bool:
        return bool(self._newest or self._snapshots)

    def _named(self, name: str | None) -> LoadedAdapter | None:
        if name is None:
            return self.serving
        return self._newest.get(name) or self._held.get(name)

    def _retire(self, held: LoadedAdapter) -> None:
        held.retired = True
        self._unload_unused(held)

    def _unload_unused(self, held: LoadedAdapter) -> None:
        if held.retired and not held.num_users:
            if self._held.get(held.adapter.name) is held:
                del self._held[held.adapter.name]
            task = asyncio.create_task(self._unload(held))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, held: LoadedAdapter) -> None:
        try:
            await self._engine.unload_adapter(held.adapter)
        except HoneError as error:
            get_logger().warning(
                "adapter not unloaded", adapter=held.adapter.name, reason=error.detail
            )
        self._copies.remove(held.copy)
