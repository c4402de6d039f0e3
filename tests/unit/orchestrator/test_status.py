"""What a follower is told that an attempt is at, the time that is left, who waits for whom in a
sentence, where a step's seconds go, what the main loop leaves when it is stopped, and what a job's
events say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest

from services.orchestrator.grpo.batches import SampledBatch, Stages
from services.orchestrator.grpo.metrics import StepClock
from services.orchestrator.grpo.pipeline import Pipeline, Step, Stopwatch, gap_s
from services.orchestrator.samplers.status import AttemptStatus, watch
from services.orchestrator.store.leases import Journal
from shared.errors import Failed
from shared.http.connecting import Absence, Presence, no_notify
from shared.wire import MetricsRow, TrainerState
from tests.support.scored_batches import make_job


def client() -> Presence:
    return Presence("rollout", no_notify)


def test_the_line_has_stage_waits_details_who_is_unreachable_and_what_is_next() -> None:
    now = 100.0
    status = AttemptStatus(lambda: now)
    assert status.line() == "beginning"
    status.begin("loading the model", "step 1")
    with status.on("rollout", "loading the model"):
        now = 112.0
        with status.on("trainer", "loading the job"):
            now = 115.0
            status.sampler = "reading the weights"
            assert status.line() == (
                "loading the model: rollout: loading the model, 15 s; trainer: loading the job, "
                "3 s; the sampler is reading the weights; then step 1"
            )
    status.begin("step 3 of 9")
    with status.on("rollout", "sampling a group"), status.on("rollout", "sampling a group"):
        at = time.time() - 25
        status.unreachable[client()] = Absence("the rollout service", at, is_told=True)
        line = status.line()
    clock = time.strftime("%H:%M:%S", time.gmtime(at))
    since = f"the rollout service is unreachable since {clock} UTC (25 s)"
    assert line == f"step 3 of 9: rollout: 2 x sampling a group, 0 s; {since}"
    assert status.waits() == since


def test_of_several_samplers_all_are_unreachable_before_their_service_is() -> None:
    status, first, second = AttemptStatus(), client(), client()
    status.serving = lambda: {first, second}
    status.unreachable[first] = Absence("the rollout service", 100.0, is_told=False)
    assert status.waits() is None and status.unreachable_since("the rollout service") is None
    status.unreachable[second] = Absence("the rollout service", 130.0, is_told=False)
    assert status.unreachable_since("the rollout service") == 130
    assert str(status.waits()).startswith("the rollout service is unreachable since 00:02:10 UTC")


def test_what_is_missing_has_been_missing_since_it_was_first_said() -> None:
    status = AttemptStatus()
    status.begin("waiting for what it needs", missing="the reward service does not answer")
    first = status.line()
    assert first.startswith("waiting for what it needs since ") and first.endswith(" UTC (0 s)")
    status.begin("waiting 5 s", "the model is loaded again", "the folder is not mounted")
    clock = first.removeprefix("waiting for what it needs")
    assert status.line() == f"waiting 5 s{clock}; then the model is loaded again"
    assert status.waits() == "the folder is not mounted"
    status.begin("loading the model")
    assert (status.line(), status.waits()) == ("loading the model", None)


def status_at(last: int, num_steps: int, *times: float) -> AttemptStatus:
    clock: Callable[[], float] = iter([0.0, *times]).__next__
    status = AttemptStatus(clock)
    status.begin_steps(last, num_steps)
    return status


def test_the_time_left_is_that_of_a_mean_step_times_the_steps_left() -> None:
    status = status_at(4, 10, 100.0, 110.0, 116.0)
    assert status.eta_s(5, replayed=False) == 10.0 * 5
    assert status.eta_s(6, replayed=False) == 8.0 * 4


def test_replayed_steps_are_no_measure() -> None:
    status = status_at(0, 5, 0.0, 1.0, 2.0, 12.0, 22.0)
    assert status.eta_s(1, replayed=True) is None and status.eta_s(2, replayed=True) is None
    assert status.eta_s(3, replayed=False) == 10.0 * 2
    assert status.eta_s(4, replayed=False) == 10.0 * 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_sentence_names_who_is_waited_for_and_what_each_did_last() -> None:
    clock = Clock()
    waits = AttemptStatus(clock)
    with waits.on("trainer", "training a step"):
        clock.now += 5
    clock.now += 60
    with contextlib.ExitStack() as under_way:
        under_way.enter_context(waits.on("rollout", "sampling a group"))
        clock.now += 10
        with waits.on("reward", "grading a group"):
            pass
        for _ in range(2):
            under_way.enter_context(waits.on("rollout", "sampling a group"))
        clock.now += 240
        assert waits.sentence({"http://a:1": 24, "http://b:1": 0}) == (
            "no progress for 240 s: it waits for rollout (http://a:1 has 24 completions): "
            "3 x sampling a group, the oldest for 250 s; last answered: "
            "trainer training a step 310 s ago, reward grading a group 240 s ago"
        )
    assert waits.is_idle


def test_what_failed_is_no_progress() -> None:
    clock = Clock()
    waits = AttemptStatus(clock)
    clock.now += 7
    with contextlib.suppress(ValueError), waits.on("trainer", "training a step"):
        raise ValueError
    assert (waits.stalled_s(), waits.is_idle) == (7, True)


async def test_a_stall_is_told_once_and_its_end_too() -> None:
    told: list[tuple[str, bool]] = []

    async def tell(message: str, stalls: bool) -> None:
        told.append((message, stalls))

    waits = AttemptStatus()
    watching = asyncio.create_task(watch(waits, 0.05, dict, tell))
    for _ in range(2):
        with waits.on("trainer", "training a step"):
            await asyncio.sleep(0.3)
        await asyncio.sleep(0.03)
    watching.cancel()
    assert [stalls for _, stalls in told] == [True, False, True, False]
    assert told[0][0].startswith("no progress for 0 s: it waits for trainer: 1 x training a step")


async def test_where_nothing_is_under_way_the_work_is_begun_again() -> None:
    tell = AsyncMock(side_effect=AssertionError)
    with pytest.raises(Failed, match="no progress for 0 s: nothing is under way"):
        await asyncio.wait_for(watch(AttemptStatus(), 0.05, dict, tell), 5)


async def test_a_stall_that_was_told_and_whose_call_failed_begins_the_work_again() -> None:
    told = asyncio.Event()
    tell = AsyncMock(side_effect=lambda *_: told.set())
    waits = AttemptStatus()
    watching = asyncio.create_task(watch(waits, 0.05, dict, tell))
    with contextlib.suppress(ValueError), waits.on("rollout", "sampling a group"):
        await told.wait()
        raise ValueError
    with pytest.raises(Failed, match="nothing is under way"):
        await asyncio.wait_for(watching, 60)


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
        return Step(sampled.batch, Mock(), staleness=0, seconds={}, replayed=False)


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


LOADED = TrainerState(
    job_id="j", step=0, num_ranks=1, dtype="float32", device="cpu", num_parameters=1000
)


class Store:
    def __init__(self) -> None:
        self.said: list[str] = []

    async def report(self, _lease: Any, _kind: str, message: str, *_: Any, **__: Any) -> None:
        self.said.append(message)


async def test_a_model_that_cannot_share_prefixes_says_why() -> None:
    store: Any = Store()
    without = "prompts are computed again for each completion, because the model has 'mamba' layers"
    state = LOADED.model_copy(update={"without": without})
    await Journal(store, lease=None).loaded(state, 0)
    assert store.said == [without, "the trainer has 1,000 parameters as float32, 1 rank on cpu"]
    await Journal(store, lease=None).loaded(LOADED, 0)
    assert len(store.said) == 3


async def test_a_resumed_job_says_which_steps_are_trained_again() -> None:
    store: Any = Store()
    for step, furthest in ((0, 3), (2, 3), (3, 3)):
        at = LOADED.model_copy(update={"step": step})
        await Journal(store, lease=None).loaded(at, furthest)
    assert [said.partition("; ")[2] for said in store.said] == [
        "resumed at step 0: steps 1 to 3 are trained again",
        "resumed at step 2: step 3 is trained again",
        "continuing after step 3",
    ]


async def test_the_line_of_a_step_without_an_update_says_so() -> None:
    store: Any = Store()
    flat = {"reward": 0.0, "num_examples": 0.0, "frac_reward_zero_std": 1.0, "learning_rate": 1e-5}
    for step, changes in enumerate(
        ({}, {"num_examples": 8.0}, {"skipped_steps": 1.0}, {"frac_reward_zero_std": 0.5}), 1
    ):
        await Journal(store, lease=None).row(MetricsRow(step=step, metrics=flat | changes), 4)
    assert store.said == [
        "step 1/4: reward 0.000; no weight changed: no group had a signal",
        "step 2/4: reward 0.000",
        "step 3/4: reward 0.000; no weight changed: loss or gradient were not finite",
        "step 4/4: reward 0.000; no weight changed: there was no example to train on",
    ]


async def test_a_held_out_reward_has_pass_at_1_beside_it() -> None:
    store: Any = Store()
    found = {"eval/reward": 0.1, "eval/pass@1": 0.0, "eval/pass@4": 0.5, "eval/hard/reward": 0.25}
    await Journal(store, lease=None).row(MetricsRow(step=0, metrics=found), 4)
    await Journal(store, lease=None).evaluated("m/m", "", {"reward": 0.5, "pass@1": 0.25})
    assert store.said == [
        "step 0: held-out reward 0.100, 0.250 (hard); pass@1 0.000",
        "m/m: held-out reward 0.500; pass@1 0.250",
    ]
