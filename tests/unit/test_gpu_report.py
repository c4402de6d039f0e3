"""The file that `make gpu` writes: what programs print, line by line, and no secret. And that the
page for it has all tests in their order."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import LOOKS, Report, secrets_of

ROOT = Path(__file__).parents[2]


def test_secrets_of_hone_and_of_others_are_left_out() -> None:
    environment = {
        "HONE_TOKEN": "t0ken-of-hone",
        "HONE_REDIS_URL": "redis://:pass@host",
        "HF_TOKEN": "hf_abc",
        "HONE_HOST": "0.0.0.0",
        "WANDB_API_KEY": "",
    }
    assert secrets_of(environment) == {"t0ken-of-hone", "redis://:pass@host", "hf_abc"}


def test_a_report_has_what_a_command_prints_and_how_it_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = io.StringIO()
    report = Report(file, {"abc", "abcdef"})
    code = report.run("both", (sys.executable, "-c", "print('x abcdef y abc'); exit(3)"))
    assert (code, file.getvalue()) == (3, "\n== both\nx *** y ***\n")
    assert capsys.readouterr().out == file.getvalue()
    assert report.run("none", ("no-such-program",)) == 127
    assert file.getvalue().endswith("\n== none\nno-such-program: No such file or directory\n")


def test_tests_without_a_gpu_are_skipped_with_the_reason_and_reported(tmp_path: Path) -> None:
    options = ("--report", tmp_path / "report", "tests/gpu", "-k", "product")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    text = (tmp_path / "report").read_text()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for title, _ in LOOKS:
        assert f"\n== {title}\n" in text
    assert "needs a GPU: none is visible to torch here" in text
    assert f"To send back: {tmp_path / 'report'}" in text


def test_the_page_has_the_files_in_the_order_in_which_they_run() -> None:
    files = sorted(file.name for file in (ROOT / "tests/gpu").glob("test_[0-9]*.py"))
    assert [name.split("_")[1] for name in files] == [str(n) for n in range(1, len(files) + 1)]
    page = (ROOT / "docs/gpu.md").read_text()
    assert re.findall(r"^\| \[`(test_\w+\.py)`\]\(\.\./tests/gpu/\1\)", page, re.M) == files
