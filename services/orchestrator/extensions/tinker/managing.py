"""Training runs and what they saved, as Tinker's REST API shows them: lists, deletion, expiry."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.orchestrator.extensions.tinker.log import OperationLog
from services.orchestrator.extensions.tinker.mapping import MODEL, adapter_of
from services.orchestrator.extensions.tinker.paths import KINDS, PARTS, path_to
from services.orchestrator.extensions.tinker.saved import Saved
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import to_disk
from shared.errors import Conflict, HoneError, NotFound
from shared.host.logs import get_logger
from shared.wire import JobRecord, JobSummary, SavedWeights

PAGE = 100

EXPIRY_S = 600.0
"""Seconds between two removals of what has expired."""


class Management:
    """What the models of a store saved."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def training_runs(self, limit: int, offset: int) -> dict[str, Any]:
        found = [one async for one in models_of(self._store)]
        records = [await self._store.get(one.id) for one in found[offset : offset + limit]]
        runs = [await self.training_run(record) for record in records]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"training_runs": runs, "cursor": cursor}

    async def training_run(self, record: JobRecord) -> dict[str, Any]:
        listed = (await self.checkpoints(record))["checkpoints"]

        def last(kind: str) -> Any:
            return next((one for one in reversed(listed) if one["checkpoint_type"] == kind), None)

        changed_at = await asyncio.to_thread(OperationLog(Path(record.run_dir)).changed_at)
        return {
            "training_run_id": record.id,
            "base_model": record.job.model,
            "model_owner": record.submitted_by or "HONE_TOKEN",
            **adapter_of(record.job),
            "corrupted": record.status == "failed",
            "last_request_time": iso(changed_at or record.created_at),
            "last_checkpoint": last("training"),
            "last_sampler_checkpoint": last("sampler"),
            "user_metadata": {k: v for k, v in record.job.metadata.items() if k != MODEL},
        }

    async def checkpoints(self, record: JobRecord) -> dict[str, Any]:
        """Returns what the model saved under a name, oldest first."""
        saved = await asyncio.to_thread(Saved(Path(record.run_dir)).all)
        return {"checkpoints": [_checkpoint(record.id, one) for one in saved if one.name]}

    async def all_checkpoints(self, limit: int, offset: int) -> dict[str, Any]:
        """Returns what all models saved, newest first."""
        found: list[dict[str, Any]] = []
        async for one in models_of(self._store):
            found += (await self.checkpoints(await self._store.get(one.id)))["checkpoints"]
        found.sort(key=lambda one: str(one["time"]), reverse=True)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    async def delete(self, record: JobRecord, id: str) -> None:
        await self._remove(Path(record.run_dir), await asyncio.to_thread(saved_as, record, id))

    async def _remove(self, run: Path, saved: SavedWeights) -> None:
        """Raises Conflict if a job that has not ended begins with the checkpoint."""
        if saved.path:
            for use in await self._store.models_below(Path(saved.path)):
                raise Conflict(
                    f"{saved.name!r} is used by job {use.job_id!r}, which is {use.status}; cancel "
                    "that job, or wait for its end"
                )
        await to_disk(Saved(run).remove, saved)

    async def expire(self, record: JobRecord, id: str, ttl_s: float | None) -> None:
        one = await asyncio.to_thread(saved_as, record, id)
        expires_at = None if ttl_s is None else time.time() + ttl_s
        await to_disk(
            Saved(Path(record.run_dir)).change, one.model_copy(update={"expires_at": expires_at})
        )

    # --- what has expired ------------------------------------------------------------------------

    async def remove_expired_forever(self) -> None:
        """Removes, again and again, what has expired."""
        while True:
            try:
                found = [one.id async for one in models_of(self._store)]
            except HoneError as error:  # Redis is unreachable; a later removal may do better
                get_logger().warning("expired weights not removed", reason=str(error))
                found = []
            for job_id in found:
                await self.remove_expired(job_id)
            await asyncio.sleep(EXPIRY_S)

    async def remove_expired(self, job_id: str) -> None:
        """Removes what has expired of a model, but for what a job needs."""
        try:
            run = Path((await self._store.get(job_id)).run_dir)
            for saved in await asyncio.to_thread(Saved(run).expired):
                with contextlib.suppress(Conflict):
                    await self._remove(run, saved)
        except (HoneError, OSError) as error:  # a later removal may do better
            get_logger().warning("expired weights not removed", job=job_id, reason=str(error))


def saved_as(record: JobRecord, id: str) -> SavedWeights:
    """Returns what the model saved under Tinker's id, for example `weights/NAME`. Raises
    NotFound."""
    part, _, name = id.partition("/")
    found = part in KINDS and Saved(Path(record.run_dir)).find(KINDS[part][0], name)
    if not found:
        raise NotFound(f"the model {record.id!r} has no {id!r:.200}, or not any more")
    return found


async def models_of(store: Store) -> AsyncIterator[JobSummary]:
    """Yields the models that programs made, newest first."""
    after: str | None = None
    while True:
        page = await store.list(after, PAGE)
        for one in page.jobs:
            if MODEL in one.metadata:
                yield one
        after = page.next_after
        if after is None:
            return


def _checkpoint(model_id: str, saved: SavedWeights) -> dict[str, Any]:
    part = PARTS[saved.kind]
    return {
        "checkpoint_id": f"{part}/{saved.name}",
        "checkpoint_type": KINDS[part][1],
        "time": iso(saved.made_at),
        "tinker_path": path_to(model_id, saved.kind, saved.name),
        "size_bytes": saved.size_bytes,
        "public": False,
        "expires_at": None if saved.expires_at is None else iso(saved.expires_at),
    }


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
