"""A sampler that loads a version, and files of it that are written on demand."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.orchestrator.errors import SyncFailed
from services.orchestrator.pool.replica import Replica
from services.orchestrator.pool.sampler_loading import load
from services.orchestrator.pool.syncing import _write_files
from shared.errors import Failed


class WaitsForFiles:
    """A push whose files are being written."""

    drain = False

    async def for_sampler(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


async def test_a_sampler_is_not_left_alone_while_its_files_are_written() -> None:
    replica = Replica(cast(Any, None))
    loading = asyncio.create_task(
        load(replica, cast(Any, WaitsForFiles()), cast(Any, None), 0.0, late=True)
    )
    await asyncio.sleep(0)
    assert not replica.is_left_alone, "its client would be closed"
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assert replica.is_left_alone


class Warned(list[str]):
    async def warn(self, message: str) -> None:
        self.append(message)


async def test_files_of_other_weights_fail_the_sync_and_a_full_disk_does_not() -> None:
    warned = Warned()

    async def full() -> None:
        raise Failed("no space left")

    async def other() -> None:
        raise SyncFailed("weight sync: other weights")

    await _write_files(cast(Any, full), cast(Any, warned))
    assert warned == ["samplers that are away join later: no space left"]
    with pytest.raises(SyncFailed, match="other weights"):
        await _write_files(cast(Any, other), cast(Any, warned))
    assert len(warned) == 1
