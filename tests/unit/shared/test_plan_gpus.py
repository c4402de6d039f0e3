"""The GPUs that are planned for: as they are named, and as nvidia-smi lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.plan.gpus import cpu, gpus_of, host_memory_bytes, parse_gpus


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("1xA100-80GB", "1xA100-80GB"),
        ("8xh100", "8xH100"),
        ("A10G-24GB", "1xA10G"),
        ("2 x L40S", "2xL40S"),
        ("cpu", "cpu"),
        ("CPU", "cpu"),
    ],
)
def test_gpus_are_a_count_and_a_name(text: str, gpus: str) -> None:
    assert str(parse_gpus(text)) == gpus


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1xH10", r"--gpus is '1xH10'; .*; did you mean 'H100'\?"),
        ("1xA100-80G", "did you mean 'A100-80GB'"),
        ("4xA100", "did you mean 'A100-"),
        ("8 H100", r"'8 H100'; expected a count and a name, such as 8xA100-80GB, or cpu"),
        ("", "--gpus is ''; expected a count and a name"),
        ("0xH100", "'0xH100'; expected a count and a name"),
        ("1xH100,1xL4", "'1xH100,1xL4'; expected a count and a name"),
        ("4xcpu", "'4xcpu'; expected a count and a name, such as 8xA100-80GB, or cpu"),
        ("2xquantum", "the GPUs are A10, A100-40GB"),
    ],
)
def test_gpus_that_are_not_there_are_named(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("listed", "gpus"),
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
def test_what_nvidia_lists_is_found_in_the_table(listed: str, gpus: str) -> None:
    assert str(gpus_of(listed)) == gpus


def test_a_gpu_that_is_not_in_the_table_has_its_memory_and_no_rates() -> None:
    found = gpus_of("NVIDIA Xyz 900, 65536\n")
    assert (found.memory_gib, found.bandwidth_gb_s) == (64.0, 0.0)


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
