"""Where a step's seconds go, by a clock that stands still; and what the main loop leaves when it is
stopped."""

from __future__ import annotations

import asyncio
import contextlib
from unittest.mock import MagicMock, Mock

from services.orchestrator.grpo.batches import SampledBatch, Stages
from services.orchestrator.grpo.metrics import StepClock
from services.orchestrator.grpo.pipeline import Pipeline, Step, Stopwatch, gap_s
from services.orchestrator.samplers.status import AttemptStatus
from tests.support.scored_batches import make_job


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_service_is_busy_while_anything_is_asked_of_it_however_much() -> None:
    clock = Clock()
    waits = AttemptStatus(clock)
    clock.now += 3
    with waits.on("rollout", "sampling a group"):
        clock.now += 2
        with waits.on("rollout", "sampling a group"), waits.on("reward", "grading a group"):
            clock.now += 5
        assert waits.busy_s() == {"rollout": 7.0, "trainer": 0.0, "reward": 5.0}
        clock.now += 1
    clock.now += 10
    with contextlib.suppress(ValueError), waits.on("rollout", "sampling a group"):
        clock.now += 4
        raise ValueError
    assert waits.busy_s() == {"rollout": 12.0, "trainer": 0.0, "reward": 5.0}


def test_steps_follow_each_other_without_a_gap_each_with_its_own_shares() -> None:
    clock = Clock()
    waits = AttemptStatus(clock)
    with waits.on("rollout", "sampling a group"):
        clock.now += 7  # before the first step
        steps = StepClock(waits.busy_s, clock)
        clock.now += 2
    with waits.on("trainer", "training a step"):
        clock.now += 6
    assert steps.end() == {
        "time/step": 8.0,
        "utilization/rollout": 0.25,
        "utilization/trainer": 0.75,
        "utilization/reward": 0.0,
    }
    clock.now += 3
    with waits.on("reward", "grading a group"):
        clock.now += 1
        assert steps.end() == {
            "time/step": 4.0,
            "utilization/rollout": 0.0,
            "utilization/trainer": 0.0,
            "utilization/reward": 0.25,
        }
    clock.now += 50
    steps.begin()
    clock.now += 1
    assert steps.end()["time/step"] == 1.0


def test_the_gap_between_two_spans_is_none_where_they_overlap_or_one_is_missing() -> None:
    assert gap_s((1.0, 4.0), (6.5, 8.0)) == 2.5
    assert gap_s((1.0, 4.0), (3.0, 8.0)) == 0.0
    assert gap_s(None, (3.0, 8.0)) == gap_s((1.0, 4.0), None) == 0.0


def test_a_stage_lasts_until_the_last_part_is_through_it() -> None:
    clock = Clock()
    stages = Stages("generate", "reward", "keep", clock=clock)
    for seconds, stage in (
        (3, "generate"),
        (1, "reward"),
        (1, "keep"),  # of the first group, while another one is sampled
        (5, "generate"),
        (0.5, "reward"),
        (0.25, "keep"),
    ):
        clock.now += seconds
        stages.through(stage)
    assert stages.seconds == {"generate": 10.0, "reward": 0.5, "keep": 0.25}
    assert stages.span == (1000.0, 1010.75)


def test_a_stage_that_no_part_went_through_takes_no_time() -> None:
    clock = Clock()
    stages = Stages("generate", "reward", "keep", clock=clock)
    clock.now += 2
    stages.through("reward")
    assert stages.seconds == {"generate": 0.0, "reward": 2.0, "keep": 0.0}


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
