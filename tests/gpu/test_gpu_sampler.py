"""The sampler on a GPU: weights from device to device, memory that sleep frees, a model split over
several GPUs. Skipped without one; with one, nothing here has run yet.

What can be shown without is in tests/system/test_sync_methods.py and the contract tests of sampler
and orchestrator.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from services.rollout.on_vllm.starter import VllmStarter
from shared.config import Settings
from shared.errors import Failed
from shared.job import SyncMethod
from shared.wire import EngineSpec, Sampling, SentWeights, SleepRequest, WeightsRef
from tests.support.engine_ranks import a_job
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_on_device import join_alone, one_process
from tests.system.test_sync_methods import a_pair, agree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: none is visible to torch here"
    ),
]
GIB = 1 << 30
SHARED = {"gpu_memory_utilization": 0.3, "max_num_seqs": 16}


def needs(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, {torch.cuda.device_count()} are visible")


@pytest.mark.parametrize("method", ["ipc", "shm"])
async def test_on_one_gpu_the_sampler_reads_the_trainers_memory(
    tmp_path: Path, method: SyncMethod
) -> None:
    async with a_pair(tmp_path, "cuda:0", **SHARED) as pair:
        for _ in range(3):
            serving = await agree(pair, method)
            print(f"{method}: paused {serving.paused_s:.3f} s of {serving.load_s:.3f}")
        assert serving.received_bytes == 0
        assert (await pair.sampler.check_weights()).differing == ()
        assert serving.gpus == (str(torch.cuda.get_device_properties(0).uuid),)


async def test_between_two_gpus_weights_go_by_nccl(tmp_path: Path) -> None:
    needs(2)
    async with a_pair(tmp_path, "cuda:1", **SHARED) as pair:
        for _ in range(3):
            serving = await agree(pair, "nccl")
            print(f"nccl: paused {serving.paused_s:.3f} s of {serving.load_s:.3f}")
        assert (await pair.sampler.check_weights()).differing == ()


async def test_a_trainer_that_stops_sending_by_nccl_is_given_up_and_files_heal(
    tmp_path: Path,
) -> None:
    needs(2)
    async with a_pair(tmp_path, "cuda:1", **SHARED) as pair:
        await agree(pair, "nccl")
        pair.trainer.step()
        ref = pair.trainer.publish("nccl")
        assert isinstance(ref, SentWeights)
        pair.trainer.publisher.stop_sending()
        with pytest.raises(Failed) as caught:
            await pair.sampler.reload_weights(WeightsRef(ref))
        assert caught.value.code == "not_met"
        await pair.sampler.reload_weights(WeightsRef(ref.as_files()))
        assert await pair.largest_gap() < 1e-3
        await agree(pair, "nccl")


@pytest.mark.parametrize("method", ["ipc", "shm"])
async def test_a_sleeping_sampler_frees_its_gpu_and_wakes_with_the_next_version(
    tmp_path: Path, method: SyncMethod
) -> None:
    async with a_pair(tmp_path, "cuda:0", colocate=True, **SHARED) as pair:
        for epoch in range(3):
            await agree(pair, method)
            awake, _ = torch.cuda.mem_get_info(0)
            await pair.sampler.sleep(SleepRequest(job_id="job"))
            asleep, total = torch.cuda.mem_get_info(0)
            print(f"turn {epoch}: {awake / GIB:.1f} GiB free awake, {asleep / GIB:.1f} asleep")
            assert asleep - awake > 0.8 * SHARED["gpu_memory_utilization"] * total - 2 * GIB
        await agree(pair, method)


async def test_a_model_split_over_two_gpus_reads_back_whole(tmp_path: Path) -> None:
    needs(2)
    async with a_pair(tmp_path, "cpu", tensor_parallel_size=2, **SHARED) as pair:
        await agree(pair, "shm")
        checked = await pair.sampler.check_weights()
        assert (checked.differing, checked.unread) == ((), ())


async def test_beside_masks_any_request_is_answered_and_only_cut_ones_have_them(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", num_heads=2)
    starter = VllmStarter(Settings(gpu_memory_utilization=0.3))
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


@pytest.fixture
def process() -> Iterator[ProcessPoolExecutor]:
    with one_process() as process:
        yield process


def allocated_around_rest(model: Path) -> tuple[int, int, int, int]:
    """Returns the bytes on the GPU before `rest`, meanwhile and after `rise`, and the trained
    parameters."""
    device = torch.device("cuda", 0)
    join_alone(device)
    from services.trainer.zero.deepspeed_engine import start_engine
    from tests.support.trainer_reference import some_examples

    job = a_job(model, training={"dtype": "bfloat16"}, memory={"zero_stage": 2})
    engine = start_engine(job, device)
    try:
        examples = some_examples(model)
        engine.update(examples, 1e-3)
        before = torch.cuda.memory_allocated(device)
        engine.rest()
        resting = torch.cuda.memory_allocated(device)
        engine.rise()
        after = torch.cuda.memory_allocated(device)
        engine.update(examples, 1e-3)
        return before, resting, after, engine.num_trainable
    finally:
        engine.close()


def test_a_resting_trainer_frees_what_only_an_update_needs(
    process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    before, resting, after, num_trainable = process.submit(allocated_around_rest, model).result()
    print(f"{before} bytes, {resting} at rest, {after} after")
    assert before - resting >= 11 * num_trainable  # float32 master, Adam's two moments
    assert after >= before - num_trainable
