"""Every way to move weights to a sampler on a GPU: what it then computes is the trainer's, every
tensor reads back, and how long it takes for half a billion parameters.

What can be shown without a GPU is in tests/system/test_sync_methods.py and the contract tests of
sampler and orchestrator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared.errors import Failed
from shared.job import SyncMethod
from shared.wire import WeightsRef
from tests.support.sampler_on_device import save_random_model, sync_time
from tests.support.trainer_on_device import QWEN_05B
from tests.system.test_sync_methods import a_pair, agree

Needs = Callable[[int], None]
SHARED = {"gpu_memory_utilization": 0.3, "max_num_seqs": 16}
ON_ONE_GPU: tuple[SyncMethod, ...] = ("shm", "disk", "delta", "http", "reload", "ipc")


@pytest.mark.parametrize("method", ON_ONE_GPU)
async def test_beside_the_trainer_the_sampler_computes_what_it_published(
    tmp_path: Path, method: SyncMethod
) -> None:
    async with a_pair(tmp_path, "cuda:0", **SHARED) as pair:
        received = [(await agree(pair, method)).received_bytes for _ in range(3)]
        assert bool(received[-1]) == (method in ("delta", "http"))
        assert (await pair.sampler.check_weights()).differing == ()
        serving = await agree(pair, method)
        assert serving.gpus == (str(torch.cuda.get_device_properties(0).uuid),)


async def test_half_a_billion_parameters_are_moved_by_every_method(
    needs_gb: Needs, tmp_path: Path
) -> None:
    needs_gb(20)
    model = save_random_model(QWEN_05B, tmp_path / "model")
    slow = {"transfer_s": 60.0}
    async with a_pair(tmp_path, "cuda:0", model=model, dtype="bfloat16", **SHARED, **slow) as pair:
        for method in ON_ONE_GPU:
            print(f"0.5B by {method}: {await sync_time(pair, method)}")


async def test_between_two_gpus_weights_go_by_nccl(needs_gpus: Needs, tmp_path: Path) -> None:
    needs_gpus(2)
    async with a_pair(tmp_path, "cuda:1", **SHARED) as pair:
        for _ in range(3):
            await agree(pair, "nccl")
        assert (await pair.sampler.check_weights()).differing == ()


async def test_half_a_billion_parameters_are_sent_by_nccl(
    needs_gpus: Needs, tmp_path: Path
) -> None:
    needs_gpus(2)
    model = save_random_model(QWEN_05B, tmp_path / "model")
    slow = {"transfer_s": 60.0}
    async with a_pair(tmp_path, "cuda:1", model=model, dtype="bfloat16", **SHARED, **slow) as pair:
        print(f"0.5B by nccl: {await sync_time(pair, 'nccl')}")


async def test_a_trainer_that_stops_sending_by_nccl_is_given_up_and_files_heal(
    needs_gpus: Needs,
    tmp_path: Path,
) -> None:
    needs_gpus(2)
    async with a_pair(tmp_path, "cuda:1", **SHARED) as pair:
        await agree(pair, "nccl")
        pair.trainer.step()
        ref = pair.trainer.publish("nccl")
        pair.trainer.publisher.stop_sending()
        with pytest.raises(Failed) as caught:
            await pair.sampler.reload_weights(WeightsRef(ref))
        assert caught.value.code == "not_met"
        await pair.sampler.reload_weights(WeightsRef(pair.trainer.publish("http")))
        assert await pair.largest_gap() < 1e-3
        await agree(pair, "nccl")


async def test_a_model_split_over_two_gpus_reads_back_whole(
    needs_gpus: Needs, tmp_path: Path
) -> None:
    needs_gpus(2)
    async with a_pair(tmp_path, "cpu", tensor_parallel_size=2, **SHARED) as pair:
        await agree(pair, "shm")
        checked = await pair.sampler.check_weights()
        assert (checked.differing, checked.unread) == ((), ())
