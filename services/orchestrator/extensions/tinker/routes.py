"""`/api/v1`: the routes of the `tinker` SDK. An operation is answered with the id of its future as
soon as it is on disk; `/retrieve_future` returns the result, and 408 until there is one. Bodies are
unpacked and read in a thread, one at a time for each API key: 2 KB may unpack to `MAX_CALL_BYTES`.
Training runs and their saved weights are listed, deleted, and downloaded by signed URLs that need
no key until they expire."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import zstandard
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from services.orchestrator.extensions.tinker import requests
from services.orchestrator.extensions.tinker.driving import SampleOrders
from services.orchestrator.extensions.tinker.log import (
    KINDS,
    PARTS,
    ROOT,
    OperationLog,
    PendingQuota,
    SavedFolder,
    path_to,
)
from services.orchestrator.extensions.tinker.messages import SAVED
from services.orchestrator.extensions.tinker.models import (
    Futures,
    Models,
    Operations,
    SamplingSessions,
    Scope,
    models_of,
)
from services.orchestrator.extensions.tinker.requests import MODEL, adapter_of, read_ttl
from services.orchestrator.extensions.tinker.sessions import (
    CHECKPOINT,
    Limit,
    Offset,
    add_route,
    add_session_routes,
)
from services.orchestrator.jobs.preflight import Submissions
from services.orchestrator.store.run_folders import files_of, path_of
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import write_despite_cancel
from services.orchestrator.writable import kept_secret
from shared.errors import BadRequest, Conflict, HoneError, NotFound, Unauthorized
from shared.host.logs import get_logger
from shared.http import codec
from shared.http.gate import caller
from shared.http.operations import DownloadedFile
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import JobRecord, SavedWeights

Answer = Callable[[dict[str, Any], str], Awaitable[Any]]
"""Returns the answer to a body of JSON and its digest."""


def add_routes(
    service: Service,
    settings: Settings,
    store: Store,
    submissions: Submissions,
    orders: SampleOrders,
) -> None:
    bodies = Bodies()
    models = Models(store, submissions)
    quota = PendingQuota()
    sessions = SamplingSessions(store, models, orders, quota)
    futures = Futures(store, models, orders)
    add_session_routes(service, store, bodies.json)
    _add_posts(service, bodies, models, sessions, Operations(store, models, quota), futures)
    management, downloads = Management(store, models, bodies), Downloads(store, models, settings)
    for method, path, route in (
        ("GET", "get_server_capabilities", models.capabilities),
        ("GET", "samplers/{id}", sessions.get),
        ("GET", "training_runs", management.training_runs),
        ("GET", "training_runs/{id}", management.training_run),
        ("GET", "training_runs/{id}/checkpoints", management.checkpoints),
        ("GET", "checkpoints", management.all_checkpoints),
        ("PUT", f"{CHECKPOINT}/ttl", management.expire),
        ("DELETE", CHECKPOINT, management.delete),
        ("GET", f"{CHECKPOINT}/external_weights_urls", downloads.urls),
        ("GET", "files/{signature}/{expires}/{job}/{number}/{name:path}", downloads.file),
    ):
        add_route(service, method, path, route)


def _add_posts(
    service: Service,
    bodies: Bodies,
    models: Models,
    sessions: SamplingSessions,
    operations: Operations,
    futures: Futures,
) -> None:
    async def forward_backward(request: Request) -> dict[str, Any]:
        return await operations.forward_backward(*await bodies.message(request))

    def add(path: str, answer: Answer, max_bytes: int = MAX_JSON_BYTES) -> None:
        async def route(request: Request) -> Response:
            found = await answer(*await bodies.json(request, max_bytes))
            return found if isinstance(found, Response) else JSONResponse(found)

        add_route(service, "POST", path, route)

    async def load(body: dict[str, Any], digest: str) -> dict[str, Any]:
        is_new = body.get("session_id") is not None
        return await (models.load(body) if is_new else operations.refuse_load(body, digest))

    for path in ("forward_backward", "forward"):
        add_route(service, "POST", path, forward_backward)
    add("create_model", lambda body, _: models.create(body))
    add("load_weights", load)
    add("get_info", lambda body, _: models.info(body))
    add("weights_info", lambda body, _: models.weights_info(body))
    add("optim_step", operations.optim_step)
    for kind, path in SAVED.items():
        add(path, functools.partial(operations.save, kind=kind))
    add("unload_model", operations.unload)
    add("create_sampling_session", lambda body, _: sessions.create(body))
    add("asample", lambda body, _: sessions.order(body), MAX_SAMPLE_BYTES)
    add("retrieve_future", lambda body, _: futures.retrieve(body))


MAX_CALL_BYTES = 64 << 20
"""Most bytes of a `forward_backward`, unpacked: the SDK sends 5 MB at a time."""

MAX_SAMPLE_BYTES = 8 << 20
"""Most bytes of a request for samples: a prompt of a million tokens."""

MAX_JSON_BYTES = 256 << 10
"""Most bytes of any other body."""


class Bodies:
    """Reads the bodies of requests."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by API key

    async def message(self, request: Request) -> tuple[Any, str]:
        """Returns the message of a `forward_backward` or `forward`, and the digest of its unpacked
        body. Raises BadRequest."""
        packed, encoding = await request.body(), request.headers.get("content-encoding")

        def read() -> tuple[Any, str]:
            body = _unpacked(packed, encoding)
            return requests.read_message(body), requests.digest_of(body)

        async with self._lock():
            return await asyncio.to_thread(read)

    async def json(
        self, request: Request, max_bytes: int = MAX_JSON_BYTES
    ) -> tuple[dict[str, Any], str]:
        """Returns the object of a body of JSON, and the body's digest. Raises BadRequest."""
        if encoding := request.headers.get("content-encoding"):
            raise BadRequest(f"Content-Encoding is {encoding!r:.40}; expected none for JSON")
        body = await request.body()
        _check_length(body, max_bytes)

        def read() -> tuple[dict[str, Any], str]:
            return _json(body), requests.digest_of(body)

        async with self._lock():
            return await asyncio.to_thread(read)

    def _lock(self) -> asyncio.Lock:
        key = caller.get()
        return self._locks.setdefault(key.name if key else "", asyncio.Lock())


def _unpacked(body: bytes, encoding: str | None) -> bytes:
    if encoding == "zstd":
        try:
            body = zstandard.ZstdDecompressor().stream_reader(body).read(MAX_CALL_BYTES + 1)
        except zstandard.ZstdError as error:
            raise BadRequest(f"the body is no zstd: {error}") from error
    elif encoding:
        raise BadRequest(f"Content-Encoding is {encoding!r:.40}; expected 'zstd', or none")
    _check_length(body, MAX_CALL_BYTES)
    return body


def _check_length(body: bytes, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise BadRequest(f"the body has more than {max_bytes} bytes; expected at most {max_bytes}")


def _json(body: bytes) -> dict[str, Any]:
    try:
        given = codec.read_json(body or b"{}")
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error!s:.200}") from error
    if not isinstance(given, dict):
        raise BadRequest(f"the body is {given!r:.80}; expected a JSON object")
    return given


EXPIRY_S = 600.0
"""Seconds between two removals of expired weights."""


@dataclass
class Management:
    """Lists, changes and removes the saved weights of the models of a store."""

    store: Store
    models: Models
    bodies: Bodies

    async def training_runs(
        self, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "accessible"
    ) -> dict[str, Any]:
        """Returns a page of the models that the caller may see, newest first."""
        found = [one async for one in models_of(self.store, access_scope)]
        records = [await self.store.get(one.id) for one in found[offset : offset + limit]]
        runs = [await _training_run(record) for record in records]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"training_runs": runs, "cursor": cursor}

    async def training_run(self, id: str, access_scope: Scope = "accessible") -> dict[str, Any]:
        """Returns a model. Raises NotFound for any other id."""
        return await _training_run(await self.models.get(id, access_scope))

    async def checkpoints(self, id: str) -> dict[str, Any]:
        """Returns the weights that the model saved under a name, oldest first."""
        return {"checkpoints": await _checkpoints(await self.models.get(id))}

    async def all_checkpoints(self, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        """Returns the saved weights of all models, newest first."""
        found: list[dict[str, Any]] = []
        async for one in models_of(self.store):
            found += await _checkpoints(await self.store.get(one.id))
        found.sort(key=lambda one: str(one["time"]), reverse=True)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    async def delete(self, id: str, checkpoint: str) -> Response:
        """Removes saved weights. Raises Conflict if a job that has not ended begins with them."""
        record = await self.models.get(id)
        saved = await asyncio.to_thread(find_saved, record, checkpoint)
        await _remove(self.store, Path(record.run_dir), saved)
        return Response(status_code=204)

    async def expire(self, id: str, checkpoint: str, request: Request) -> Response:
        """Sets when saved weights expire. A body without a time keeps them."""
        body, _ = await self.bodies.json(request)
        record, ttl_s = await self.models.get(id), read_ttl(body)
        one = await asyncio.to_thread(find_saved, record, checkpoint)
        expires_at = None if ttl_s is None else time.time() + ttl_s
        await write_despite_cancel(
            SavedFolder(Path(record.run_dir)).change,
            one.model_copy(update={"expires_at": expires_at}),
        )
        return Response(status_code=204)


async def _training_run(record: JobRecord) -> dict[str, Any]:
    listed = await _checkpoints(record)

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


async def _checkpoints(record: JobRecord) -> list[dict[str, Any]]:
    """Returns the weights that the model saved under a name, oldest first."""
    saved = await asyncio.to_thread(SavedFolder(Path(record.run_dir)).all)
    return [_checkpoint(record.id, one) for one in saved if one.name]


async def _remove(store: Store, run: Path, saved: SavedWeights) -> None:
    """Raises Conflict if a job that has not ended begins with the checkpoint."""
    if saved.path:
        for use in await store.models_below(Path(saved.path)):
            raise Conflict(
                f"{saved.name!r} is used by job {use.job_id!r}, which is {use.status}; cancel "
                "that job, or wait for its end"
            )
    await write_despite_cancel(SavedFolder(run).remove, saved)


async def remove_expired_forever(store: Store) -> None:
    """Removes expired weights periodically."""
    while True:
        try:
            found = [one.id async for one in models_of(store)]
        except HoneError as error:  # Redis is unreachable; the next removal tries again
            get_logger().warning("expired weights not removed", reason=str(error))
            found = []
        for job_id in found:
            await remove_expired(store, job_id)
        await asyncio.sleep(EXPIRY_S)


async def remove_expired(store: Store, job_id: str) -> None:
    """Removes a model's expired weights, except weights that a job needs."""
    try:
        run = Path((await store.get(job_id)).run_dir)
        for saved in await asyncio.to_thread(SavedFolder(run).expired):
            with contextlib.suppress(Conflict):
                await _remove(store, run, saved)
    except (HoneError, OSError) as error:  # the next removal tries again
        get_logger().warning("expired weights not removed", job=job_id, reason=str(error))


def find_saved(record: JobRecord, id: str) -> SavedWeights:
    """Returns the weights that the model saved under Tinker's id, for example `weights/NAME`.
    Raises NotFound."""
    part, _, name = id.partition("/")
    found = part in KINDS and SavedFolder(Path(record.run_dir)).find(KINDS[part][0], name)
    if not found:
        raise NotFound(f"the model {record.id!r} has no {id!r:.200}, or no longer has it")
    return found


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


FILES = f"{ROOT}/files"

IS_FILE = re.compile(rf"{FILES}/[0-9a-f]{{64}}/[0-9]{{1,12}}/[\w-]+/[0-9]{{1,9}}/.+")

URL_S = 3600.0
"""Seconds for which the signed URL of an export's file is valid."""


def is_public(path: str) -> bool:
    """Returns whether the path has a signature in place of a key."""
    return IS_FILE.fullmatch(path) is not None


class Downloads:
    """The files of exports. Orchestrators with one folder of runs share the secret that signs their
    URLs."""

    def __init__(self, store: Store, models: Models, settings: Settings) -> None:
        self._store, self._models = store, models
        self._secret_file = settings.runs_dir / ".keys" / "addresses.secret"

    async def urls(self, id: str, checkpoint: str, request: Request) -> dict[str, Any]:
        """Returns a signed URL for each file of an export."""
        record = await self._models.get(id)
        one = await asyncio.to_thread(find_saved, record, checkpoint)
        expires = int(time.time() + URL_S)
        files = await asyncio.to_thread(files_of, Path(one.path))
        secret = await write_despite_cancel(kept_secret, self._secret_file)
        urls: dict[str, str] = {}
        for file in files:
            signature = _signed(secret, record.id, one.number, file.name, expires)
            rest = f"{signature}/{expires}/{record.id}/{one.number}/{file.name}"
            urls[file.name] = f"{str(request.base_url).rstrip('/')}{FILES}/{rest}"
        return {"urls": urls, "expires": iso(expires)}

    async def file(
        self, signature: str, expires: int, job: str, number: int, name: str
    ) -> Response:
        """Returns the file of a URL from `urls`. Raises Unauthorized for any other URL."""
        secret = await write_despite_cancel(kept_secret, self._secret_file)
        wanted = _signed(secret, job, number, name, expires)
        if not hmac.compare_digest(wanted.encode(), signature.encode()) or expires < time.time():
            raise Unauthorized("the URL does not name an export's file, or has expired")
        run_dir = Path((await self._store.get(job)).run_dir)
        found = {one.number: one for one in await asyncio.to_thread(SavedFolder(run_dir).all)}
        if number not in found:
            raise NotFound(f"the export {number} of the model {job!r} no longer exists")
        path = await asyncio.to_thread(path_of, Path(found[number].path), name)
        return DownloadedFile(path, path.name)


def _signed(secret: bytes, job: str, number: int, name: str, expires: int) -> str:
    text = f"{job}\n{number}\n{name}\n{expires}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
