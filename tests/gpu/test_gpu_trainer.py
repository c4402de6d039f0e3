"""The trainer on a GPU: bfloat16 against float32, peak memory, tokens per second, model FLOPs
utilization.

Skipped without one. The same code runs tiny on a CPU in
tests/unit/trainer/test_policy_on_device.py.
"""

from __future__ import annotations

import gc

import pytest
import torch

from tests.support.trainer_on_device import (
    QWEN_05B,
    QWEN_7B,
    bf16_parity,
    one_process,
    random_examples,
    train_speed,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: none is visible to torch here"
    ),
]

MEMORY = {"micro_batch_tokens": 16_384, "gradient_checkpointing": True}


@pytest.fixture
def device():
    torch.cuda.set_device(0)
    yield torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def process():
    with one_process() as process:
        yield process


def needs(device: torch.device, gigabytes: int) -> None:
    has = torch.cuda.get_device_properties(device).total_memory / 1e9
    if has < gigabytes:
        pytest.skip(f"needs a GPU of {gigabytes} GB, this one has {has:.0f}")


def test_bfloat16_gives_the_logprobs_and_the_update_direction_of_float32(device):
    needs(device, 20)
    parity = bf16_parity(QWEN_05B, random_examples(QWEN_05B, 8, 64, 256), device)
    print(parity)
    assert parity.mean < 0.02
    assert parity.largest < 0.5
    assert parity.cosine > 0.98


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_half_billion_model_trains_whole(process, device, stage):
    """Weights 1 GB, float32 gradients and master weights 4, Adam 4, at each ZeRO stage on one
    GPU."""
    needs(device, 30)
    examples = random_examples(QWEN_05B, 64, 128, 1024)
    speed = process.submit(
        train_speed, QWEN_05B, examples, device, {**MEMORY, "zero_stage": stage}
    ).result()
    print(f"0.5B, ZeRO-{stage}: {speed}")
    assert (
        speed.peak_bytes - speed.static_bytes < speed.whole_logits_bytes
    )  # 10 GB for one micro-batch, were they whole


def test_a_seven_billion_model_trains_adapters(process, device):
    """Weights 15 GB; a whole 7B model wants 12 more bytes per parameter, so several GPUs, or
    offload_optimizer."""
    needs(device, 40)
    examples = random_examples(QWEN_7B, 32, 128, 1024)
    speed = process.submit(train_speed, QWEN_7B, examples, device, MEMORY, {"rank": 16}).result()
    print(f"7B, LoRA 16: {speed}")
    assert speed.peak_bytes - speed.static_bytes < 2 * speed.whole_logits_bytes
