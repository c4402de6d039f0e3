"""From a published version to loaded weights: find its folder, prove its bytes and tensors, load
it.

One loader a method, in `LOADERS`. Nothing is loaded before the digest of the bytes and the name and
shape of every tensor are as expected: vLLM leaves a parameter that a file lacks at its old value
and only logs it, which would be a sync that silently did half of its work.

Left out: ipc, nccl, delta and lora, each of which is one more function here.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from services.rollout.engine import Engine
from shared.digest import StoredTensor, digest, stored_tensors, tensor_digests
from shared.errors import BadRequest, Failed
from shared.wire import FolderWeights, Published

TIED = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]
Loader = Callable[[Engine, Path], Awaitable[None]]


async def load_files(engine: Engine, folder: Path) -> None:
    await engine.load_files(folder)


LOADERS: dict[str, Loader] = {"shm": load_files, "disk": load_files}


def published_folder(ref: FolderWeights, roots: Sequence[Path]) -> Path:
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


def verify(ref: Published, folder: Path, expected: Shapes, *, tied: bool) -> str:
    """Returns the digest of the tensors in `folder`. Raises Failed if it is not `ref`'s or the tensors
    are not the model's."""
    stored = stored_tensors(folder)
    found = digest(tensor_digests(stored))
    if found != ref.digest:
        raise Failed(
            f"version {ref.version} in {str(folder)!r} has digest {found}, expected {ref.digest}; "
            "it was not loaded"
        )
    if difference := compare(shapes(stored), expected, tied=tied):
        raise Failed(
            f"version {ref.version} in {str(folder)!r} does not fit the model: {difference}; "
            "it was not loaded"
        )
    return found


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


def has_tied_embeddings(folder: Path) -> bool:
    """Returns what the model's config.json says of its output matrix."""
    return bool(
        json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
            "tie_word_embeddings", False
        )
    )
