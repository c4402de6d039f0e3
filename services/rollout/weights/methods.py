"""The ways in which a published version arrives: each one proves the version, and then loads it.

`LOADERS` has a row for each method; a new method is a row and its function. A loader first proves
(`proofs.py`), while the engine still samples, that the version is what was published and that it
fits the model. The result is loaded while nothing is sampled (`loading.py`); an adapter is loaded
beside the model's weights (`adapters.py`). Tensors that come from the trainer's device can be
proven only after they were loaded: then every tensor is read back before the engine samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.rollout.engine import Engine
from services.rollout.weights.copies import Copies, Copy
from services.rollout.weights.proofs import (
    Expected,
    announced_digest,
    differing,
    proven_adapter,
    proven_digest,
)
from shared.errors import BadRequest, Conflict, Failed
from shared.host.logs import get_logger
from shared.weights.folders import FILES
from shared.wire import (
    AdapterWeights,
    AnyWeights,
    BroadcastWeights,
    DeltaWeights,
    FolderWeights,
    HttpWeights,
    SharedWeights,
)

Act = Callable[[Engine], Awaitable[None]]
LoadFolder = Callable[[Engine, Path], Awaitable[None]]


async def nothing(_: Engine) -> None:
    pass


@dataclass(frozen=True)
class Proven:
    """A version that may be loaded, by `load`, while the engine samples nothing. `digest` is the
    digest of its tensors; `received_bytes` came over the network. `meet` runs before, while the
    engine still samples."""

    digest: str
    load: Act
    received_bytes: int = 0
    meet: Act = nothing


@dataclass(frozen=True)
class ProvenAdapter:
    """The sampler's own copy of an adapter, for `LoadedAdapters.load`."""

    copy: Copy
    digest: str

    @property
    def received_bytes(self) -> int:
        return self.copy.received_bytes


Loader = Callable[[Any, Expected, Copies], Awaitable[Proven | ProvenAdapter]]
"""Proves a reference of its own kind."""


# --- files that the sampler sees ------------------------------------------------------------------


def seen(load: LoadFolder, *, refreshed: bool = True) -> Loader:
    """Returns the loader of a folder that the sampler sees. `refreshed`: other hosts may have
    written it, and their files are brought in first."""

    async def loader(ref: FolderWeights, expected: Expected, _: Copies) -> Proven:
        if refreshed:
            await asyncio.to_thread(expected.refresh)
        found = published_folder(ref, expected.roots)
        digest = await asyncio.to_thread(proven_digest, ref, found, expected)
        return Proven(digest, lambda engine: load(engine, found))

    return loader


async def in_place(engine: Engine, folder: Path) -> None:
    await engine.load_files(folder)


async def after_freeing(engine: Engine, folder: Path) -> None:
    """Frees the engine's memory first."""
    await engine.sleep()
    await engine.wake_weights()
    await engine.load_files(folder)
    await engine.wake_cache()


async def by_new_engine(engine: Engine, folder: Path) -> None:
    await engine.restart(folder)


# --- files that the sampler fetches ---------------------------------------------------------------


async def fetched(ref: HttpWeights, expected: Expected, copies: Copies) -> Proven:
    """The whole version, as a copy that is removed once it is loaded."""
    copy = await copies.fetched(ref)
    try:
        digest = await asyncio.to_thread(proven_digest, ref, copy.folder, expected)
    except Failed:
        copies.remove(copy)
        raise

    async def load(engine: Engine) -> None:
        try:
            await engine.load_files(copy.folder)
        finally:
            copies.remove(copy)

    return Proven(digest, load, copy.received_bytes)


async def patched(ref: DeltaWeights, expected: Expected, copies: Copies) -> Proven:
    """Turns the sampler's copy of an earlier version into this one, and keeps it for the next. The
    whole version is fetched if the deltas do not begin with a version that the sampler has, or if
    the result is not what was published."""
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
) -> Proven:
    digest = await asyncio.to_thread(proven_digest, ref, copy.folder, expected)
    copies.keep(copy, digest)
    return Proven(
        digest,
        lambda engine: engine.load_files(copy.folder),
        received_before + copy.received_bytes,
    )


async def adapter(ref: AdapterWeights, expected: Expected, copies: Copies) -> ProvenAdapter:
    if not expected.max_lora_rank:
        raise Conflict(
            f"adapter {ref.adapter!r} cannot be loaded: the engine was started without adapters, "
            "or vLLM has none for the model's architecture, or on a GPU for its dtype",
            code="no_adapters",
        )
    copy = await copies.adapter(ref, seen_folder(ref, expected.roots))
    try:
        digest = await asyncio.to_thread(proven_adapter, ref, copy.folder, expected)
    except (Failed, Conflict):
        copies.remove(copy)
        raise
    return ProvenAdapter(copy, digest)


# --- tensors from the trainer's device ------------------------------------------------------------


async def broadcast(ref: BroadcastWeights, expected: Expected, _: Copies) -> Proven:
    tensors = {tensor.name: tensor.shape for chunk in ref.chunks for tensor in chunk}
    return _received(ref, announced_digest(ref, tensors, expected), ref.size_bytes)


async def shared(ref: SharedWeights, expected: Expected, _: Copies) -> Proven:
    tensors = {tensor.name: tensor.shape for tensor in ref.shared}
    return _received(ref, announced_digest(ref, tensors, expected), 0)


def _received(ref: BroadcastWeights | SharedWeights, digest: str, received_bytes: int) -> Proven:
    async def load(engine: Engine) -> None:
        await engine.receive(ref)
        check_loaded(await engine.digests(), ref)

    return Proven(digest, load, received_bytes, meet=lambda engine: engine.meet(ref))


def check_loaded(found: dict[str, str], ref: BroadcastWeights | SharedWeights) -> None:
    """Raises Failed, code "not_loaded", unless each tensor of the engine is as it was published.
    `found` are the digests that were read back."""
    if wrong := differing(found, ref.tensors):
        raise Failed(
            f"of what the trainer sent {len(wrong)} tensors have other bytes, the first is "
            f"{wrong[0]!r}",
            code="not_loaded",
        )
    if unread := sorted(ref.tensors.keys() - found.keys()):
        raise Failed(
            f"{len(unread)} tensors could not be read back, the first is {unread[0]!r}",
            code="not_loaded",
        )


LOADERS: dict[str, Loader] = {
    "shm": seen(in_place, refreshed=False),
    "disk": seen(in_place),
    "reload": seen(after_freeing),
    "restart": seen(by_new_engine),
    "http": fetched,
    "delta": patched,
    "lora": adapter,
    "nccl": broadcast,
    "ipc": shared,
}


async def prove(ref: AnyWeights, expected: Expected, copies: Copies) -> Proven | ProvenAdapter:
    """Returns the version, ready to be loaded. Raises BadRequest for an unknown method, and Failed
    if the version is not what `ref` and `expected` say."""
    if ref.method not in LOADERS:
        raise BadRequest(f"got method {ref.method!r}, expected one of {sorted(LOADERS)}")
    return await LOADERS[ref.method](ref, expected, copies)


def seen_folder(ref: AdapterWeights, roots: Sequence[Path]) -> Path | None:
    """Returns the adapter's folder; None if this sampler does not see it and has to fetch its
    files. Raises BadRequest for files that are not an adapter's, and what `published_folder`
    raises."""
    if ref.files and {file.name for file in ref.files} != set(FILES):
        names = [file.name for file in ref.files]
        raise BadRequest(f"'files': got {names}, expected {list(FILES)}")
    try:
        return published_folder(ref, roots)
    except Failed:
        if not ref.files:
            raise
        return None


def published_folder(ref: FolderWeights | AdapterWeights, roots: Sequence[Path]) -> Path:
    """Returns the real path of `ref.path`. Raises Failed unless it is a folder below one of
    `roots`, with links resolved."""
    found = Path(ref.path).resolve()
    allowed = [root.resolve() for root in roots]
    if not any(root in found.parents for root in allowed):
        raise Failed(
            f"'path': got {ref.path!r}; weights are loaded only from below "
            f"{' or '.join(map(str, allowed))}",
            code="not_seen",
        )
    if not found.is_dir():
        raise Failed(
            f"'path': got {ref.path!r}, which is not a folder here; does the sampler see the "
            "trainer's volume?",
            code="not_seen",
        )
    return found
