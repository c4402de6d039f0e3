"""Driver, CUDA and compilers: nothing else works without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.host import nvidia

ROOT = Path(__file__).parents[2]


def test_torch_computes_on_every_gpu_with_this_driver() -> None:
    if not torch.cuda.is_available():
        raise nvidia.refusal(nvidia.num_cards(), nvidia.why_unusable() or "it does not say why")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        print(
            f"GPU {index}: {found.name}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} free, compute "
            f"capability {found.major}.{found.minor}; driver {nvidia.driver()}, torch "
            f"{torch.__version__} with CUDA {torch.version.cuda}"
        )
        assert free > 0.8 * total, "another process has much of its memory"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_on_the_gpu_is_the_cpus(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 512, generator=generator).to(dtype) for _ in range(2))
    ours = (left.cuda() @ right.cuda().T).cpu().double()
    exact = left.double() @ right.double().T
    error = float((ours - exact).norm() / exact.norm())
    print(f"{dtype}: relative error {error:.1e}")
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)


def test_inductor_compiles_for_the_gpu() -> None:
    """By Triton, which vLLM's and TRL's kernels are compiled by too."""
    value = torch.linspace(-3, 3, 1000, device="cuda")
    compiled = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    torch.testing.assert_close(compiled(value), torch.sin(value) * 2 + 1)


def test_what_a_sampler_compiles_at_run_time_compiles_here() -> None:
    """Inductor's kernels, Triton's launchers, FlashInfer's sampler."""
    ended = subprocess.run(
        [sys.executable, "docker/check_kernels.py"],
        cwd=ROOT,
        env=os.environ | nvidia.compilers(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
