"""Whether the folder of runs can be written."""

import os
import threading
from pathlib import Path

import pytest

from services.orchestrator import writable
from services.orchestrator.writable import RunsDirCheck, make_runs_dir, why_not_writable
from shared.errors import Failed


def test_a_folder_that_can_be_written_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a-run").mkdir()

    assert why_not_writable(tmp_path) is None
    assert os.listdir(tmp_path) == ["a-run"]  # noqa: PTH208


def test_a_folder_that_is_missing_stays_missing(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"

    assert why_not_writable(runs_dir) == (
        f"folder {str(runs_dir)!r} does not exist; mount its volume, or check HONE_RUNS_DIR"
    )
    assert not runs_dir.exists()


def test_the_folder_is_made_in_one_that_is_there(tmp_path: Path) -> None:
    make_runs_dir(tmp_path / "runs")
    make_runs_dir(tmp_path / "runs")

    assert why_not_writable(tmp_path / "runs") is None


def test_the_folder_is_not_made_where_the_one_above_is_missing(tmp_path: Path) -> None:
    runs_dir = tmp_path / "volume/runs"

    with pytest.raises(Failed) as refusal:
        make_runs_dir(runs_dir)
    assert refusal.value.detail == (
        f"cannot write to folder {str(runs_dir)!r}: No such file or directory; check HONE_RUNS_DIR"
    )
    assert not (tmp_path / "volume").exists()


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    runs_dir.write_text("a file")

    assert why_not_writable(runs_dir) == (
        f"cannot write to folder {str(runs_dir)!r}: Not a directory; check HONE_RUNS_DIR"
    )


async def test_a_folder_that_hangs_is_said_to_take_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(writable, "why_not_writable", lambda _: answers.wait(60))

    assert await RunsDirCheck(tmp_path, answers_within_s=0.05).why_not() == (
        f"folder {str(tmp_path)!r} could not be written within 0.05 s; check HONE_RUNS_DIR "
        "and its disk"
    )
    answers.set()
