"""Operations of models: each is on disk before the id of its future is given out. And futures:
what operations and samples gave."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse, Response

from services.orchestrator.programs.log import OperationLog
from services.orchestrator.programs.sampling import Runs
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import to_disk
from services.orchestrator.tinker import requests, results
from services.orchestrator.tinker.managing import path_to, read_ttl
from services.orchestrator.tinker.models import Models, is_put_away
from services.orchestrator.tinker.sampling_sessions import SESSION
from shared.errors import BadRequest, Conflict, NotFound
from shared.wire import TERMINAL, JobRecord, OperationOutcome, ProgramOperation, SavedKind

POLL_S = 0.05

WAIT_S = 20.0
"""Seconds that a question for a future's result waits for it; the SDK gives it 45."""

PROTOBUF = "application/x-protobuf"

SAMPLE = re.compile(rf"({SESSION.pattern})--?[0-9]{{1,20}}")
"""Id of an order of samples: its session, and its number there."""

NUMBER = re.compile(r"[0-9]{1,9}")
"""An operation's number in the id of its future."""

MAX_AHEAD = 1000
"""How far a number may be beyond the newest: the SDK sends a few at a time, in any order."""

NAME = re.compile(r"[\w.-]{1,100}")
"""Name of a checkpoint or snapshot."""

SAVED: dict[SavedKind, str] = {
    "checkpoint": "save_weights",
    "snapshot": "save_weights_for_sampler",
    "export": "save_weights_external",
}
"""The operations that save something, as the SDK calls them."""

Read = Callable[[], ProgramOperation]


class Operations:
    """Operations of the models, and the futures of all that was accepted."""

    def __init__(self, store: Store, models: Models, runs: Runs) -> None:
        self._store = store
        self._models = models
        self._runs = runs

    async def forward_backward(self, message: Any, digest: str) -> dict[str, Any]:
        def read() -> ProgramOperation:
            return requests.read_forward_backward(message, digest)

        return await self._accept(message.model_id, message.seq_id, digest, read)

    async def optim_step(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        return await self._numbered(body, digest, lambda: requests.read_optim_step(body, digest))

    async def save(self, body: dict[str, Any], digest: str, kind: SavedKind) -> dict[str, Any]:
        def read() -> ProgramOperation:
            is_unnamed = kind == "snapshot" and body.get("path") is None
            name = "" if is_unnamed else _name(body.get("path"))
            return ProgramOperation(kind=kind, digest=digest, name=name, ttl_s=read_ttl(body))

        return await self._numbered(body, digest, read)

    async def load(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
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
        record = await self._models.get(requests.id_of(body, "model_id"))
        log = OperationLog(Path(record.run_dir))
        number = await asyncio.to_thread(log.newest) + 1
        operation = ProgramOperation(kind="unload", digest=digest)
        return await self._accept(record.id, number, digest, lambda: operation)

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
        return {"request_id": f"{record.id}:{number}", "model_id": record.id}

    # --- futures ---------------------------------------------------------------------------------

    async def retrieve(self, body: dict[str, Any]) -> Response:
        """Returns the result of a future, or 408 while there is none."""
        id = requests.id_of(body, "request_id")
        model_id, _, rest = id.partition(":")
        record = await self._models.get(model_id)
        log, end = OperationLog(Path(record.run_dir)), time.monotonic() + WAIT_S
        while True:
            found = await self._result(record, log, rest)
            if found is not None:
                return found
            if time.monotonic() > end:
                return JSONResponse(
                    {"type": "try_again", "request_id": id, "queue_state": "active"}, 408
                )
            await asyncio.sleep(POLL_S)
            record = await self._models.get(model_id)

    async def _result(self, record: JobRecord, log: OperationLog, rest: str) -> Response | None:
        if rest == "0":
            kind = "load_weights" if record.job.training.start_from else "create_model"
            return JSONResponse({"type": kind, "model_id": record.id})
        kind, _, id = rest.rpartition(":")
        found: Response | None = None
        if kind == "sample" and SAMPLE.fullmatch(id):
            found = await self._samples(record, log, id)
        elif NUMBER.fullmatch(rest):
            found = await asyncio.to_thread(_outcome, record.id, log, int(rest))
        else:
            raise NotFound(f"there is no request {record.id}:{rest}")
        if found is None and is_put_away(record):
            await self._store.resume(record.id)
        elif found is None and record.status in (*TERMINAL, "paused"):
            why = f"the model {record.id!r} is {record.status}: {record.error or 'it has ended'}"
            return _failed(why, user=False)
        return found

    async def _samples(self, record: JobRecord, log: OperationLog, id: str) -> Response | None:
        order = await asyncio.to_thread(log.ordered, id)
        if order is None:
            raise NotFound(f"the model {record.id!r} has no samples {id!r}")
        samples = await asyncio.to_thread(log.samples, id)
        if samples is None:
            self._runs.carry_out(record.id, id, log)
            return None
        if samples.group is None or samples.error:
            return _failed(samples.error or "there are no samples", user=True)
        return Response(results.sample_response(order, samples.group), media_type=PROTOBUF)


def _check_near(log: OperationLog, number: int) -> None:
    """Raises BadRequest for a number far beyond all that have come."""
    if log.operation(number - 1) is None and number > (newest := log.newest()) + MAX_AHEAD:
        raise BadRequest(
            f"'seq_id': got {number}, and the model's newest operation is {newest}; expected at "
            f"most {newest + MAX_AHEAD}"
        )


def _name(path: Any) -> str:
    if not isinstance(path, str) or not NAME.fullmatch(path) or not path.strip("."):
        raise BadRequest(
            f"'path': got {path!r:.120}; expected a name of letters, digits, '.', '_' and '-', of "
            "at most 100 characters"
        )
    return path


def _outcome(model_id: str, log: OperationLog, number: int) -> Response | None:
    operation, outcome = log.operation(number), log.outcome(number)
    if operation is None:
        raise NotFound(f"the model {model_id!r} has no operation {number}, or not any more")
    if outcome is None:
        return None
    if outcome.error is not None:
        return _failed(outcome.error, user=True)
    if operation.kind in ("forward", "forward_backward"):
        found = results.forward_backward_output(operation, outcome)
        return Response(found, media_type=PROTOBUF)
    return JSONResponse(_told(model_id, number, operation, outcome))


def _told(
    model_id: str, number: int, operation: ProgramOperation, outcome: OperationOutcome
) -> dict[str, Any]:
    if operation.kind == "optim_step":
        return {"type": "optim_step", "metrics": {"grad_norm:mean": outcome.grad_norm}}
    if operation.saves and operation.name:
        path = path_to(model_id, operation.saves, operation.name)
        return {"type": SAVED[operation.saves], "path": path}
    if operation.kind == "unload":
        return {"type": "unload_model", "model_id": model_id}
    session = f"{model_id}:{number}"
    return {"type": "save_weights_for_sampler", "sampling_session_id": session}


def _failed(error: str, *, user: bool) -> Response:
    return JSONResponse({"error": error, "category": "user" if user else "server"})
