"""A model split over two of vLLM's processes, which add up over gloo: each sync reaches both, and
what they compute is what one process computes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.orchestrator.samplers import canary
from services.rollout.engine import Adapter
from services.rollout.sampler import Sampler
from shared.job import SyncMethod
from tests.support.adapter_bench import a_bench
from tests.system.test_sync_methods import SEQUENCES, a_pair

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(1800)]

METHODS: tuple[SyncMethod, ...] = ("shm", "delta", "delta", "http", "nccl")


async def logprobs(sampler: Sampler, adapter: Adapter | None = None) -> Any:
    engine = await sampler.ready_engine()
    return np.array(await asyncio.gather(*(engine.logprobs(ids, adapter) for ids in SEQUENCES)))


async def test_each_sync_reaches_both_halves_of_a_model(tmp_path: Path) -> None:
    split: list[Any] = []
    checkpoints: list[dict[str, Any]] = []
    async with a_pair(tmp_path / "split", tensor_parallel_size=2) as pair:
        for method in METHODS:
            pair.trainer.step()
            ref, serving = await pair.sync(method)
            assert ref.canary and canary.fault(ref.canary, serving) is None
            checked = await pair.sampler.check_weights()
            assert (checked.differing, checked.unread, checked.num_tensors) == ((), (), 26)
            checkpoints.append(pair.trainer.weights())
            split.append(await logprobs(pair.sampler))
            ours = np.array([pair.trainer.logprobs(ids) for ids in SEQUENCES])
            gap = np.abs(split[-1] - ours).max()
            print(f"{method}: {gap:.1e}, {serving.received_bytes} bytes fetched")
            assert gap < 1e-3
            if method == "delta" and len(split) == 3:
                assert 0 < serving.received_bytes < ref.size_bytes
    async with a_pair(tmp_path / "whole") as pair:
        for number, (weights, found) in enumerate(zip(checkpoints, split, strict=True)):
            pair.trainer.load(weights)
            await pair.sync("shm" if number else "restart")
            gap = np.abs(found - await logprobs(pair.sampler)).max()
            print(f"{METHODS[number]}, by one process: {gap:.1e}")
            assert gap < 1e-3


async def test_an_adapter_reaches_both_halves_of_a_model(tmp_path: Path) -> None:
    async with a_bench(tmp_path, tensor_parallel_size=2) as bench:
        trainer = bench.trainer("job")
        for _ in range(3):
            trainer.step()
            await bench.sync(trainer)
            ours = np.array([trainer.logprobs(ids) for ids in SEQUENCES])
            found = await logprobs(bench.sampler, bench.adapter("job"))
            print(f"lora: {np.abs(found - ours).max():.1e}")
            assert np.abs(found - ours).max() < 1e-3
        assert (await bench.sampler.check_weights()).differing == ()
        trainer.version += 1  # the same weights, merged
        await bench.sync(trainer, "shm")
        assert np.abs(await logprobs(bench.sampler) - ours).max() < 1e-3
