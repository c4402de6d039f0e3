"""What training takes: peak memory, tokens per second, model FLOPs utilization, and copies into the
host's memory. The same runs tiny on a CPU in tests/unit/trainer: test_policy_on_device.py,
test_host_memory.py, test_tensor_file.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from services.trainer import transfer
from services.trainer.zero.host_memory import HostCopies
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


def test_copies_of_a_gpus_tensors_are_pinned_and_lie_where_the_ones_before_lay() -> None:
    """A gigabyte, as master weights are copied before the first of several optimizer steps."""
    tensor = torch.randn(1 << 28, device=DEVICE)
    copies, seconds, places = HostCopies(pinned=True), [], []
    for _ in range(3):
        started = time.perf_counter()
        copies.begin()
        copy = copies.copy(tensor)
        torch.cuda.synchronize(DEVICE)
        seconds.append(time.perf_counter() - started)
        places.append([piece.data_ptr() for piece in copy.pieces])
        assert all(piece.is_pinned() for piece in copy.pieces)
    was = tensor.clone()
    tensor.zero_()
    copy.restore(tensor)
    torch.cuda.synchronize(DEVICE)
    assert tensor.equal(was)
    assert places[0] == places[1] == places[2]
    started = time.perf_counter()
    tensor.to("cpu", copy=True)
    fresh_s = time.perf_counter() - started
    print(f"1 GiB: first {seconds[0]:.3f} s, then {seconds[2]:.3f} s, fresh memory {fresh_s:.3f} s")


def test_published_files_of_a_gpu_are_those_of_a_cpu(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(3, 7 << 20).to(torch.bfloat16),  # more than a buffer
        "turned": torch.randn(5, 3).T,
        "scalar": torch.tensor(2.0),
    }
    on_gpu = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    digests = transfer.write_tensors(tensors, tmp_path / "cpu")
    for _ in range(2):
        started = time.perf_counter()
        assert transfer.write_tensors(on_gpu, tmp_path / "gpu") == digests
        print(f"42 MiB published in {time.perf_counter() - started:.4f} s")
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()
    with transfer.STAGING.buffer() as buffer:
        assert buffer.is_pinned()
