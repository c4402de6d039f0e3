"""Whether a version is what was published, and fits the model: the digest of its bytes, and the
name, shape and dtype of every tensor. vLLM leaves a parameter that a file lacks at its old value
and only logs it, which would be a sync that silently did half of its work."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.rollout.weights.adapter_files import adapter_shapes, read_config
from shared.errors import Conflict, Failed
from shared.weights.checkpoints import CONFIG, adapter_digests
from shared.weights.digest import KIND, StoredTensor, digest, stored_tensors, tensor_digests
from shared.wire import (
    AdapterWeights,
    Published,
)

TIED = "lm_head.weight"

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Shapes = dict[str, tuple[int, ...]]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Expected:
    """What versions must be like: the `shapes` of the model's tensors, whether the output matrix is
    `tied` to the embeddings, the folders (`roots`) that files may lie in, and the tensors' `dtypes`
    where they are known: one kind of float may stand for another. `max_lora_rank` is the largest
    rank of adapters that the engine takes; 0: none. `refresh` brings in what other hosts wrote into
    those folders."""

    shapes: Shapes
    tied: bool
    roots: Sequence[Path]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    max_lora_rank: int = 0
    refresh: Callable[[], None] = _nothing


def expected_of(
    model: Path, roots: Sequence[Path], refresh: Callable[[], None] = _nothing
) -> Expected:
    """Returns what versions of the model in this folder must be like."""
    stored = stored_tensors(model)
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    tied = has_tied_embeddings(model)
    return Expected(shapes(stored), tied, roots, dtypes, refresh=refresh)


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
    does, and Conflict for a rank that the engine does not take (code "no_adapters")."""
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
        raise Conflict(
            f"adapter {ref.adapter!r} has rank {config.r}, expected at most "
            f"{expected.max_lora_rank}, which the engine was started for; it was not loaded",
            code="no_adapters",
        )
    wanted = adapter_shapes(config, expected.shapes)
    check_tensors(ref, stored, Expected(wanted, False, (), dict.fromkeys(wanted, "F32")))
    return ref.digest


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
