"""`hone grade`, as typed: on a service that it starts for the call, and on a running one."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from hone.cli import app

pytestmark = pytest.mark.slow

OWN = """
import hone
class Lines(hone.Reward):
    def score(self, prompt, completion, wanted):
        print("looking at", completion)
        return completion.count("\\n") == wanted, f"{prompt} gave {completion.count(chr(10))}"
def fails(completions):
    raise RuntimeError("no way")
"""

REWARDS = """
[[rewards]]
grader = "exact_match"
weight = 2.0
[[rewards]]
file = "own.py"
function = "Lines"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "rewards.toml").write_text(REWARDS)
    return tmp_path


def run(typed: str, url: str | None = None, stdin: str | None = None) -> Result:
    environment = {"HONE_REWARD_URL": url} if url else {}
    return CliRunner().invoke(
        app, ["grade", *shlex.split(typed)], input=stdin, env=environment, catch_exceptions=False
    )


def grade(typed: str, url: str | None = None, stdin: str | None = None) -> tuple[int, str]:
    """Returns the exit code, and the result or the error; on stderr may also be the progress."""
    result = run(typed, url, stdin)
    return result.exit_code, result.stdout or result.stderr


def test_a_grader_is_tried_without_any_service_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.stack.read", lambda _folder: {"reward": "http://127.0.0.1:9"})
    typed = """exact_match --param column=answer --completion 42 --row '{"answer": "42"}' -o json"""
    code, shown = grade(typed)
    score = json.loads(shown)
    assert (code, score["value"], score["parts"]["exact_match"]["verdict"]) == (0, 1.0, "ok")


def test_a_class_of_ones_own_is_shown_with_what_it_printed(url: str, folder: Path) -> None:
    row = """'{"prompt": "Q", "wanted": 1}'"""
    typed = f"--file {folder}/own.py --function Lines --row {row}"
    code, shown = grade(typed, url, stdin="a\nb")
    assert code == 0
    assert [line.split() for line in shown.splitlines()[1:3]] == [
        ["Lines", "1", "ok", shown.split()[8], "Q", "gave", "1"],
        ["it", "printed:", "looking", "at", "a"],
    ]


def test_all_rewards_of_a_file_are_summed(url: str, folder: Path) -> None:
    row = json.dumps({"answer": "x", "wanted": 0})
    code, shown = grade(f"--reward {folder}/rewards.toml --completion x --row '{row}' -o json", url)
    assert (code, json.loads(shown)["value"]) == (0, 3.0)


def test_no_reward_is_code_1_and_says_why(url: str, folder: Path) -> None:
    code, shown = grade(f"--file {folder}/own.py --function fails --completion ''", url)
    assert code == 1
    assert "own.py line 8: RuntimeError: no way" in shown
    assert "python_grader_runtime_error" in shown


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "name one of: a grader, --file with your own function, --reward"),
        ("length --file x.py", "name one of"),
        ("length --completion x --row [1]", "expected a JSON object"),
        ("length --completion x --row {", "--row is '{'; expected a JSON object"),
        ("length --completion x --param max", "--param 'max': expected KEY=VALUE"),
        ("length --completion x --param mx=3", "unknown key 'mx'; did you mean 'max'?"),
        ("lenth --completion x", "no grader 'lenth'; did you mean 'length'?"),
        ("--file nowhere.py --completion x", "no Python file at 'nowhere.py'"),
    ],
)
def test_a_mistake_is_a_sentence_and_code_2(url: str, typed: str, message: str) -> None:
    code, shown = grade(typed, url)
    assert code == 2
    assert message in shown


def test_grading_that_takes_long_says_so(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.shell.SAYING_S", 0.2)
    (folder / "own.py").write_text(
        "import time\ntime.sleep(1)\ndef reward(completions):\n    return [1.0]\n"
    )
    result = run(f"--file {folder}/own.py --completion x", url)
    assert result.exit_code == 0 and "grading, 0 s\n" in result.stderr


def test_a_named_service_that_is_unreachable_is_not_replaced() -> None:
    code, shown = grade("length --completion x --param max=3", "http://127.0.0.1:9")
    assert code == 2
    assert "cannot reach the reward service at http://127.0.0.1:9" in shown


def test_its_service_ends_though_the_command_is_killed() -> None:
    code = (
        "import sys\nfrom hone.reward_service import start_service\n"
        "with start_service() as (url, _):\n    print(url, flush=True)\n    sys.stdin.read()"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert command.stdout
    url = urlsplit(command.stdout.readline().strip())
    with socket.create_connection((str(url.hostname), url.port or 0)):
        pass
    command.kill()
    command.communicate()
    with pytest.raises(ConnectionRefusedError):
        for _ in range(100):
            socket.create_connection((str(url.hostname), url.port or 0)).close()
            time.sleep(0.1)


def test_a_file_of_completions_is_graded_row_by_row_with_the_mean(folder: Path) -> None:
    lines = [
        {"prompt": "a", "completion": "x\n", "answer": "y", "wanted": 1},
        {"completion": "y", "answer": "y", "wanted": 1},
    ]
    file = folder / "completions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    own = f"--reward {folder}/rewards.toml --completions {file}"
    code, shown = grade(f"{own} -o json")
    graded = json.loads(shown)
    assert code == 0 and (graded["mean"], graded["num_missing"]) == (1.5, 0)  # 1 and 2 * 1
    assert [score["value"] for score in graded["scores"]] == [1.0, 2.0]
    assert graded["scores"][0]["parts"]["Lines"]["detail"] == "a gave 1"
    _, shown = grade(own)
    assert [line.split() for line in shown.splitlines()[-3:]] == [
        ["1", "0", "1", "1", "wanted", "'y';", "a", "gave", "1"],
        ["2", "1", "0", "2", "gave", "0"],
        ["mean", "1.5"],
    ]


def test_a_line_without_a_completion_is_named(folder: Path) -> None:
    file = folder / "completions.jsonl"
    file.write_text('{"completion": "a"}\n[1]\n')
    code, shown = grade(f"exact_match --completions {file}")
    assert code == 2 and "line 2 is '[1]'; expected a JSON object of the row's columns" in shown
    file.write_text('{"answer": "a"}\n')
    code, shown = grade(f"exact_match --completions {file}")
    assert code == 2 and "in a file with the text `completion`" in shown
