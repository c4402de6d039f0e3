"""The GPUs that are planned for: as they are named, and as nvidia-smi lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.plan.gpus import cpu, host_memory_bytes, parse_gpus, pools_of


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("1xA100-80GB", ["1xA100-80GB"]),
        ("8xh100", ["8xH100"]),
        ("A10G-24GB", ["1xA10G"]),
        ("2 x L40S", ["2xL40S"]),
        ("1xH100, 2xA10G", ["1xH100", "2xA10G"]),
        ("cpu", ["cpu"]),
        ("CPU", ["cpu"]),
    ],
)
def test_gpus_are_a_count_and_a_name(text: str, pools: list[str]) -> None:
    assert [str(pool) for pool in parse_gpus(text)] == pools


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1xH10", r"there is no GPU 'H10' in the table; did you mean 'H100'\?"),
        ("1xA100-80G", "there is no GPU 'A100-80G' in the table; did you mean 'A100-80GB'"),
        ("4xA100", "'4xA100': expected one of A100-40GB, A100-80GB"),
        ("8 H100", r"'8 H100' is no GPU; expected a count and a name, such as 1xA100-80GB"),
        ("", "'' is no GPU; expected a count and a name"),
        ("1xH100,", "'' is no GPU"),
        ("0xH100", "0 GPUs; expected from 1 to 1024"),
        ("1xH100,1xL4,1xT4", "has 3 kinds; expected one, or two with the trainer's first"),
        ("1xH100,cpu", "'cpu' is this machine without GPUs; expected it alone, without a count"),
        ("4xcpu", "'cpu' is this machine without GPUs; expected it alone"),
        ("2xquantum", "there is no GPU 'quantum' in the table; the known ones are A10, A100-40GB"),
    ],
)
def test_gpus_that_are_not_there_are_named(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("listed", "pool"),
    [
        ("NVIDIA A100-SXM4-80GB, 81920\n" * 2, "2xA100-80GB"),
        ("NVIDIA A100-PCIE-40GB, 40960\n", "1xA100-40GB"),
        ("NVIDIA H100 80GB HBM3, 81559\n" * 8, "8xH100"),
        ("NVIDIA A10G, 23028\n", "1xA10G"),
        ("NVIDIA GeForce RTX 4090, 24564\n", "1xRTX-4090"),
        ("Tesla T4, 15360\n", "1xT4"),
        ("NVIDIA H200, 143771\nNVIDIA L4, 23034\n", "1xH200"),
        ("NVIDIA Xyz 900, 65536\n", "1xNVIDIA-Xyz-900"),
        ("", "cpu"),
        ("No devices were found\n", "cpu"),
    ],
)
def test_what_nvidia_lists_is_found_in_the_table(listed: str, pool: str) -> None:
    (found,) = pools_of(listed)
    assert str(found) == pool


def test_a_gpu_that_is_not_in_the_table_has_its_memory_and_no_rates() -> None:
    (found,) = pools_of("NVIDIA Xyz 900, 65536\n")
    assert (found.gpu.memory_gib, found.gpu.has_rates) == (64.0, False)


def test_a_host_without_gpus_has_its_memory(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512_bf16 sse\n")
    found = cpu(24 << 30, tmp_path / "cpuinfo")
    assert (found.memory_gib, found.has_bfloat16) == (24.0, True)
    assert not cpu(24 << 30, tmp_path / "none").has_bfloat16
    assert cpu().memory_gib == host_memory_bytes() / 2**30


def test_a_container_has_the_memory_that_it_may_use(tmp_path: Path) -> None:
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    second, first = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    assert host_memory_bytes((second, first)) == host
    second.write_text("max\n")
    first.write_text(f"{2**62}\n")
    assert host_memory_bytes((second, first)) == host
    second.write_text("104857600\n")
    assert host_memory_bytes((second, first)) == 104_857_600
