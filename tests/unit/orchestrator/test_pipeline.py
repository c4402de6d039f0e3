"""What the main loop leaves when it is stopped."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock, Mock

from services.orchestrator.grpo.batches import SampledBatch
from services.orchestrator.grpo.pipeline import Pipeline, Step, Stopwatch
from tests.support.scored_batches import make_job


class Untrained(Pipeline):
    async def _train(self, sampled: SampledBatch, watch: Stopwatch) -> Step:
        return Step(sampled.batch, [], Mock(), staleness=0, seconds={}, replayed=False)


async def test_the_traces_of_steps_that_were_sampled_ahead_are_ended() -> None:
    sampled = [
        Mock(spec=SampledBatch, span=None, trace=MagicMock(), batch=Mock()) for _ in range(3)
    ]

    async def get(step: int) -> SampledBatch:
        return sampled[step - 1]

    job = make_job().model_copy(update={"steps": 3, "max_staleness": 1})
    pipeline = Untrained(job, Mock(get=get), Mock(), Mock(), Mock())
    steps = pipeline.steps(0)
    await anext(steps)
    await asyncio.sleep(0)
    await steps.aclose()
    assert [each.trace.end.called for each in sampled] == [False, True, False]
