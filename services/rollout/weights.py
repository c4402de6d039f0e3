"""From a published version to loaded weights: find its folder, prove its bytes and tensors, load
it.

One loader a method, in `LOADERS`. Nothing is loaded before the digest of the bytes and the name and
shape of every tensor are as expected: vLLM leaves a parameter that a file lacks at its old value
and only logs it, which would be a sync that silently did half of its work.

Left out: ipc, nccl, delta and lora, each of which is one more function here.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from services.rollout.engine import Engine
from shared.errors import BadRequest, Failed
from shared.wire import WeightsRef

TIED = "lm_head.weight"
MAX_HEADER_BYTES = 100 << 20
"""The safetensors format's own limit."""

Shapes = dict[str, tuple[int, ...]]
Loader = Callable[[Engine, Path], Awaitable[None]]


async def load_files(engine: Engine, folder: Path) -> None:
    await engine.load_files(folder)


LOADERS: dict[str, Loader] = {"shm": load_files, "disk": load_files}


def published_folder(ref: WeightsRef, roots: Sequence[Path]) -> Path:
    """Returns the real path of `ref.path`. Raises BadRequest unless it is a folder below one of
    `roots`, links resolved."""
    folder = Path(ref.path).resolve()
    allowed = [root.resolve() for root in roots]
    if not any(root in folder.parents for root in allowed):
        raise BadRequest(
            f"'path': got {ref.path!r}; weights are loaded only from below "
            f"{' or '.join(map(str, allowed))}"
        )
    if not folder.is_dir():
        raise BadRequest(
            f"'path': got {ref.path!r}, which is not a folder here; does the sampler see the "
            "trainer's volume?"
        )
    return folder


def verify(ref: WeightsRef, folder: Path, expected: Shapes, *, tied: bool) -> str:
    """Returns the digest of the bytes in `folder`. Raises Failed if it is not `ref`'s or the
    tensors are not the model's."""
    digest = digest_of(folder)
    if digest != ref.digest:
        raise Failed(
            f"version {ref.version} in {str(folder)!r} has digest {digest}, expected {ref.digest}; "
            "it was not loaded"
        )
    difference = compare(shapes_of(folder), expected, tied=tied)
    if difference:
        raise Failed(
            f"version {ref.version} in {str(folder)!r} does not fit the model: {difference}; it "
            "was not loaded"
        )
    return digest


def digest_of(folder: Path) -> str:
    """Returns the sha256, in hex, of the bytes of each *.safetensors file in `folder`, in the order
    of their names."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def shapes_of(folder: Path) -> Shapes:
    """Returns the shape of every tensor in the *.safetensors files of `folder`, by name; {} without
    such files.

    Reads only the headers: 8 bytes of length, then JSON. Raises Failed for a file that is not
    safetensors.
    """
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    return shapes


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


def has_tied_embeddings(folder: Path) -> bool:
    """Returns what the model's config.json says of its output matrix."""
    return bool(
        json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
            "tie_word_embeddings", False
        )
    )


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    with file.open("rb") as stream:
        length = stream.read(8)
        size_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 2 <= size_bytes <= MAX_HEADER_BYTES:
            raise Failed(
                f"{str(file)!r} is not a safetensors file: its header would have {size_bytes} bytes"
            )
        try:
            return json.loads(stream.read(size_bytes))
        except ValueError as error:
            raise Failed(f"{str(file)!r} is not a safetensors file: {error}") from error
