"""An evaluation at the orchestrator: one call that lasts until its end, and beside it polls of its
state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shared.errors import NotFound, Unavailable
from shared.http.client import Client
from shared.wire import EvaluationEnded, EvaluationReport, EvaluationRequest, EvaluationState

DEADLINE_S = 24 * 3600.0
END_DEADLINE_S = 10.0
PROGRESS_S = 1.0


async def evaluate(
    client: Client, body: EvaluationRequest, progress: Callable[[EvaluationState], None]
) -> EvaluationReport:
    """Returns the report; `progress` is called with the state every `PROGRESS_S` seconds."""
    call = client.call("POST", "/v1/evaluations", body, EvaluationReport, deadline_s=DEADLINE_S)
    evaluating = asyncio.create_task(call)
    try:
        while not (await asyncio.wait({evaluating}, timeout=PROGRESS_S))[0]:
            with contextlib.suppress(NotFound, Unavailable):  # not yet begun, or away
                path = f"/v1/evaluations/{body.id}"
                progress(await client.get(path, EvaluationState, deadline_s=PROGRESS_S))
        return evaluating.result()
    finally:
        evaluating.cancel()


async def end(client: Client, id: str) -> EvaluationEnded:
    """Ends a running evaluation. Does not wait for an orchestrator that is away."""
    return await client.call(
        "DELETE",
        f"/v1/evaluations/{id}",
        None,
        EvaluationEnded,
        deadline_s=END_DEADLINE_S,
        patience_s=0,
    )
