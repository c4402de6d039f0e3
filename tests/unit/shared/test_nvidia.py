"""NVIDIA's cards and driver, as files of the kernel show them."""

from pathlib import Path

import pytest

from hone.commands import doctor
from shared import nvidia

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"


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


@pytest.mark.parametrize(
    ("cards", "driver", "state", "detail"),
    [
        (0, None, "note", "none: the CPU does the work"),
        (2, "580.95.05", "ok", "2, driver 580.95.05; CUDA 13 needs driver 580 or newer"),
        (1, "550.54.15", "fault", "1, driver 550.54.15; CUDA 13 needs driver 580 or newer"),
        (1, None, "note", "1, driver unknown; CUDA 13 needs driver 580 or newer"),
    ],
)
def test_doctor_names_a_driver_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, cards: int, driver: str | None, state: str, detail: str
) -> None:
    monkeypatch.setattr(nvidia, "num_cards", lambda: cards)
    monkeypatch.setattr(nvidia, "driver", lambda: driver)
    (check,) = (check for check in doctor.examine().checks if check.name == "gpu")
    assert (check.state, check.detail) == (state, detail)


def test_a_trainer_does_not_train_on_the_cpu_beside_a_gpu_that_cuda_cannot_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from services.trainer.processes.ranks import has_gpu
    from shared.errors import Failed

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(nvidia, "num_cards", lambda: 1)
    assert torch.version.cuda is None
    assert not has_gpu(), "torch was built for a CPU"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(nvidia, "driver", lambda: "550.54.15")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(Failed) as caught:
        has_gpu()
    assert caught.value.detail == (
        "there are 1 GPU(s) and CUDA 13.0 does not start on them: RuntimeError: The NVIDIA driver "
        "on your system is too old (driver 550.54.15; 580 or newer is needed). To train on the CPU "
        "all the same, set CUDA_VISIBLE_DEVICES to -1"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not has_gpu()
