"""The ways in which a published version arrives: each proves it, and then loads it.

One entry per method in `LOADERS`; a new method is one more entry and its function. A loader first
proves (`proofs.py`), while the engine still samples, that the version is what was published, and
fits the model. What it returns loads between two tokens (`loading.py`); an adapter goes beside the
model's weights (`adapters.py`). What comes from device to device ("nccl", "ipc") can only be proven
after that: every tensor is read back from the engine before it samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.rollout.engine import Engine
from services.rollout.weights.copies import Copies, Copy
from services.rollout.weights.folders import published_folder, seen_folder
from services.rollout.weights.proofs import (
    Expected,
    announced_digest,
    differing,
    proven_adapter,
    proven_digest,
)
from shared.errors import BadRequest, Conflict, Failed
from shared.host.logs import get_logger
from shared.wire import (
    AdapterWeights,
    AnyWeights,
    BroadcastWeights,
    DeltaWeights,
    FolderWeights,
    HttpWeights,
    SharedWeights,
)


class Proven(Protocol):
    """A version that may be loaded. `digest` is of the tensors that were read; `received_bytes`
    came over the network."""

    @property
    def digest(self) -> str: ...

    @property
    def received_bytes(self) -> int: ...

    async def load(self, engine: Engine) -> None: ...


@dataclass(frozen=True)
class ProvenFolder:
    """Files that the engine reads itself."""

    folder: Path
    digest: str
    received_bytes: int = 0

    async def load(self, engine: Engine) -> None:
        await engine.load_files(self.folder)


class ProvenForEmptied(ProvenFolder):
    """The same, after the engine's memory was freed."""

    async def load(self, engine: Engine) -> None:
        await engine.sleep()
        await engine.wake_weights()
        await engine.load_files(self.folder)
        await engine.wake_cache()


class ProvenForRestart(ProvenFolder):
    """The same, by a new engine."""

    async def load(self, engine: Engine) -> None:
        await engine.restart(self.folder)


@dataclass(frozen=True)
class ProvenCopy:
    """The sampler's own copy, removed once it is loaded."""

    copy: Copy
    copies: Copies
    digest: str

    @property
    def received_bytes(self) -> int:
        return self.copy.received_bytes

    async def load(self, engine: Engine) -> None:
        try:
            await engine.load_files(self.copy.folder)
        finally:
            self.copies.remove(self.copy)


@dataclass(frozen=True)
class ProvenAdapter:
    """The sampler's own copy of an adapter, for `Adapters.load`."""

    copy: Copy
    digest: str

    @property
    def received_bytes(self) -> int:
        return self.copy.received_bytes


async def folder(ref: FolderWeights, expected: Expected, _: Copies) -> ProvenFolder:
    if ref.method != "shm":
        await asyncio.to_thread(expected.refresh)
    found = published_folder(ref, expected.roots)
    return ProvenFolder(found, await asyncio.to_thread(proven_digest, ref, found, expected))


async def emptied(ref: FolderWeights, expected: Expected, copies: Copies) -> ProvenFolder:
    proven = await folder(ref, expected, copies)
    return ProvenForEmptied(proven.folder, proven.digest)


async def restarted(ref: FolderWeights, expected: Expected, copies: Copies) -> ProvenFolder:
    proven = await folder(ref, expected, copies)
    return ProvenForRestart(proven.folder, proven.digest)


async def patched(ref: DeltaWeights, expected: Expected, copies: Copies) -> ProvenFolder:
    """The sampler's own copy of an earlier version is made the new one, and kept for the next. A
    sampler without a copy that the deltas begin with, or whose copy did not become what it should,
    fetches the whole version."""
    received_bytes = 0
    if copies.can_update(ref):
        try:
            copy = await copies.updated(ref)
            received_bytes = copy.received_bytes
            return await _kept(ref, expected, copies, copy, 0)
        except Failed as error:
            get_logger().warning("delta not applied", version=ref.version, reason=error.detail)
            copies.clear()
    return await _kept(ref, expected, copies, await copies.fetched(ref), received_bytes)


async def _kept(
    ref: DeltaWeights, expected: Expected, copies: Copies, copy: Copy, received_before: int
) -> ProvenFolder:
    found = await asyncio.to_thread(proven_digest, ref, copy.folder, expected)
    copies.keep(copy, found)
    return ProvenFolder(copy.folder, found, received_before + copy.received_bytes)


async def fetched(ref: HttpWeights, expected: Expected, copies: Copies) -> ProvenCopy:
    copy = await copies.fetched(ref)
    try:
        found = await asyncio.to_thread(proven_digest, ref, copy.folder, expected)
    except Failed:
        copies.remove(copy)
        raise
    return ProvenCopy(copy, copies, found)


@dataclass(frozen=True)
class ProvenLater:
    """What the trainer sends once the engine is paused."""

    ref: BroadcastWeights | SharedWeights
    digest: str
    received_bytes: int

    async def load(self, engine: Engine) -> None:
        """Raises Failed, code "not_loaded", unless each tensor of the engine is the one that was
        published."""
        await engine.receive(self.ref)
        found = await engine.digests()
        wrong = differing(found, self.ref.tensors)
        unread = sorted(self.ref.tensors.keys() - found.keys())
        if problem := wrong and f"{len(wrong)} tensors have other bytes, the first is {wrong[0]!r}":
            raise Failed(f"of what the trainer sent {problem}", code="not_loaded")
        if unread:
            raise Failed(
                f"{len(unread)} tensors could not be read back, the first is {unread[0]!r}",
                code="not_loaded",
            )


async def sent(ref: BroadcastWeights, expected: Expected, _: Copies) -> ProvenLater:
    tensors = {tensor.name: tensor.shape for chunk in ref.chunks for tensor in chunk}
    return ProvenLater(ref, announced_digest(ref, tensors, expected), ref.size_bytes)


async def shared(ref: SharedWeights, expected: Expected, _: Copies) -> ProvenLater:
    tensors = {tensor.name: tensor.shape for tensor in ref.shared}
    return ProvenLater(ref, announced_digest(ref, tensors, expected), 0)


async def adapter(ref: AdapterWeights, expected: Expected, copies: Copies) -> ProvenAdapter:
    if not expected.max_lora_rank:
        raise Conflict(
            f"adapter {ref.adapter!r} cannot be loaded: the engine was started without adapters, "
            "or vLLM has none for the model's architecture, or on a GPU for its dtype",
            code="no_adapters",
        )
    copy = await copies.adapter(ref, seen_folder(ref, expected.roots))
    try:
        found = await asyncio.to_thread(proven_adapter, ref, copy.folder, expected)
    except (Failed, Conflict):
        copies.remove(copy)
        raise
    return ProvenAdapter(copy, found)


Loader = Callable[[Any, Expected, Copies], Awaitable[Proven | ProvenAdapter]]
"""Proves a reference of its own kind."""

LOADERS: dict[str, Loader] = {
    "shm": folder,
    "disk": folder,
    "http": fetched,
    "delta": patched,
    "lora": adapter,
    "reload": emptied,
    "restart": restarted,
    "nccl": sent,
    "ipc": shared,
}


async def prove(ref: AnyWeights, expected: Expected, copies: Copies) -> Proven | ProvenAdapter:
    """Returns the version, ready to be loaded. Raises BadRequest for a method that is not there,
    and Failed if the version is not what `ref` and `expected` say."""
    if ref.method not in LOADERS:
        raise BadRequest(f"got method {ref.method!r}, expected one of {sorted(LOADERS)}")
    return await LOADERS[ref.method](ref, expected, copies)
