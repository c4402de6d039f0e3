"""From a published version to loaded weights: prove its bytes and tensors, then load it.

One entry per method in `LOADERS`; a new method is one more entry and its function. A loader first
proves, while the engine still samples, that the digest of the bytes and the name and shape of every
tensor are as expected: vLLM leaves a parameter that a file lacks at its old value and only logs it,
which would be a sync that silently did half of its work. What it returns loads between two tokens;
an adapter goes beside the model's weights (`adapters.py`).
What comes from device to device ("nccl", "ipc") can only be proven after that: every tensor is read
back from the engine before it samples.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.rollout.engine import Engine
from services.rollout.weights.adapter_files import adapter_shapes, read_config
from services.rollout.weights.copies import Copies, Copy
from shared.adapters import CONFIG, FILES, adapter_digests
from shared.digest import KIND, StoredTensor, digest, stored_tensors, tensor_digests
from shared.errors import BadRequest, Failed
from shared.logs import get_logger
from shared.wire import (
    AdapterWeights,
    AnyWeights,
    BroadcastWeights,
    DeltaWeights,
    FolderWeights,
    HttpWeights,
    Published,
    SharedWeights,
)

TIED = "lm_head.weight"

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Expected:
    """What versions must be like: the `shapes` of the model's tensors, whether the output matrix is
    `tied` to the embeddings, the folders (`roots`) that files may lie in, and the tensors' `dtypes`
    where they are known: one kind of float may stand for another. `max_lora_rank` is the largest
    rank of adapters that the engine takes; 0: none."""

    shapes: Shapes
    tied: bool
    roots: Sequence[Path]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    max_lora_rank: int = 0


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


def announced_digest(ref: Published, tensors: Shapes, expected: Expected) -> str:
    """Returns the digest of a version of which nothing came yet. Raises Failed if the tensors that
    are to come are not the model's, or not those of the digest."""
    if digest(ref.tensors) != ref.digest or ref.tensors.keys() != tensors.keys():
        raise Failed(
            f"version {ref.version} announces tensors that its digest {ref.digest} is not of; it "
            "was not loaded",
            code="digest_differs",
        )
    if difference := compare(tensors, expected.shapes, tied=expected.tied):
        raise Failed(
            f"version {ref.version} does not fit the model: {difference}; it was not loaded",
            code="tensors_differ",
        )
    return ref.digest


async def adapter(ref: AdapterWeights, expected: Expected, copies: Copies) -> ProvenAdapter:
    if not expected.max_lora_rank:
        raise Failed(
            f"adapter {ref.adapter!r} cannot be loaded: the engine was started without adapters, "
            "or vLLM has none for the model's architecture, or on a GPU for its dtype",
            code="no_adapters",
        )
    copy = await copies.adapter(ref, seen_folder(ref, expected.roots))
    try:
        found = await asyncio.to_thread(proven_adapter, ref, copy.folder, expected)
    except Failed:
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


def expected_of(model: Path, roots: Sequence[Path], max_lora_rank: int = 0) -> Expected:
    """Returns what versions of the model in this folder must be like."""
    stored = stored_tensors(model)
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    return Expected(shapes(stored), has_tied_embeddings(model), roots, dtypes, max_lora_rank)


def seen_folder(ref: AdapterWeights, roots: Sequence[Path]) -> Path | None:
    """Returns the adapter's folder, or None if it is not seen here and its files are to be fetched.
    Raises BadRequest for other files than an adapter's, and what `published_folder` raises."""
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
    """Returns the real path of `ref.path`. Raises BadRequest unless it lies below one of `roots`,
    links resolved, and Failed if there is no such folder."""
    found = Path(ref.path).resolve()
    allowed = [root.resolve() for root in roots]
    if not any(root in found.parents for root in allowed):
        raise BadRequest(
            f"'path': got {ref.path!r}; weights are loaded only from below "
            f"{' or '.join(map(str, allowed))}"
        )
    if not found.is_dir():
        raise Failed(
            f"'path': got {ref.path!r}, which is not a folder here; does the sampler see the "
            "trainer's volume?",
            code="not_seen",
        )
    return found


def proven_digest(ref: Published, found: Path, expected: Expected) -> str:
    """Returns the digest of all tensors in the folder `found`. Raises Failed if they cannot be
    read, and what `verified` raises."""
    try:
        stored = stored_tensors(found)
        digests = tensor_digests(stored)
    except (OSError, Failed) as error:  # removed or cut short, perhaps while it was read
        raise Failed(
            f"version {ref.version} in {str(found)!r} cannot be read: {error}; it was not loaded",
            code="digest_differs",
        ) from error
    return verified(ref, stored, digests, expected)


def proven_adapter(ref: AdapterWeights, found: Path, expected: Expected) -> str:
    """Returns the digest of the adapter in the folder `found`. Raises Failed as `proven_digest`
    does, and for a rank that the engine does not take (code "no_adapters")."""
    try:
        stored, digests = stored_tensors(found), adapter_digests(found)
    except Failed as error:
        raise Failed(
            f"adapter {ref.adapter!r} cannot be read: {error.detail}; it was not loaded",
            code="digest_differs",
        ) from error
    check_digest(ref, digests)
    config = read_config(found)
    if config.r > expected.max_lora_rank:
        raise Failed(
            f"adapter {ref.adapter!r} has rank {config.r}, expected at most "
            f"{expected.max_lora_rank}, which the engine was started for; it was not loaded",
            code="no_adapters",
        )
    wanted = adapter_shapes(config, expected.shapes)
    check_tensors(ref, stored, Expected(wanted, False, (), dict.fromkeys(wanted, "F32")))
    return ref.digest


def verified(
    ref: Published,
    stored: Mapping[str, StoredTensor],
    digests: Mapping[str, str],
    expected: Expected,
) -> str:
    """Returns the digest of all tensors. Raises Failed if it is not `ref`'s (code
    "digest_differs") or the tensors are not the model's ("tensors_differ")."""
    check_digest(ref, digests)
    check_tensors(ref, stored, expected)
    return ref.digest


def check_digest(ref: Published, digests: Mapping[str, str]) -> None:
    found = digest(digests)
    if not ref.digest.startswith(KIND):
        raise Failed(
            f"version {ref.version} has digest {ref.digest!r}, expected one that begins with "
            f"{KIND!r}; trainer and sampler must be of the same version of Hone",
            code="digest_differs",
        )
    if found != ref.digest:
        raise Failed(
            f"version {ref.version} has digest {found}, expected {ref.digest}"
            f"{_first_difference(digests, ref.tensors)}; it was not loaded",
            code="digest_differs",
        )


def check_tensors(ref: Published, stored: Mapping[str, StoredTensor], expected: Expected) -> None:
    difference = compare(shapes(stored), expected.shapes, tied=expected.tied)
    if difference := difference or wrongly_typed(stored, expected.dtypes):
        raise Failed(
            f"version {ref.version} does not fit the model: {difference}; it was not loaded",
            code="tensors_differ",
        )


def _first_difference(found: Mapping[str, str], published: Mapping[str, str]) -> str:
    names = sorted(name for name in published if found.get(name) != published[name])
    return f" ({len(names)} tensors differ, the first is {names[0]!r})" if names else ""


def differing(found: Mapping[str, str], published: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of tensors whose digests are not those published. An output matrix that is
    not among them is the embedding's, with which it is tied."""
    embedding = next((name for name in published if name.endswith("embed_tokens.weight")), None)
    known = dict(published)
    if embedding and TIED not in known:
        known[TIED] = known[embedding]
    return tuple(sorted(name for name in found.keys() & known.keys() if found[name] != known[name]))


def shapes(tensors: Mapping[str, StoredTensor]) -> Shapes:
    return {name: tensor.shape for name, tensor in tensors.items()}


def compare(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> str | None:
    """Returns how the tensors differ, or None. With `tied` embeddings the output matrix may be in
    either, or in neither."""
    optional = {TIED} if tied else set[str]()
    missing = sorted(expected.keys() - found.keys() - optional)
    unknown = sorted(found.keys() - expected.keys() - optional)
    if missing:
        return f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]!r}"
    if unknown:
        return f"{len(unknown)} tensors are unknown to the model, the first is {unknown[0]!r}"
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            return f"{name!r} has shape {list(found[name])}, expected {list(expected[name])}"
    return None


def wrongly_typed(found: Mapping[str, StoredTensor], expected: Mapping[str, str]) -> str | None:
    """Returns which tensor has a dtype that does not stand for the expected one, or None."""
    for name in sorted(found.keys() & expected.keys()):
        got, wanted = found[name].dtype, expected[name]
        if got != wanted and not {got, wanted} <= FLOATS:
            return f"{name!r} has dtype {got}, expected {wanted}"
    return None


def given_tensors(model: Path, dtype: str) -> dict[str, str]:
    """Returns the digests of the model's own tensors, those that are served in the dtype that the
    files have: a tensor that was rounded has another digest."""
    stored = stored_tensors(model)
    same = {name: t for name, t in stored.items() if DTYPES.get(t.dtype) == dtype}
    return tensor_digests(same)


def tensors_of(ref: AdapterWeights) -> dict[str, str]:
    """Returns what was published of an adapter, its configuration apart."""
    return {name: found for name, found in ref.tensors.items() if name != CONFIG}


def has_tied_embeddings(model: Path) -> bool:
    """Returns what the model's config.json says of its output matrix."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings", False))
