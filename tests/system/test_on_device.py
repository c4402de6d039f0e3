"""What tests/gpu does with sampler and trainer, tiny and on a CPU, so that it is known to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.wire import Sampling
from tests.support.engine_ranks import warm
from tests.support.sampler_on_device import (
    an_engine,
    gap_to_trainer,
    greedy_by_transformers,
    sampled,
    save_random_model,
    sync_time,
    tokens_per_s,
)
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_on_device import Shape, one_process, step_gap
from tests.system.test_sync_methods import a_pair

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.system, pytest.mark.timeout(1200)]

CPU = torch.device("cpu")
# vLLM on a CPU needs heads of 32
TINY = Shape(hidden=128, intermediate=128, layers=2, heads=4, kv_heads=2, vocab=512, tied=True)


async def test_a_sampler_answers_as_transformers_and_the_trainer_do(tmp_path: Path) -> None:
    model = save_random_model(TINY, tmp_path / "model")
    async with an_engine(model) as engine:
        gap = await gap_to_trainer(engine, model, TINY, CPU, tokens=16)
        assert 0 < gap.mean < 0.02 and gap.largest < 0.2 and gap.spread > 0, gap
        assert await tokens_per_s(engine, TINY, num=8, prompt=8, tokens=16) > 0
    tiny = make_tiny_model(tmp_path / "tiny", num_heads=2)
    async with an_engine(tiny, "float32") as engine:
        prompts = [[5, 6, 7], [9, 9]]
        rollouts = await sampled(engine, prompts, Sampling(max_tokens=8, temperature=0))
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            theirs = greedy_by_transformers(tiny, prompt, len(rollout.token_ids))
            assert list(rollout.token_ids) == theirs


async def test_a_sync_is_timed_and_read_back(tmp_path: Path) -> None:
    model = save_random_model(TINY, tmp_path / "model")
    async with a_pair(tmp_path, model=model, dtype="bfloat16") as pair:
        time = await sync_time(pair, "shm")
    assert time.load_s >= time.paused_s > 0 and time.publish_s > 0
    assert "published in" in str(time)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_a_step_is_that_of_plain_torch(tmp_path: Path, stage: int) -> None:
    model = make_tiny_model(tmp_path / "model")
    with one_process(warm()) as process:
        gap = process.submit(step_gap, model, tmp_path / "trained", CPU, stage).result()
    assert 0 < gap < 2e-6
