"""What fits onto a GPU that sampler and trainer share, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from services.trainer.zero.memory import GpuNeeds, SharedGpu, check_fits, needs_of
from shared.errors import BadRequest
from shared.job import Job
from shared.plan.memory import GIB, Ranks
from tests.support.engine_ranks import a_job
from tests.support.plan_models import model

MODEL = dataclasses.replace(
    model("Qwen2.5-0.5B"), shapes={"weight": (1000, GIB)}, num_layers=5, kv_heads=1, head_size=GIB
)
"""1000 x 2^30 parameters, and 10 x 2^30 numbers in the cache of a token."""


def job(lora: dict[str, int] | None = None, **memory: object) -> Job:
    return a_job("m", memory=memory, max_model_len=100, **({"lora": lora} if lora else {}))


@pytest.mark.parametrize(
    ("memory", "num_ranks", "weights", "training", "resting"),
    [
        # DeepSpeed moves optimizer states at stage 2, and not at 0, nor at 1 in bfloat16
        ({"zero_stage": 0}, 2, 2000, 4000 + 12_000, 12_000),
        ({"zero_stage": 1}, 2, 2000, 6000 + 6000, 12_000),
        ({"zero_stage": 2}, 2, 2000, 2000 + 6000, 0),
        ({"zero_stage": 3}, 2, 1000, 2000 + 6000, 0),
        ({"zero_stage": 2}, 1, 2000, 4000 + 12_000, 0),
        ({"zero_stage": 2, "offload_optimizer": True}, 1, 2000, 4000, 0),
        ({"zero_stage": 3, "offload_optimizer": True}, 1, 2000, 0, 0),
    ],
)
def test_what_each_gpu_holds_at_each_stage(memory, num_ranks, weights, training, resting) -> None:
    found = needs_of(MODEL, job(**memory), Ranks(num_ranks, 2, "gpu"), 1)
    assert found == GpuNeeds(weights, training, 2000 + 10 * 2 * 100, resting)


def test_a_sampler_over_two_gpus_holds_half_of_the_weights_on_each() -> None:
    wide = dataclasses.replace(MODEL, kv_heads=2)
    found = needs_of(wide, job(), Ranks(2, 2, "gpu"), 2)
    assert found.sampler == 1000 + 10 * 2 * 100


def test_of_adapters_alone_little_is_trained() -> None:
    small = model("Qwen2.5-0.5B")
    found = needs_of(small, job(lora={"rank": 16}), Ranks(1, 2, "gpu"), 1)
    # 16 bytes of 8,798,208
    assert found.training == pytest.approx(16 * 8_798_208 / GIB, abs=2e-3)


SEVEN_B = GpuNeeds(weights=14, training=104, sampler=16)


@pytest.mark.parametrize(
    ("total", "share", "turns", "message"),
    [
        (
            80,
            0.35,
            False,
            r"14.00 GiB for weights and 104.00 GiB .* leaves 52.00 GiB of the GPU's 80",
        ),
        (80, 0.6, True, r"the trainer needs 14.00 GiB .* and the GPU has 80.00 GiB"),
        (
            140,
            0.95,
            True,
            "keeps 14.00 GiB of weights while the sampler has 133.00 GiB of the GPU's",
        ),
        (40, 0.35, True, "the sampler needs 16.00 GiB .* and has 14.00 GiB of the GPU's 40.00 GiB"),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers(total, share, turns, message) -> None:
    with pytest.raises(BadRequest, match=message):
        check_fits(SEVEN_B, SharedGpu(total, share, turns))


def test_states_that_cannot_be_moved_are_not_there_for_the_sampler() -> None:
    stay = GpuNeeds(weights=14, training=60, sampler=16, resting=45)
    message = "keeps 14.00 GiB of weights and 45.00 GiB of optimizer states .*; lower .*, or"
    with pytest.raises(BadRequest, match=message):
        check_fits(stay, SharedGpu(80, 0.6, takes_turns=True))
    check_fits(stay, SharedGpu(80, 0.26, takes_turns=True))


def test_taking_turns_makes_room() -> None:
    check_fits(SEVEN_B, SharedGpu(140, 0.6, takes_turns=True))
    with pytest.raises(BadRequest, match="HONE_COLOCATE=1"):
        check_fits(SEVEN_B, SharedGpu(140, 0.6, takes_turns=False))
