"""Operations of models: each is on disk before the id of its future is given out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.orchestrator.extensions.tinker import requests
from services.orchestrator.extensions.tinker.log import OperationLog
from services.orchestrator.extensions.tinker.models import Models, is_put_away
from services.orchestrator.extensions.tinker.paths import future_of, read_name
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import to_disk
from shared.errors import BadRequest, Conflict
from shared.wire import TERMINAL, ProgramOperation, SavedKind

MAX_AHEAD = 1000
"""How far a number may be beyond the newest: the SDK sends a few at a time, in any order."""

Read = Callable[[], ProgramOperation]


class Operations:
    """Operations of the models."""

    def __init__(self, store: Store, models: Models) -> None:
        self._store = store
        self._models = models

    async def forward_backward(self, message: Any, digest: str) -> dict[str, Any]:
        """Accepts a call, and returns the id of its future. Raises BadRequest."""

        def read() -> ProgramOperation:
            return requests.read_forward_backward(message, digest)

        return await self._accept(message.model_id, message.seq_id, digest, read)

    async def optim_step(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        """Accepts an optimizer step, and returns the id of its future. Raises BadRequest."""
        return await self._numbered(body, digest, lambda: requests.read_optim_step(body, digest))

    async def save(self, body: dict[str, Any], digest: str, kind: SavedKind) -> dict[str, Any]:
        """Accepts that something is saved, and returns the id of its future. Raises BadRequest."""

        def read() -> ProgramOperation:
            is_unnamed = kind == "snapshot" and body.get("path") is None
            name = "" if is_unnamed else read_name(body.get("path"))
            return ProgramOperation(
                kind=kind, digest=digest, name=name, ttl_s=requests.read_ttl(body)
            )

        return await self._numbered(body, digest, read)

    async def refuse_load(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        """Refuses a checkpoint for a model that exists. Raises BadRequest."""

        def refuse() -> ProgramOperation:
            raise BadRequest(
                f"{body.get('path')!r:.200} cannot be loaded into an existing model; expected "
                "a new model: create_training_client_from_state, or ..._with_optimizer"
            )

        if body.get("model_id") is None:
            refuse()
        return await self._numbered(body, digest, refuse)

    async def unload(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        """Accepts the model's end, after all that has come, and returns the id of its future. Again
        it is the same end."""
        record = await self._models.get(requests.id_of(body, "model_id"))
        log = OperationLog(Path(record.run_dir))
        operation = ProgramOperation(kind="unload", digest=digest)
        while True:
            if (end := await asyncio.to_thread(log.end)) is not None:
                return {"request_id": future_of(record.id, end), "model_id": record.id}
            newest = await asyncio.to_thread(log.newest)
            try:
                return await self._accept(record.id, newest + 1, digest, lambda: operation)
            except Conflict as error:
                if error.code != "body_differs":  # else another operation has come meanwhile
                    raise

    async def _numbered(self, body: dict[str, Any], digest: str, read: Read) -> dict[str, Any]:
        model_id = requests.id_of(body, "model_id")
        return await self._accept(model_id, body.get("seq_id"), digest, read)

    async def _accept(self, model_id: str, number: Any, digest: str, read: Read) -> dict[str, Any]:
        """Accepts the operation. If it cannot be read, its number is done with, and those after it
        need not wait for it."""
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise BadRequest(f"'seq_id': got {number!r:.40}; expected a whole number from 1 on")
        record = await self._models.get(model_id)
        if record.status in TERMINAL:
            raise Conflict(f"the model {model_id!r} is {record.status}; expected one that runs")
        log = OperationLog(Path(record.run_dir))
        await asyncio.to_thread(_check_near, log, number)
        try:
            operation = await asyncio.to_thread(read)
        except BadRequest as error:
            await to_disk(log.refuse, number, digest, error.detail)
            raise
        await to_disk(log.accept, number, operation)
        if is_put_away(record):
            await self._store.resume(record.id)
        return {"request_id": future_of(record.id, number), "model_id": record.id}


def _check_near(log: OperationLog, number: int) -> None:
    """Raises BadRequest for a number far beyond all that have come."""
    if log.operation(number - 1) is None and number > (newest := log.newest()) + MAX_AHEAD:
        raise BadRequest(
            f"'seq_id': got {number}, and the model's newest operation is {newest}; expected at "
            f"most {newest + MAX_AHEAD}"
        )
