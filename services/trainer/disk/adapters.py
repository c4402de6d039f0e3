"""Published adapters: the two files of each, in shared memory.

<shm_dir>/<job>/a<version>/adapter_model.safetensors, adapter_config.json
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.trainer.disk.folders import size_of, written_aside
from shared.errors import Failed
from shared.weights.checkpoints import adapter_digests

KEEP = 2
"""A sampler may still be copying the version before the newest."""


@dataclass(frozen=True)
class Adapter:
    """A version in `folder`, and the digests that a sampler has to find there."""

    folder: Path
    tensors: dict[str, str]
    size_bytes: int

    def is_whole(self) -> bool:
        """Returns whether the files still are what was written."""
        try:
            return adapter_digests(self.folder) == self.tensors
        except Failed:
            return False


class Adapters:
    """One folder per version, complete or absent; the newest `KEEP` stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[int, Adapter] = {}

    def write(self, version: int, size_bytes: int, save: Callable[[Path], object]) -> Adapter:
        """Returns the version, written unless it is there already and undamaged."""
        known = self._written.get(version)
        if known is None or not known.is_whole():
            known = self._written[version] = self._write(version, size_bytes, save)
            self._forget_old()
        return known

    def forget(self) -> None:
        self._written = {}

    def _write(self, version: int, size_bytes: int, save: Callable[[Path], object]) -> Adapter:
        folder = self._folder / f"a{version}"
        with written_aside(folder, size_bytes, durable=False) as aside:
            save(aside)
            tensors = adapter_digests(aside)
        return Adapter(folder, tensors, size_of(folder))

    def _forget_old(self) -> None:
        self._written = dict(list(self._written.items())[-KEEP:])
        kept = {adapter.folder for adapter in self._written.values()}
        for folder in self._folder.glob("a*"):
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)
