"""The changes from one published version to the next, as files that samplers fetch.

    <shm_dir>/<job>/d<version>/delta.safetensors    a packed frame per tensor that
                                                    changed

Both versions are read from their published files. So a delta leads from the weights that samplers
have exactly to the weights that a whole version would have, and rounding never adds up.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from services.trainer.disk.folders import write_atomically
from shared.weights import delta
from shared.weights.folders import StoredTensor, stored_tensors

KEEP_STEPS = 4
"""The most versions that a sampler may miss and still catch up by deltas."""

MAX_SHARE = 0.5
"""The largest delta, as a share of the whole version. Instead of a larger one the whole is sent."""

MAX_THREADS = 8

FILE = "delta.safetensors"


@dataclass(frozen=True)
class Delta:
    """The file that leads from one version's digest to the next one's."""

    file: Path
    base_digest: str
    digest: str
    num_changed: int
    num_elements: int


class Deltas:
    """The newest deltas of one job, in order; each leads to the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: list[Delta] = []

    def add(
        self, version: int, base: tuple[Path, str], whole: tuple[Path, str], size_bytes: int
    ) -> None:
        """Adds the step from `base` to `whole`, each a version's folder and digest, unless it is
        there already. Forgets all, so that the whole version is sent, if it would be too large."""
        (base_folder, base_digest), (whole_folder, digest) = base, whole
        if digest in (base_digest, self._end()):
            return
        if self._end() not in (None, base_digest):
            self.forget()
        target = self._folder / f"d{version}"
        with write_atomically(target, size_bytes, durable=False) as aside:
            num_changed, num_elements = write(
                stored_tensors(base_folder), stored_tensors(whole_folder), aside / FILE
            )
        file = target / FILE
        if file.stat().st_size > MAX_SHARE * size_bytes:
            self.forget()
            shutil.rmtree(target, ignore_errors=True)
            return
        self._steps.append(Delta(file, base_digest, digest, num_changed, num_elements))
        for old in self._steps[:-KEEP_STEPS]:
            shutil.rmtree(old.file.parent, ignore_errors=True)
        self._steps = self._steps[-KEEP_STEPS:]

    def leading_to(self, digest: str) -> tuple[Delta, ...]:
        """Returns the steps to that version, oldest first; none if it can only be sent whole."""
        return tuple(self._steps) if self._end() == digest else ()

    def forget(self) -> None:
        for step in self._steps:
            shutil.rmtree(step.file.parent, ignore_errors=True)
        self._steps = []

    def _end(self) -> str | None:
        return self._steps[-1].digest if self._steps else None


def write(
    old: dict[str, StoredTensor], new: dict[str, StoredTensor], file: Path
) -> tuple[int, int]:
    """Writes the frames of the tensors that differ; returns how many elements do, of how many.
    Both versions are of one model: the same names, dtypes and shapes."""

    def frame(name: str) -> tuple[bytes, int, int]:
        new_N = _elements(new[name])
        return *delta.pack(_elements(old[name]), new_N), len(new_N)

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        frames = dict(zip(new, pool.map(frame, new), strict=True))
    packed = {
        name: np.frombuffer(data, np.uint8) for name, (data, count, _) in frames.items() if count
    }
    save_file(packed, file)
    return sum(c for _, c, _ in frames.values()), sum(n for _, _, n in frames.values())


def _elements(tensor: StoredTensor) -> delta.Array:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        return delta.elements(stream.read(tensor.size_bytes), tensor.dtype)
