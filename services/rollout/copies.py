"""The sampler's own copies of published versions, in a folder that only it writes into."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from services.rollout.fetching import Fetcher
from shared.wire import HttpWeights


@dataclass(frozen=True)
class Copy:
    """The files of a version, not proven yet, and how many bytes came over the network for
    them."""

    folder: Path
    received_bytes: int


class Copies:
    """At most one version at a time: a folder named by its digest, so that a transfer that was cut
    goes on when the same version is asked for again."""

    def __init__(self, folder: Path, fetcher: Fetcher) -> None:
        self._folder = folder
        self._fetcher = fetcher

    def clear(self) -> None:
        """Removes all copies, those of an earlier life of this sampler included."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def fetched(self, ref: HttpWeights) -> Copy:
        """Returns the version's files as the trainer has them."""
        folder = self._folder / ref.digest[:32]
        return Copy(folder, await asyncio.to_thread(self._fetch, ref, folder))

    def remove(self, copy: Copy) -> None:
        shutil.rmtree(copy.folder, ignore_errors=True)

    def _fetch(self, ref: HttpWeights, folder: Path) -> int:
        for other in self._folder.iterdir() if self._folder.is_dir() else ():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return self._fetcher.fetch(ref.files, folder)
