"""Training runs and what they saved, as Tinker's REST API shows them: lists, deletion, expiry, and
the files of an export."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.orchestrator.programs.log import OperationLog
from services.orchestrator.programs.saved import Saved
from services.orchestrator.runs.checkpoint_files import files_of, path_of
from services.orchestrator.runs.writable import writing
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import to_disk
from services.orchestrator.tinker.mapping import MODEL
from shared.errors import BadRequest, Conflict, HoneError, NotFound, Unauthorized
from shared.host import disk
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import JobRecord, JobSummary, SavedKind, SavedWeights

KINDS: dict[str, tuple[SavedKind, str]] = {
    "weights": ("checkpoint", "training"),
    "sampler_weights": ("snapshot", "sampler"),
    "external_weights": ("export", "external"),
}
"""The kinds by their part of a path, and Tinker's names of their types."""

PARTS = {kind: part for part, (kind, _) in KINDS.items()}

PAGE = 100

MAX_TTL_S = 10 * 365 * 86400
"""Ten years, as the SDK says."""

URL_S = 3600.0
"""Seconds for which the address of an export's file is valid."""

SWEEP_S = 600.0
"""Seconds between two sweeps of what has expired."""


def path_to(model_id: str, kind: SavedKind, name: str) -> str:
    return f"tinker://{model_id}/{PARTS[kind]}/{name}"


def adapter_of(job: Job) -> dict[str, Any]:
    """Returns what Tinker tells of a model's adapter."""
    return {"is_lora": job.lora is not None, "lora_rank": job.lora.rank if job.lora else None}


def read_ttl(body: dict[str, Any]) -> float | None:
    """Returns for how many seconds something is to be kept; None: for ever. Raises BadRequest."""
    ttl = body.get("ttl_seconds")
    if ttl is None:
        return None
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= MAX_TTL_S:
        raise BadRequest(
            f"'ttl_seconds': got {ttl!r:.40}; expected seconds from 1 to {MAX_TTL_S}, or null"
        )
    return float(ttl)


class Management:
    """The models of a store, and what they saved. Addresses of files are signed by a secret that
    orchestrators with one folder of runs share."""

    def __init__(self, store: Store, runs_dir: Path) -> None:
        self._store = store
        self._secret_file = runs_dir / ".keys" / "addresses.secret"

    async def training_runs(self, limit: int, offset: int) -> dict[str, Any]:
        found = [one async for one in self.models()]
        records = [await self._store.get(one.id) for one in found[offset : offset + limit]]
        runs = [await self.training_run(record) for record in records]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"training_runs": runs, "cursor": cursor}

    async def models(self) -> AsyncIterator[JobSummary]:
        """Yields the models that programs made, newest first."""
        after: str | None = None
        while True:
            page = await self._store.list(after, PAGE)
            for one in page.jobs:
                if MODEL in one.metadata:
                    yield one
            after = page.next_after
            if after is None:
                return

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
            "last_request_time": _iso(changed_at or record.created_at),
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
        async for one in self.models():
            found += (await self.checkpoints(await self._store.get(one.id)))["checkpoints"]
        found.sort(key=lambda one: str(one["time"]), reverse=True)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    async def delete(self, record: JobRecord, id: str) -> None:
        await self._remove(Path(record.run_dir), await self.saved(record, id))

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
        one = await self.saved(record, id)
        expires_at = None if ttl_s is None else time.time() + ttl_s
        await to_disk(
            Saved(Path(record.run_dir)).change, one.model_copy(update={"expires_at": expires_at})
        )

    async def saved(self, record: JobRecord, id: str) -> SavedWeights:
        """Returns what has Tinker's id `weights/NAME`, for example. Raises NotFound."""
        part, _, name = id.partition("/")
        kind = KINDS[part][0] if part in KINDS else None
        found = kind and await asyncio.to_thread(Saved(Path(record.run_dir)).find, kind, name)
        if not found:
            raise NotFound(f"the model {record.id!r} has no {id!r:.200}, or not any more")
        return found

    # --- the files of an export ------------------------------------------------------------------

    async def urls(self, record: JobRecord, id: str, base_url: str) -> dict[str, Any]:
        """Returns an address for each file of an export, which needs no key for a while."""
        one = await self.saved(record, id)
        expires = int(time.time() + URL_S)
        files = await asyncio.to_thread(files_of, Path(one.path))
        secret = await to_disk(self._secret)
        urls: dict[str, str] = {}
        for file in files:
            signature = _signed(secret, record.id, one.number, file.name, expires)
            rest = f"{expires}/{record.id}/{one.number}/{file.name}"
            urls[file.name] = f"{base_url}/{signature}/{rest}"
        return {"urls": urls, "expires": _iso(expires)}

    async def file(self, signature: str, expires: int, job: str, number: int, name: str) -> Path:
        """Returns the file behind an address of `urls`. Raises Unauthorized for any other one."""
        wanted = _signed(await to_disk(self._secret), job, number, name, expires)
        if not hmac.compare_digest(wanted.encode(), signature.encode()) or expires < time.time():
            raise Unauthorized("the address is not one of an export's files, or not any more")
        run_dir = Path((await self._store.get(job)).run_dir)
        found = {one.number: one for one in await asyncio.to_thread(Saved(run_dir).all)}
        if number not in found:
            raise NotFound("the export is not there any more")
        return await asyncio.to_thread(path_of, Path(found[number].path), name)

    def _secret(self) -> bytes:
        """Returns the secret of this folder of runs, which the first call makes."""
        with contextlib.suppress(FileNotFoundError):
            return self._secret_file.read_bytes()
        folder = self._secret_file.parent
        with writing("folder", folder):
            disk.make_folder(folder)
            folder.chmod(0o700)
            with contextlib.suppress(FileExistsError):
                disk.create_file(self._secret_file, secrets.token_bytes(32))
        return self._secret_file.read_bytes()

    # --- what has expired ------------------------------------------------------------------------

    async def keep_swept(self) -> None:
        """Removes, again and again, what has expired."""
        while True:
            try:
                found = [one.id async for one in self.models()]
            except HoneError as error:  # Redis is away; a later sweep may do better
                get_logger().warning("expired weights not removed", reason=str(error))
                found = []
            for job_id in found:
                await self.sweep(job_id)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self, job_id: str) -> None:
        """Removes what has expired of a model, but for what a job needs."""
        try:
            run = Path((await self._store.get(job_id)).run_dir)
            for saved in await asyncio.to_thread(Saved(run).expired):
                with contextlib.suppress(Conflict):
                    await self._remove(run, saved)
        except (HoneError, OSError) as error:  # a later sweep may do better
            get_logger().warning("expired weights not removed", job=job_id, reason=str(error))


IS_FILE = re.compile(r"/api/v1/files/[0-9a-f]{64}/[0-9]{1,12}/[\w-]+/[0-9]{1,9}/.+")


def is_public(path: str) -> bool:
    """Returns whether the path has a signature in place of a key."""
    return IS_FILE.fullmatch(path) is not None


def _signed(secret: bytes, job: str, number: int, name: str, expires: int) -> str:
    text = f"{job}\n{number}\n{name}\n{expires}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _checkpoint(model_id: str, saved: SavedWeights) -> dict[str, Any]:
    part = PARTS[saved.kind]
    return {
        "checkpoint_id": f"{part}/{saved.name}",
        "checkpoint_type": KINDS[part][1],
        "time": _iso(saved.made_at),
        "tinker_path": path_to(model_id, saved.kind, saved.name),
        "size_bytes": saved.size_bytes,
        "public": False,
        "expires_at": None if saved.expires_at is None else _iso(saved.expires_at),
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
