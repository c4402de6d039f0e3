"""Verifies that a version is the published one and fits the model, by the digest of its bytes and
the name, shape and dtype of every tensor; and by the canary, that a load changed the weights. If a
file lacks a parameter, vLLM keeps the old value and only logs it: such a sync would silently do
half of its work."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from operator import mul
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from shared.errors import Conflict, Failed
from shared.weights.folders import (
    CONFIG,
    KIND,
    PREFIX,
    StoredTensor,
    adapter_digests,
    digest,
    stored_tensors,
    tensor_digests,
)
from shared.wire import AdapterWeights, Canary, Logprobs, Published

TIED = "lm_head.weight"

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

SUFFIX = ".weight"

MOVED_NATS = {"float32": 1e-5}
"""By the canary's dtype: if the trainer's log-probs of a canary change by more nats than this, the
engine's log-probs cannot stay the same to the bit."""

MOVED_ELSEWHERE_NATS = 5e-3
"""The same bound for dtypes that round more."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Shapes = dict[str, tuple[int, ...]]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class ExpectedVersion:
    """The properties that a version must have: the `shapes` of the model's tensors; `tied`, whether
    the output matrix is the embedding; the folders (`roots`) in which files may lie; and the known
    `dtypes` of tensors, of which one float type may replace another. `max_lora_rank` is the largest
    rank of adapters that the engine supports; 0: none. `refresh` makes files that other hosts wrote
    into those folders visible."""

    shapes: Shapes
    tied: bool
    roots: Sequence[Path]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    max_lora_rank: int = 0
    refresh: Callable[[], None] = _nothing


def expected_version(
    model: Path, roots: Sequence[Path], refresh: Callable[[], None] = _nothing
) -> ExpectedVersion:
    """Returns the properties of versions of the model in this folder."""
    stored = stored_tensors(model)
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tied = bool(config.get("tie_word_embeddings", False))
    return ExpectedVersion(shapes(stored), tied, roots, dtypes, refresh=refresh)


def verified_digest(ref: Published, folder: Path, expected: ExpectedVersion) -> str:
    """Returns the digest of all tensors in the folder. Raises Failed if they cannot be read or do
    not have `ref`'s digest (code "digest_differs"), or do not fit the model ("tensors_differ")."""
    try:
        stored = stored_tensors(folder)
        digests = tensor_digests(stored)
    except (OSError, Failed) as error:  # the file was removed or cut short, perhaps during the read
        raise Failed(
            f"version {ref.version} in {str(folder)!r} cannot be read: {error}; it was not loaded",
            code="digest_differs",
        ) from error
    check_digest(ref, digests)
    check_tensors(ref, stored, expected)
    return ref.digest


def verified_adapter(ref: AdapterWeights, folder: Path, expected: ExpectedVersion) -> str:
    """Returns the digest of the adapter in the folder. Raises Failed as `verified_digest` does, and
    Conflict for a rank that the engine does not support (code "no_adapters")."""
    try:
        stored, digests = stored_tensors(folder), adapter_digests(folder)
    except Failed as error:
        raise Failed(
            f"adapter {ref.adapter!r} cannot be read: {error.detail}; it was not loaded",
            code="digest_differs",
        ) from error
    check_digest(ref, digests)
    config = read_config(folder)
    if config.r > expected.max_lora_rank:
        raise Conflict(
            f"adapter {ref.adapter!r} has rank {config.r}, expected at most "
            f"{expected.max_lora_rank}, with which the engine was started; it was not loaded",
            code="no_adapters",
        )
    wanted = adapter_shapes(config, expected.shapes)
    check_tensors(ref, stored, ExpectedVersion(wanted, False, (), dict.fromkeys(wanted, "F32")))
    return ref.digest


def announced_digest(ref: Published, tensors: Shapes, expected: ExpectedVersion) -> str:
    """Returns the digest of a version before its tensors arrive. Raises Failed if the announced
    `tensors` do not fit the model or the digest."""
    if digest(ref.tensors) != ref.digest or ref.tensors.keys() != tensors.keys():
        raise Failed(
            f"version {ref.version} announces tensors that do not have its digest {ref.digest}; it "
            "was not loaded",
            code="digest_differs",
        )
    _check_fit(ref, compare(tensors, expected.shapes, tied=expected.tied))
    return ref.digest


def check_digest(ref: Published, digests: Mapping[str, str]) -> None:
    actual = digest(digests)
    if not ref.digest.startswith(KIND):
        raise Failed(
            f"version {ref.version} has digest {ref.digest!r}, expected one that begins with "
            f"{KIND!r}; trainer and sampler must be of the same version of Hone",
            code="digest_differs",
        )
    if actual != ref.digest:
        raise Failed(
            f"version {ref.version} has digest {actual}, expected {ref.digest}"
            f"{_first_difference(digests, ref.tensors)}; it was not loaded",
            code="digest_differs",
        )


def check_tensors(
    ref: Published, stored: Mapping[str, StoredTensor], expected: ExpectedVersion
) -> None:
    difference = compare(shapes(stored), expected.shapes, tied=expected.tied)
    _check_fit(ref, difference or wrongly_typed(stored, expected.dtypes))


def _check_fit(ref: Published, difference: str | None) -> None:
    if difference:
        raise Failed(
            f"version {ref.version} does not fit the model: {difference}; it was not loaded",
            code="tensors_differ",
        )


def _first_difference(digests: Mapping[str, str], published: Mapping[str, str]) -> str:
    names = sorted(name for name in published if digests.get(name) != published[name])
    return f" ({len(names)} tensors differ, the first is {names[0]!r})" if names else ""


def differing(digests: Mapping[str, str], published: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the tensors whose digests differ from the published ones. An output
    matrix that was not published is tied to the embedding, and is compared with it."""
    embedding = next((name for name in published if name.endswith("embed_tokens.weight")), None)
    known = dict(published)
    if embedding and TIED not in known:
        known[TIED] = known[embedding]
    return tuple(
        sorted(name for name in digests.keys() & known.keys() if digests[name] != known[name])
    )


def shapes(tensors: Mapping[str, StoredTensor]) -> Shapes:
    return {name: tensor.shape for name, tensor in tensors.items()}


def compare(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> str | None:
    """Returns a sentence on how the tensors differ, or None. With `tied` embeddings the output
    matrix may be missing on either side."""
    optional = {TIED} if tied else set[str]()
    missing = sorted(expected.keys() - shapes.keys() - optional)
    unknown = sorted(shapes.keys() - expected.keys() - optional)
    if missing:
        return f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]!r}"
    if unknown:
        return f"{len(unknown)} tensors are unknown to the model, the first is {unknown[0]!r}"
    for name in sorted(shapes.keys() & expected.keys()):
        if shapes[name] != expected[name]:
            return f"{name!r} has shape {list(shapes[name])}, expected {list(expected[name])}"
    return None


def wrongly_typed(stored: Mapping[str, StoredTensor], expected: Mapping[str, str]) -> str | None:
    """Returns a sentence on a tensor whose dtype cannot replace the expected one, or None."""
    for name in sorted(stored.keys() & expected.keys()):
        got, wanted = stored[name].dtype, expected[name]
        if got != wanted and not {got, wanted} <= FLOATS:
            return f"{name!r} has dtype {got}, expected {wanted}"
    return None


def given_tensors(model: Path, dtype: str) -> dict[str, str]:
    """Returns the digests of the model's own tensors whose files have the served `dtype`: a tensor
    that was rounded to it has another digest."""
    stored = stored_tensors(model)
    same = {name: t for name, t in stored.items() if DTYPES.get(t.dtype) == dtype}
    return tensor_digests(same)


# --- adapters ------------------------------------------------------------------------------------


class AdapterConfig(BaseModel):
    """The part of PEFT's configuration that says which tensors an adapter has."""

    r: int = Field(ge=1)
    target_modules: tuple[str, ...] = Field(min_length=1)


def read_config(folder: Path) -> AdapterConfig:
    """Reads the adapter's configuration. Raises Failed if it lacks rank or layers."""
    try:
        return AdapterConfig.model_validate_json((folder / CONFIG).read_bytes())
    except (OSError, ValidationError) as error:
        raise Failed(
            f"the adapter's {CONFIG} cannot be used: {' '.join(str(error).split())}",
            code="tensors_differ",
        ) from error


def adapter_shapes(
    config: AdapterConfig, model: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the adapter's tensors: for each layer that its configuration names, A
    `[rank, in]` and B `[out, rank]`. `model` has the shapes of the model's tensors. As with PEFT,
    the end of a layer's name is enough."""
    wanted: dict[str, tuple[int, ...]] = {}
    targets = set(config.target_modules)
    for name, shape in model.items():
        layer = name.removesuffix(SUFFIX)
        if name.endswith(SUFFIX) and len(shape) == 2 and targets & _endings(layer):
            wanted[f"{PREFIX}{layer}.lora_A{SUFFIX}"] = (config.r, shape[1])
            wanted[f"{PREFIX}{layer}.lora_B{SUFFIX}"] = (shape[0], config.r)
    return wanted


def _endings(layer: str) -> set[str]:
    """Returns "c", "b.c" and "a.b.c" for "a.b.c"."""
    parts = layer.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


# --- the canary ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CanaryReading:
    """A canary, and this engine's log-probs of it."""

    canary: Canary
    logprobs: Logprobs

    def is_unchanged(self, before: CanaryReading) -> bool:
        """Returns whether the engine's log-probs are the same to the bit as before, although the
        trainer's have changed, which means that the load did nothing."""
        ours, theirs = self.canary, before.canary
        if (ours.token_ids, ours.dtype) != (theirs.token_ids, theirs.dtype):
            return False
        gaps = (abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
        floor_nats = MOVED_NATS.get(ours.dtype, MOVED_ELSEWHERE_NATS)
        return self.logprobs == before.logprobs and max(gaps, default=0.0) > floor_nats

    def moved_too_little(self, before: CanaryReading) -> bool:
        """Returns whether the engine's log-probs moved by less than half of the trainer's move, in
        its direction. After a load that did nothing they may still move at random, because vLLM's
        rounding depends on the other requests of a batch."""
        ours, theirs = self.canary, before.canary
        if ours.token_ids != theirs.token_ids:
            return False
        moved = [a - b for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
        followed = [a - b for a, b in zip(self.logprobs, before.logprobs, strict=True)]
        return fsum(map(mul, followed, moved)) <= fsum(map(mul, moved, moved)) / 2
