"""Futures: what operations and samples gave, once they are done."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse, Response

from services.orchestrator.extensions.tinker import requests, results
from services.orchestrator.extensions.tinker.log import OperationLog
from services.orchestrator.extensions.tinker.models import Models, is_put_away
from services.orchestrator.extensions.tinker.paths import NUMBER, SAMPLE
from services.orchestrator.extensions.tinker.sampling import SampleOrders
from services.orchestrator.store.store import Store
from services.orchestrator.store.worker_side import PAUSED_ON_REQUEST
from shared.errors import NotFound
from shared.wire import TERMINAL, JobRecord

POLL_S = 0.05
"""Seconds between two looks for a result."""

WAIT_S = 20.0
"""Seconds that a question for a future's result waits for it; the SDK gives it 45."""

PROTOBUF = "application/x-protobuf"


class Futures:
    """The futures of all that was accepted of the models."""

    def __init__(self, store: Store, models: Models, orders: SampleOrders) -> None:
        self._store = store
        self._models = models
        self._orders = orders

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
                state = {"type": "try_again", "request_id": id, **_queue_state(record)}
                return JSONResponse(state, 408)
            await asyncio.sleep(POLL_S)
            record = await self._models.get(model_id)

    async def _result(self, record: JobRecord, log: OperationLog, rest: str) -> Response | None:
        if rest == "0":
            kind = "load_weights" if record.job.training.start_from else "create_model"
            return JSONResponse({"type": kind, "model_id": record.id})
        found: Response | None = None
        if order := SAMPLE.fullmatch(rest):
            found = await self._sample_result(record, log, order[1])
        elif NUMBER.fullmatch(rest):
            found = await asyncio.to_thread(_operation_result, record.id, log, int(rest))
        else:
            raise NotFound(f"there is no request {record.id}:{rest}")
        if found is None and is_put_away(record):
            await self._store.resume(record.id)
        elif found is None and _is_over(record):
            why = f"the model {record.id!r} is {record.status}: {record.error or 'it has ended'}"
            return _failed(why, user=False)
        return found

    async def _sample_result(
        self, record: JobRecord, log: OperationLog, id: str
    ) -> Response | None:
        order = await asyncio.to_thread(log.ordered, id)
        if order is None:
            raise NotFound(f"the model {record.id!r} has no samples {id!r}")
        samples = await asyncio.to_thread(log.samples, id)
        if samples is None:
            self._orders.carry_out(record.id, id, log)
            return None
        if samples.group is None or samples.error:
            return _failed(samples.error or "there are no samples", user=True)
        return Response(results.sample_response(order, samples.group), media_type=PROTOBUF)


def _is_over(record: JobRecord) -> bool:
    """Whether the model has ended, or is paused for an error that someone has to fix."""
    if record.status == "paused":
        return record.error != PAUSED_ON_REQUEST and not is_put_away(record)
    return record.status in TERMINAL


def _queue_state(record: JobRecord) -> dict[str, Any]:
    """Returns what the SDK logs of a model that waits for long."""
    if record.status == "running":
        return {"queue_state": "active"}
    if record.status == "paused" and not is_put_away(record):
        reason = f"someone paused it; `hone resume {record.id}` continues"
    else:
        reason = "it waits for a place on the trainer"
    return {"queue_state": "paused_capacity", "queue_state_reason": reason}


def _operation_result(model_id: str, log: OperationLog, number: int) -> Response | None:
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
    return JSONResponse(results.json_result(model_id, number, operation, outcome))


def _failed(error: str, *, user: bool) -> Response:
    return JSONResponse({"error": error, "category": "user" if user else "server"})
