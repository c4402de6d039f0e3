"""How fast the sampler is: tokens per second, as Hone asks vLLM. What the trainer does is in
test_6_memory.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.sampler_on_device import an_engine, save_random_model, tokens_per_s
from tests.support.trainer_on_device import QWEN_05B


async def test_half_a_billion_parameters_sample_at_a_rate_that_is_printed(
    needs_gb: Callable[[int], None], tmp_path: Path
) -> None:
    needs_gb(20)
    model = save_random_model(QWEN_05B, tmp_path / "model")
    async with an_engine(model, gpu_memory_utilization=0.6) as engine:
        for num in (32, 256):
            rate = await tokens_per_s(engine, QWEN_05B, num=num, prompt=128, tokens=512)
            print(f"0.5B, {num} completions of 512 tokens at once: {rate:,.0f} tokens/s")
            assert rate > 100, "a CPU samples as fast"
