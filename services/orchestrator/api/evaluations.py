"""Comparing models on held-out problems, without a job."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from services.orchestrator.evals.comparison import Comparison
from services.orchestrator.store.store import Store
from shared.errors import NotFound
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import EvaluationEnded, EvaluationReport, EvaluationRequest, EvaluationState


@dataclass(frozen=True)
class _UnderWay:
    comparison: Comparison
    task: asyncio.Task[Any]


def add_routes(service: Service, settings: Settings, store: Store) -> None:
    under_way: dict[str, _UnderWay] = {}

    async def evaluate(request: EvaluationRequest) -> EvaluationReport:
        """Samples and grades held-out problems with each model in turn, and compares their scores.
        It borrows the samplers: jobs wait until it has ended, and it is refused while a job has
        them."""
        task = asyncio.current_task()
        assert task is not None, "an operation runs in a task"
        comparison = Comparison(request, settings, store)
        under_way[request.id] = _UnderWay(comparison, task)
        try:
            return await comparison.run()
        finally:
            del under_way[request.id]

    service.operation("POST", "/v1/evaluations", evaluate, key=lambda request: request.id)
    app = service.app

    @app.get("/v1/evaluations/{id}")
    async def get_evaluation(id: str) -> EvaluationState:
        """The progress of a running evaluation."""
        if id not in under_way:
            raise NotFound(f"no evaluation {id!r} is under way here")
        return under_way[id].comparison.state

    @app.delete("/v1/evaluations/{id}")
    async def end_evaluation(id: str) -> EvaluationEnded:
        """Ends a running evaluation, so that the samplers are free for jobs."""
        found = under_way.get(id)
        if found:
            found.task.cancel()
            await asyncio.wait({found.task})
        return EvaluationEnded(id=id, ended=found is not None)
