"""The command of a volume that has to be told: its failure is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import Failed
from shared.host.disk import run_for_volume


def test_the_command_is_run_and_none_is_none(tmp_path: Path) -> None:
    run_for_volume(None, "never")
    run_for_volume(f"touch '{tmp_path}/a b'", "touched")
    assert (tmp_path / "a b").exists()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("sh -c 'echo busy >&2; exit 3'", "exit 3'\" ended with exit code 3: busy$"),
        ("/nowhere/sync", r"seen: '/nowhere/sync' did not finish: .*No such file"),
    ],
)
def test_a_command_that_fails_is_told_with_what_it_said(command: str, sentence: str) -> None:
    with pytest.raises(Failed, match=sentence):
        run_for_volume(command, "seen")
