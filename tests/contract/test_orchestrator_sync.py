"""Weights that arrive on paper only: each fault of a sync is caught, by name, and pushed again."""

from __future__ import annotations

from typing import Any

import pytest

from services.orchestrator.loop import canary
from shared.job import Job
from shared.packed import Logprobs, TokenIds
from shared.wire import Canary, ServingWeights
from tests.contract.test_orchestrator_faults import warnings
from tests.support import orchestrator_stack
from tests.support.fake_services import logprobs_of
from tests.support.orchestrator_stack import Stack

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

OURS = Canary(token_ids=TokenIds((1, 2, 3)), logprobs=Logprobs((-1.0, -2.0)))


def serving(*logprobs: float, dtype: str = "float32") -> ServingWeights:
    return ServingWeights(canary_logprobs=Logprobs(logprobs), dtype=dtype)


def test_the_difference_is_the_mean_over_the_canary() -> None:
    assert canary.difference(OURS, serving(-1.1, -2.3)) == pytest.approx(0.2)
    assert canary.difference(OURS, serving(-1.0)) == float("inf")
    assert canary.difference(OURS, serving(float("nan"), -2.0)) == float("inf")


@pytest.mark.parametrize(
    ("dtype", "gap", "agrees"),
    [
        ("float32", 0.0009, True),
        ("float32", 0.0011, False),
        ("bfloat16", 0.049, True),
        ("bfloat16", 0.051, False),
    ],
)
def test_the_tolerance_is_that_of_the_looser_dtype(dtype: str, gap: float, agrees: bool) -> None:
    found = canary.fault(OURS, serving(-1.0 - gap, -2.0 - gap, dtype=dtype))
    assert (found is None) == agrees


def lying(stack: Stack, times: int, **changes: Any) -> None:
    """Makes the sampler answer `changes` for version 3, that many times."""
    left = [None] * times

    def lie(answer: ServingWeights) -> ServingWeights:
        if answer.version != 3 or not left:
            return answer
        left.pop()
        return answer.model_copy(update=changes)

    stack.fakes.change["reload"] = lie


async def finished(stack: Stack, job: Job) -> str:
    record = await stack.until((await stack.submit(job)).id)
    assert (record.status, record.recoveries) == ("succeeded", 0)
    return record.id


async def test_a_load_that_did_nothing_is_caught_and_pushed_again_as_such(
    stack: Stack, job: Job
) -> None:
    lying(stack, 1, canary_logprobs=logprobs_of(2))  # the label and digest of 3, the weights of 2
    job_id = await finished(stack, job)
    assert [(ref.version, ref.again) for ref in stack.fakes.reloads][2:6] == [
        (2, False),
        (3, False),
        (3, True),
        (4, False),
    ]
    (warning,) = await warnings(stack, job_id)
    assert warning == (
        "weight sync: the sampler does not compute with version 3: the log-probs of the canary "
        "differ by 0.05 nats on average, expected at most 0.001 in float32 (1 of 2 tensors of "
        "the engine are not those published, the first is 'norm'); the weights are pushed again"
    )


async def test_what_the_disk_did_not_bring_a_new_engine_does(stack: Stack, job: Job) -> None:
    lying(stack, 1, canary_logprobs=logprobs_of(2))
    await finished(stack, job.model_copy(update={"weight_sync": "disk"}))
    assert [ref.method for ref in stack.fakes.reloads if ref.version == 3] == ["disk", "restart"]


async def test_a_paused_sampler_is_told_apart_from_a_wrong_one(stack: Stack, job: Job) -> None:
    lying(stack, 1, canary_logprobs=Logprobs())
    (warning,) = await warnings(stack, await finished(stack, job))
    assert warning.startswith("the sampler gave no log-probs for version 3")
