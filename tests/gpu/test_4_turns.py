"""One GPU for both: what a sampler's sleep and a trainer's rest free, and that both continue
after."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from shared.job import SyncMethod
from shared.wire import SleepRequest
from tests.support.engine_ranks import a_job
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_on_device import join_alone, one_process
from tests.system.test_sync_methods import a_pair, agree

GIB = 1 << 30
SHARE = 0.3


@pytest.mark.parametrize("method", ["ipc", "shm"])
async def test_a_sleeping_sampler_frees_its_gpu_and_wakes_with_the_next_version(
    tmp_path: Path, method: SyncMethod
) -> None:
    own = {"colocate": True, "gpu_memory_utilization": SHARE, "max_num_seqs": 16}
    async with a_pair(tmp_path, "cuda:0", **own) as pair:
        for turn in range(3):
            await agree(pair, method)
            awake, _ = torch.cuda.mem_get_info(0)
            await pair.sampler.sleep(SleepRequest(job_id="job"))
            asleep, total = torch.cuda.mem_get_info(0)
            print(f"turn {turn}: {awake / GIB:.1f} GiB free awake, {asleep / GIB:.1f} asleep")
            assert asleep - awake > 0.8 * SHARE * total - 2 * GIB
        await agree(pair, method)


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
        engine.offload()
        resting = torch.cuda.memory_allocated(device)
        engine.reload()
        after = torch.cuda.memory_allocated(device)
        engine.update(examples, 1e-3)
        return before, resting, after, engine.num_trainable
    finally:
        engine.close()


def test_a_resting_trainer_frees_what_only_an_update_needs(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with one_process() as process:
        before, resting, after, num_trainable = _allocated(process, model)
    print(f"{before} bytes, {resting} at rest, {after} after")
    assert before - resting >= 11 * num_trainable  # float32 master, Adam's two moments
    assert after >= before - num_trainable


def _allocated(process: ProcessPoolExecutor, model: Path) -> tuple[int, int, int, int]:
    return process.submit(allocated_around_rest, model).result()
