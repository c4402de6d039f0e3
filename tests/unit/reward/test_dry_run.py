"""`hone submit --dry-run`, as typed, on a real reward service and on no orchestrator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone.cli import app

JOB = """
name = "tried"
model = "any/model"
steps = 1
[data]
train = "{train}"
[[rewards]]
grader = "code_tests"
"""
GOOD = {"prompt": "add", "tests": "assert f(1) == 2"}


def submit(folder: Path, url: str, rows: list[object] | None, *more: str) -> tuple[int, str]:
    train = folder / "rows.jsonl"
    if rows is not None:
        train.write_text("\n".join(map(json.dumps, rows)))
    (folder / "job.toml").write_text(JOB.format(train=train))
    result = CliRunner().invoke(
        app,
        ["submit", str(folder / "job.toml"), "--dry-run", *more],
        env={"HONE_REWARD_URL": url, "HONE_ORCHESTRATOR_URL": "http://127.0.0.1:9"},
        catch_exceptions=False,
    )
    return result.exit_code, " ".join(result.output.split())


def test_a_dry_run_tries_the_rewards_on_the_first_rows(url: str, tmp_path: Path) -> None:
    code, shown = submit(tmp_path, url, [GOOD] * 9)
    assert code == 0
    assert "job 'tried' is valid; its rewards code_tests can grade the first 8 rows" in shown
    code, shown = submit(tmp_path, url, [GOOD], "-o", "json")
    assert (code, json.loads(shown)["rows_tried"]) == (0, 1)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([GOOD, {**GOOD, "tests": "f(1)"}], (), "row 1 of the data: the tests assert nothing"),
        ([{"prompt": "x"}], (), "'tests'"),
        ([{"tests": "x"}], (), "has no column 'prompt' (data.prompt_column); it has tests"),
        ([], (), "has no problems; expected at least one row"),
        ([3], (), "row 1 of"),
        ([GOOD], ("--set", "stepz=1"), "--set 'stepz=1': unknown key 'stepz'"),
    ],
)
def test_a_dry_run_says_what_would_be_refused(
    url: str, tmp_path: Path, rows: list[object], more: tuple[str, ...], message: str
) -> None:
    code, shown = submit(tmp_path, url, rows, *more)
    assert code == 2
    assert message in shown


def test_a_dry_run_says_which_rows_it_cannot_read_here(url: str, tmp_path: Path) -> None:
    code, shown = submit(tmp_path, url, None)
    assert code == 0
    assert "so neither rewards nor rows were tried; nothing was submitted" in shown
