"""vLLM on the GPU: what it answers is the model's, and its log-probs in bfloat16 are the trainer's.
The same runs tiny on a CPU in tests/system/test_on_device.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from services.rollout.on_vllm.processes import VllmStarter
from shared.settings import Settings
from shared.wire import EngineSpec, Sampling
from tests.support.sampler_on_device import (
    an_engine,
    gap_to_trainer,
    greedy_by_transformers,
    sampled,
    save_random_model,
)
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_on_device import QWEN_05B

SHARE = 0.3


async def test_greedy_completions_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", num_heads=2)
    prompts = [[5, 6, 7], [9, 9], [40, 3, 17, 22]]
    async with an_engine(model, "float32", gpu_memory_utilization=SHARE) as engine:
        rollouts = await sampled(engine, prompts, Sampling(max_tokens=12, temperature=0))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        theirs = greedy_by_transformers(model, prompt, len(rollout.token_ids))
        assert list(rollout.token_ids) == theirs


async def test_log_probs_in_bfloat16_are_those_of_the_trainer(
    needs_gb: Callable[[int], None], tmp_path: Path
) -> None:
    needs_gb(20)
    model = save_random_model(QWEN_05B, tmp_path / "model")
    async with an_engine(model, gpu_memory_utilization=SHARE) as engine:
        gap = await gap_to_trainer(engine, model, QWEN_05B, torch.device("cuda", 0), tokens=256)
    print(f"0.5B, random weights: {gap}")
    assert gap.mean < 0.05 * max(1.0, gap.spread)
    assert gap.largest < 1.0


async def test_beside_masks_any_request_is_answered_and_only_cut_ones_have_them(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", num_heads=2)
    starter = VllmStarter(Settings(gpu_memory_utilization=SHARE))
    engine = await starter.start(EngineSpec(model=str(model), sampling_masks=True), model)
    try:
        for sampling, is_cut in (
            (Sampling(max_tokens=4, top_p=0.5), True),
            (Sampling(max_tokens=4, top_p=0.5, seed=1), True),
            (Sampling(max_tokens=4), False),
            (Sampling(max_tokens=4, temperature=0), False),
        ):
            (drawn,) = await engine.sample([5, 6, 7], sampling, owner="", salt="")
            assert drawn.error is None
            assert len(drawn.kept_counts) == (len(drawn.token_ids) if is_cut else 0)
    finally:
        await engine.stop()
        starter.close()
