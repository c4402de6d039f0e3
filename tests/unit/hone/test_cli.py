"""What the shell takes, before anything is asked of a service."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone import cli, commands
from hone.cli import app
from hone.commands.grade import items_in, steps_of
from hone.shell import REWARDS_ONLY
from hone.stack import control
from shared.errors import BadRequest
from shared.job.file import load_job


def test_python_m_hone_is_the_hone_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "hone", "--version"], capture_output=True)
    assert shown.stdout.startswith(b"hone ")


@pytest.mark.parametrize(("text", "steps"), [("7", (7, 7)), ("3:9", (3, 9))])
def test_steps_are_one_or_a_range(text: str, steps: tuple[int, int]) -> None:
    assert steps_of(text) == steps


@pytest.mark.parametrize("text", ["", "0", "0:4", "-1", "3:", ":4", "a:b", "1:2:3", "1.5"])
def test_what_is_no_range_is_a_sentence(text: str) -> None:
    with pytest.raises(
        BadRequest, match="expected a step such as 7, or a range of them such as 3:9"
    ):
        steps_of(text)


def test_a_file_of_rewards_alone_is_read_as_in_a_job_with_its_functions_inlined(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("def reward(completions):\n    return [1.0]\n")
    (tmp_path / "new.toml").write_text(
        '[[rewards]]\nfile = "mine.py"\n\n[[rewards]]\ngrader = "length"\nweight = 0.1\n'
    )
    mine, length = load_job(tmp_path / "new.toml", REWARDS_ONLY).rewards
    assert (
        mine.source is not None
        and "return [1.0]" in mine.source
        and (length.grader, length.weight) == ("length", 0.1)
    )
    (tmp_path / "bad.toml").write_text('[[rewards]]\ngradr = "length"\n')
    with pytest.raises(BadRequest, match="did you mean 'grader'"):
        load_job(tmp_path / "bad.toml", REWARDS_ONLY)


def test_every_module_of_commands_is_found_without_being_named() -> None:
    modules = {path.stem for path in Path(commands.__path__[0]).glob("*.py")} - {"__init__"}
    homes = {module.rpartition(".")[2] for module, _ in cli.find_commands().values()}
    assert homes == modules
    assert not [name for name in modules if f'"{name}"' in Path(cli.__file__).read_text()]


def test_every_command_is_listed_with_what_it_does_and_says_the_same_itself() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    for name, (_, text) in cli.find_commands().items():
        assert text and f"  {name} " in listed
        own = CliRunner().invoke(app, [name, "--help"], catch_exceptions=False).output
        assert text in " ".join(own.split()), name
    assert "Did you mean 'ls'?" in CliRunner().invoke(app, ["lss"]).output


@pytest.mark.parametrize("name", cli.REPLACED)
def test_an_old_name_is_answered_with_a_command_that_there_is(name: str) -> None:
    done = CliRunner().invoke(app, [name, "a", "--any"])
    assert done.exit_code == 2 and f"no command {name!r}; " in done.output
    named = re.findall(r"`hone (\w+)", cli.REPLACED[name])
    assert {*named} <= cli.find_commands().keys() and name not in cli.find_commands()


def test_a_folder_that_cannot_be_made_is_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert control("up", tmp_path / "file" / "stack") != 0
    assert "no folder can be made at" in (said := capfd.readouterr().err)
    assert "Traceback" not in said


def test_only_a_line_feed_ends_a_line_of_completions(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    path = tmp_path / "completions.jsonl"
    path.write_bytes(f'{{"completion": "{text}"}}\r\n\n{{"completion": "e"}}\n'.encode())
    assert [item.completion for item in items_in(path)] == [text, "e"]
