"""The state from which an engine resumes: float32 master weights and Adam's moments of trained
parameters, and each rank's random number generators.

    <folder>/rank-<r>-<i>.safetensors   the fragments that rank r holds, about a GiB a file
    <folder>/random-rank-<r>.pt         torch, CUDA, numpy and Python generators of rank r

A fragment is a run of one parameter's elements, named `<what>/<parameter>`; the file's metadata has
the index of its first element. So the files do not depend on DeepSpeed's layout, and any number of
ranks at any ZeRO stage can read them. With the same number and stage training continues bit for
bit. Otherwise it continues from the same weights and moments, but rounds differently and draws
other random numbers.

Saving is not a collective, so other ranks do not wait for a rank that cannot write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.zero.internals import (
    MOMENTS,
    STEPS,
    Fragment,
    every_rank_has_all,
    fragments,
    masters_to_weights,
    new_state,
    random_state,
    restore_random_state,
)
from shared.errors import Conflict

MASTER = "master"
FILE_BYTES = 1 << 30


def save(zero: Any, folder: Path) -> None:
    """Writes this rank's share of the state of DeepSpeed's engine `zero`, and its random number
    generators, into the existing `folder`."""
    rank = dist.get_rank()
    if rank == 0 or not every_rank_has_all(zero):
        for index, (tensors, starts) in enumerate(_files(zero)):
            save_file(tensors, folder / f"rank-{rank}-{index:05d}.safetensors", starts)
    torch.save(random_state(), _random_file(folder))


def load(zero: Any, folder: Path) -> None:
    """Restores a new `zero` from the files of `save`, and this rank's random number generators if
    its file exists: a collective. Raises Conflict if a part of the trained parameters was not
    saved."""
    with torch.no_grad():
        saved = SavedFragments.of(folder)
        for fragment in fragments(zero):
            _restore(zero, fragment, saved)
        masters_to_weights(zero)
    if _random_file(folder).is_file():
        restore_random_state(torch.load(_random_file(folder), weights_only=True))


def _files(zero: Any) -> Iterator[tuple[dict[str, Tensor], dict[str, str]]]:
    """Yields tensors and first indices, those of one file at a time. Only these copies are in host
    memory."""
    tensors: dict[str, Tensor] = {}
    starts: dict[str, str] = {}
    size_bytes = 0
    for fragment in fragments(zero):
        for what, value in _values(zero, fragment):
            name = f"{what}/{fragment.name}"
            tensors[name], starts[name] = value, str(fragment.start)
            size_bytes += value.numel() * value.element_size()
        if size_bytes >= FILE_BYTES:
            yield tensors, starts
            tensors, starts, size_bytes = {}, {}, 0
    if tensors:
        yield tensors, starts


def _values(zero: Any, fragment: Fragment) -> Iterator[tuple[str, Tensor]]:
    """Yields master weights and, once the optimizer has stepped, its moments and count."""
    yield MASTER, fragment.of(fragment.flat).to("cpu", torch.float32, copy=True)
    state = zero.basic_optimizer.state.get(fragment.flat, {})
    for what in MOMENTS:
        if what in state:
            yield what, fragment.of(state[what]).to("cpu", torch.float32, copy=True)
    if STEPS in state:
        yield STEPS, torch.tensor([float(state[STEPS])], dtype=torch.float64)


@dataclass(frozen=True)
class Piece:
    """A saved fragment: its file, and its elements `[start, end)` of the parameter."""

    file: Path
    start: int
    end: int


@dataclass(frozen=True)
class SavedFragments:
    """The saved fragments in a folder's files, by `<what>/<parameter>`."""

    pieces: dict[str, list[Piece]]

    @staticmethod
    def of(folder: Path) -> SavedFragments:
        """Reads the folder's headers. Raises Conflict if it has no fragments: another version of
        Hone wrote another format."""
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for file in sorted(folder.glob("rank-*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name, start in (tensors.metadata() or {}).items():
                    if name in tensors.keys():  # noqa: SIM118  (it is no dict)
                        (numel,) = tensors.get_slice(name).get_shape()
                        pieces[name].append(Piece(file, int(start), int(start) + numel))
        if not pieces:
            raise Conflict(
                f"{str(folder)!r} holds no optimizer state that this version of Hone reads; a new "
                "job can begin with the checkpoint as its model"
            )
        return SavedFragments(dict(pieces))

    def read(self, name: str, start: int, end: int, into: Tensor) -> None:
        """Copies the parameter's elements `[start, end)` into `into`. Raises Conflict unless all of
        them were saved."""
        copied = 0
        for piece in self.pieces.get(name, ()):
            first, last = max(start, piece.start), min(end, piece.end)
            if first >= last:
                continue
            with safe_open(piece.file, "pt") as tensors:
                part = tensors.get_slice(name)[first - piece.start : last - piece.start]
            into[first - start : last - start].copy_(part)
            copied += last - first
        if copied != end - start:
            raise Conflict(
                f"the checkpoint has {copied} of the {end - start} elements of {name!r} from "
                f"{start} on; it is of a model that trains other parameters"
            )

    def steps(self, parameter: str) -> int | None:
        """Returns how many steps the optimizer had made; None before its first step."""
        for piece in self.pieces.get(f"{STEPS}/{parameter}", ()):
            with safe_open(piece.file, "pt") as tensors:
                return int(tensors.get_tensor(f"{STEPS}/{parameter}").item())
        return None


def _restore(zero: Any, fragment: Fragment, saved: SavedFragments) -> None:
    start, end = fragment.start, fragment.start + fragment.numel
    saved.read(f"{MASTER}/{fragment.name}", start, end, fragment.of(fragment.flat))
    steps = saved.steps(fragment.name)
    if steps is None:
        return
    state = zero.basic_optimizer.state[fragment.flat]
    if not state:
        state.update(new_state(fragment.flat))
    state[STEPS].fill_(steps)
    for what in MOMENTS:
        saved.read(f"{what}/{fragment.name}", start, end, fragment.of(state[what]))


def _random_file(folder: Path) -> Path:
    return folder / f"random-rank-{dist.get_rank()}.pt"
