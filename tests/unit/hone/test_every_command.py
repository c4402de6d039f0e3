"""What holds for every command: -o json, the exit codes of docs/commands.md, a place on that
page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hone import cli, shell
from hone.cli import app
from shared.host.processes import free_port

PAGE = Path(__file__).parents[3] / "docs/commands.md"

JOB = """
name = "a"
model = "owner/model"
steps = 1
data.train = "owner/data"
rewards = [{ grader = "length", params = { max = 9 } }]
"""

ASKING = (
    *("cancel a", "doctor a", "download a", "download a --list", "eval m --data FILE"),
    *("grade --job a --step 1 --reward JOB", "keys create a", "keys list", "keys revoke a"),
    *("logs a", "ls", "ls a", "metrics a b", "metrics a --plot", "pause a", "recover"),
    *("resume a", "rm a", "rollouts a", "submit JOB"),
)
"""Commands that ask a service, each with arguments."""

OTHERS = {
    "doctor",
    "down",
    "explain",
    "import",
    "init",
    "modal",
    "plan",
    "run",
    "up",
    "view",
    "work",
}
"""Commands that start what they need, need none, or wait for it without an end."""


def commands() -> Iterator[tuple[str, Any]]:
    whole: Any = typer.main.get_command(app)
    for name in whole.list_commands(None):
        command = whole.get_command(None, name)
        inner = getattr(command, "commands", None)
        yield from (
            ((f"{name} {each}", inner[each]) for each in inner) if inner else [(name, command)]
        )


def test_every_command_has_json_for_programs() -> None:
    options = {
        name: [each.opts for each in command.params if "-o" in each.opts]
        for name, command in commands()
    }
    assert (
        len(options) > 28
        and {name for name, own in options.items() if own != [["-o", "--output"]]} == set()
    )


@pytest.mark.parametrize("line", ASKING)
def test_a_command_ends_with_2_and_a_sentence_if_no_service_answers(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "JOB").write_text(JOB)
    (tmp_path / "FILE").write_text('{"prompt": "a"}\n')
    nobody = f"http://127.0.0.1:{free_port()}"
    env = {"HONE_ORCHESTRATOR_URL": nobody, "HONE_PATIENCE_S": "1"}
    done = CliRunner().invoke(app, line.split(), env=env)
    said = done.stderr.splitlines()[-1]
    assert (done.exit_code, done.stdout) == (shell.WRONG, "")
    assert said.startswith("hone: ") and nobody.removeprefix("http://") in said


def test_every_command_is_asked_or_needs_no_service() -> None:
    assert {line.split()[0] for line in ASKING} | OTHERS == cli.find_commands().keys()


@pytest.mark.parametrize("name", cli.find_commands())
def test_a_command_ends_with_2_for_an_option_that_there_is_not(name: str) -> None:
    assert CliRunner().invoke(app, [name, "--nothing-like-it"]).exit_code == shell.WRONG


def test_the_page_of_commands_has_each_of_them_and_the_exit_codes() -> None:
    page = PAGE.read_text()
    assert {name for name in cli.find_commands() if f"`hone {name}" not in page} == set()
    codes = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    own = (shell.FAILED, shell.WRONG, shell.PAUSED, shell.INTERRUPTED)
    assert [int(code) for code in codes] == [0, *own]
