"""NVIDIA's cards and driver, as files of the kernel show them, and who computes where they are; and
the GPUs that are planned for: as they are named, and as nvidia-smi lists them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from deploy.machine import visible_devices
from hone.commands import doctor
from shared.errors import BadRequest, Failed
from shared.host import nvidia
from shared.plan.gpus import cpu, gpus_of, host_memory_bytes, parse_gpus

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
OLD = "RuntimeError: The NVIDIA driver on your system is too old (found version 12040)."
WHY_OLD = (
    f"there are 1 GPU(s) and torch cannot compute on them: {OLD} (driver 550.54.15; CUDA 13 needs "
    "580 or newer, and `make cuda` installs the packages that have CUDA). To compute on the CPU "
    "all the same, set CUDA_VISIBLE_DEVICES to -1"
)
NO_CUDA = "AssertionError: Torch not compiled with CUDA enabled"

on_cpu_build = pytest.mark.skipif(
    not version("torch").endswith("+cpu"), reason="needs torch's CPU build"
)


def has_gpu() -> bool:
    from services.trainer.processes import ranks  # imports torch, which collecting does without

    return ranks.has_gpu()


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(nvidia, "num_cards", lambda: 1)
    monkeypatch.setattr(nvidia, "driver", lambda: "550.54.15")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def says(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Has this Python code stand for the import of torch and the start of CUDA."""
    monkeypatch.setattr(nvidia, "PROBE", (sys.executable, "-c", code))


def test_cards_are_those_with_a_number(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvme0"):
        (tmp_path / name).touch()
    assert nvidia.num_cards(tmp_path) == 2
    assert nvidia.num_cards(tmp_path / "no-such-folder") == 0


@pytest.mark.parametrize(
    ("text", "version", "is_too_old"),
    [(OPEN, "580.95.05", False), (CLOSED, "550.54.15", True)],
)
def test_a_driver_tells_its_version(
    tmp_path: Path, text: str, version: str, is_too_old: bool
) -> None:
    file = tmp_path / "version"
    assert nvidia.driver(file) is None
    file.write_text(text)
    assert nvidia.driver(file) == version
    assert nvidia.is_too_old(version) is is_too_old


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_cards_are_those_of_no_service(one_card: pytest.MonkeyPatch, hidden: str) -> None:
    assert nvidia.num_seen() == 1
    one_card.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert (nvidia.num_seen(), visible_devices()) == (0, ())


def test_beside_cards_that_cuda_cannot_use_nothing_is_computed(
    one_card: pytest.MonkeyPatch,
) -> None:
    says(one_card, f"raise RuntimeError({OLD.removeprefix('RuntimeError: ')!r})")
    for refused in (nvidia.check, has_gpu):
        with pytest.raises(Failed) as caught:
            refused()
        assert caught.value.detail == WHY_OLD
    one_card.setenv("CUDA_VISIBLE_DEVICES", "-1")
    nvidia.check()
    assert not has_gpu()


def test_a_rank_that_has_lost_the_card_continues_nowhere(one_card: pytest.MonkeyPatch) -> None:
    says(one_card, "pass")
    nvidia.check()
    with pytest.raises(Failed, match="on them: only another process can"):
        has_gpu()


def test_a_driver_that_hangs_is_waited_for_no_longer_than_a_cold_import(
    one_card: pytest.MonkeyPatch,
) -> None:
    says(one_card, "import time; time.sleep(600)")
    one_card.setattr(nvidia, "PROBE_S", 0.1)
    with pytest.raises(Failed, match=r"CUDA did not start within 0\.1 s"):
        nvidia.check()


@pytest.fixture
def none_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No card, in an environment for GPUs."""
    (tmp_path / "variant").write_text("cuda\n")
    monkeypatch.setattr(nvidia, "VARIANT", tmp_path / "variant")
    monkeypatch.setattr(nvidia, "num_cards", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_packages_for_gpus_compute_nothing_without_a_gpu(
    none_for_cuda: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    says(none_for_cuda, "raise RuntimeError('Found no NVIDIA driver. Please check that')")
    for refused in (nvidia.check, has_gpu):
        with pytest.raises(Failed) as caught:
            refused()
        assert caught.value.detail.startswith(
            "no GPU is visible here, and the installed packages are those for GPUs: RuntimeError: "
            "Found no NVIDIA driver; give the container a GPU"
        )
    assert gpu() == ("fault", caught.value.detail)
    none_for_cuda.setenv("CUDA_VISIBLE_DEVICES", "-1")
    nvidia.check()
    none_for_cuda.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "variant").write_text("cpu\n")
    nvidia.check()
    assert gpu() == ("note", "none: the CPU does the work")


def test_a_gpu_without_a_device_file_is_used_if_torch_can(
    none_for_cuda: pytest.MonkeyPatch,
) -> None:
    """WSL shows GPUs otherwise."""
    says(none_for_cuda, "pass")
    nvidia.check()


@on_cpu_build
def test_the_laptops_packages_do_not_compute_beside_a_card(one_card: pytest.MonkeyPatch) -> None:
    import torch

    assert torch.version.cuda is None
    with pytest.raises(Failed, match=NO_CUDA):
        nvidia.check()
    one_card.setenv("CUDA_VISIBLE_DEVICES", "0")  # and what it was comes back after the test
    assert nvidia.hide_from_cpu_build() == 1  # the demo and the tests say the CPU is meant
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    nvidia.check()


@on_cpu_build
@pytest.mark.parametrize("service", ["trainer", "rollout"])
def test_a_service_beside_a_card_that_it_cannot_use_does_not_start(
    service: str, tmp_path: Path
) -> None:
    started = (
        "from shared.host import nvidia, processes; nvidia.num_cards = lambda: 1; "
        f"from services.{service}.__main__ import main; processes.run_main({service!r}, main)"
    )
    environment = {**os.environ, "HONE_SHM_DIR": str(tmp_path), "HONE_RUNS_DIR": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    ended = subprocess.run(
        [sys.executable, "-c", started], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert f"there are 1 GPU(s) and torch cannot compute on them: {NO_CUDA}" in ended.stderr


def test_compilers_that_came_as_wheels_are_found_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "nvidia/cu13/bin/nvcc"
    compiler.parent.mkdir(parents=True)
    monkeypatch.setattr(nvidia.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin"}
    assert nvidia.compilers() == path
    compiler.touch()
    assert nvidia.compilers() == path, "FlashInfer would not find its libraries"
    (tmp_path / "nvidia/cu13/lib").mkdir()
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "nvidia").symlink_to(tmp_path / "nvidia")
    script = Path(__file__).parents[3] / "requirements/link_cuda.sh"
    for _ in range(2):
        subprocess.run(["sh", script, tmp_path / "venv"], check=True)
    assert nvidia.compilers() == path | {"CUDA_HOME": str(tmp_path / "nvidia/cu13")}
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert nvidia.compilers() == path


def gpu() -> tuple[str, str]:
    check = doctor._gpu()
    return check.state, check.detail


@pytest.mark.parametrize(
    ("cards", "driver", "state", "detail"),
    [
        (0, None, "note", "none: the CPU does the work"),
        (2, "580.95.05", "ok", "2, driver 580.95.05; CUDA 13 needs driver 580 or newer"),
        (1, "550.54.15", "fault", "1, driver 550.54.15; CUDA 13 needs driver 580 or newer"),
        (1, None, "note", "1, driver unknown; CUDA 13 needs driver 580 or newer"),
    ],
)
def test_without_torch_doctor_judges_by_the_driver(
    one_card: pytest.MonkeyPatch, cards: int, driver: str | None, state: str, detail: str
) -> None:
    one_card.setattr(doctor, "version_of", lambda name: None)
    one_card.setattr(nvidia, "num_cards", lambda: cards)
    one_card.setattr(nvidia, "driver", lambda: driver)
    assert gpu() == (state, detail)


def test_doctor_says_of_cards_what_a_service_would(one_card: pytest.MonkeyPatch) -> None:
    says(one_card, f"raise RuntimeError({OLD.removeprefix('RuntimeError: ')!r})")
    assert gpu() == ("fault", WHY_OLD)
    says(one_card, "pass")
    assert gpu() == ("ok", "1, driver 550.54.15; CUDA 13 needs driver 580 or newer")
    one_card.setenv("CUDA_VISIBLE_DEVICES", "-1")
    state, detail = gpu()
    assert state == "note" and detail.startswith("1, hidden by CUDA_VISIBLE_DEVICES: the CPU does")


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
