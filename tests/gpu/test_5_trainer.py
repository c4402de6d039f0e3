"""The trainer's arithmetic on the GPU: its step is plain torch's, and bfloat16 gives what float32
gives. The same runs tiny on a CPU in tests/system/test_on_device.py and
tests/unit/trainer/test_policy_on_device.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_on_device import (
    QWEN_05B,
    bf16_parity,
    one_process,
    random_examples,
    step_gap,
)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_in_float32_is_that_of_plain_torch(tmp_path: Path, stage: int) -> None:
    model, device = make_tiny_model(tmp_path / "model"), torch.device("cuda", 0)
    with one_process() as process:
        gap = process.submit(step_gap, model, tmp_path / "trained", device, stage).result()
    print(f"ZeRO-{stage}: relative difference of the update {gap:.2g}")
    assert gap < 1e-4


def test_bfloat16_gives_the_logprobs_and_the_update_direction_of_float32(
    needs_gb: Callable[[int], None],
) -> None:
    needs_gb(20)
    device = torch.device("cuda", 0)
    parity = bf16_parity(QWEN_05B, random_examples(QWEN_05B, 8, 64, 256), device)
    torch.cuda.empty_cache()
    print(parity)
    assert parity.mean < 0.02
    assert parity.largest < 0.5
    assert parity.cosine > 0.98
