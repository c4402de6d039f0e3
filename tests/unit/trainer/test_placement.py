"""What fits onto a GPU that sampler and trainer share, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.trainer.zero.placement import Gpu, Needs, Sizes, check_fits, needs_of, sizes_of
from shared.errors import BadRequest
from shared.job import Job
from tests.support.engine_ranks import a_job
from tests.support.safetensors_files import safetensors

GIB = 1 << 30
SIZES = Sizes(num_parameters=1000, num_cached=10, max_model_len=100)


def job(lora: dict[str, int] | None = None, **memory: object) -> Job:
    return a_job("m", memory=memory, **({"lora": lora} if lora else {}))


@pytest.mark.parametrize(
    ("memory", "num_ranks", "weights", "training"),
    [
        ({"zero_stage": 0}, 2, 2000, 4000 + 12_000),
        ({"zero_stage": 1}, 2, 2000, 4000 + 6000),
        ({"zero_stage": 2}, 2, 2000, 2000 + 6000),
        ({"zero_stage": 3}, 2, 1000, 2000 + 6000),
        ({"zero_stage": 2}, 1, 2000, 4000 + 12_000),
        ({"zero_stage": 2, "offload_optimizer": True}, 1, 2000, 4000),
        ({"lora": {"rank": 4}, "zero_stage": 2}, 1, 2000, 0),
    ],
)
def test_what_each_gpu_holds_at_each_stage(memory, num_ranks, weights, training) -> None:
    found = needs_of(SIZES, job(**memory), 2, num_ranks)
    assert found == Needs(weights, training, sampler=2000 + 10 * 2 * 100)


def test_sizes_are_those_of_the_models_files(tmp_path: Path) -> None:
    config = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 3}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(safetensors(a=b"12345", b=b"123"))
    # keys and values of 3 layers, 2 heads of 8
    assert sizes_of(tmp_path, None) == Sizes(8, 2 * 3 * 2 * 8, 64)
    assert sizes_of(tmp_path, 16).max_model_len == 16


SEVEN_B = Needs(weights=14 * GIB, training=104 * GIB, sampler=16 * GIB)


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
        check_fits(SEVEN_B, Gpu(total * GIB, share, turns))


def test_taking_turns_makes_room() -> None:
    check_fits(SEVEN_B, Gpu(140 * GIB, 0.6, takes_turns=True))
    with pytest.raises(BadRequest, match="HONE_COLOCATE=1"):
        check_fits(SEVEN_B, Gpu(140 * GIB, 0.6, takes_turns=False))
