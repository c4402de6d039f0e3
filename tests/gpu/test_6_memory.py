"""What training takes: peak memory, tokens per second, model FLOPs utilization. The same runs tiny
on a CPU in tests/unit/trainer/test_policy_on_device.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.support.trainer_on_device import (
    QWEN_05B,
    QWEN_7B,
    one_process,
    random_examples,
    train_speed,
)

Needs = Callable[[int], None]
MEMORY = {"micro_batch_tokens": 16_384, "gradient_checkpointing": True}
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with one_process() as process:
        yield process


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_half_billion_model_trains_whole(
    needs_gb: Needs, process: ProcessPoolExecutor, stage: int
) -> None:
    """Weights 1 GB, float32 gradients and master weights 4, Adam 4, at each ZeRO stage on one
    GPU."""
    needs_gb(30)
    examples = random_examples(QWEN_05B, 64, 128, 1024)
    speed = process.submit(
        train_speed, QWEN_05B, examples, DEVICE, {**MEMORY, "zero_stage": stage}
    ).result()
    print(f"0.5B, ZeRO-{stage}: {speed}")
    assert (
        speed.peak_bytes - speed.static_bytes < speed.whole_logits_bytes
    )  # 10 GB for one micro-batch, were they whole


def test_a_seven_billion_model_trains_adapters(
    needs_gb: Needs, process: ProcessPoolExecutor
) -> None:
    """Weights 15 GB; a whole 7B model wants 12 more bytes per parameter, so several GPUs, or
    offload_optimizer."""
    needs_gb(40)
    examples = random_examples(QWEN_7B, 32, 128, 1024)
    speed = process.submit(train_speed, QWEN_7B, examples, DEVICE, MEMORY, {"rank": 16}).result()
    print(f"7B, LoRA 16: {speed}")
    assert speed.peak_bytes - speed.static_bytes < 2 * speed.whole_logits_bytes
