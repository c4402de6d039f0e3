"""`hone rollouts`: what is asked of the orchestrator, and what a person sees of graded rollouts."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hone.cli import app
from hone.commands import grade, results
from hone.reports import reasons, regrade_table, rollout_table
from shared.job import RewardSpec
from shared.wire import (
    GradedRollout,
    Part,
    RegradedRollout,
    RegradedStep,
    RegradeReport,
    RolloutList,
)

LATE = Part(
    value=0.0, verdict="time_limit", detail="test 3 of 5", stdout="still\x1b[2J here\n", seconds=4.0
)
FAILED = Part(
    value=None, verdict="error", detail="429", errors=("model_grader_server_error",), cached=True
)
PLAIN = Part(value=1.0, seconds=0.1)


def rollout(reward: float | None, completion: str = "7", **parts: Part) -> GradedRollout:
    return GradedRollout(
        prompt_index=0,
        prompt="3+4",
        completion=completion,
        finish_reason="stop",
        versions=(1,),
        reward=reward,
        parts=parts,
        advantage=reward,
    )


def printed(shown: object) -> str:
    console = Console(width=250, file=io.StringIO(), record=True)
    console.print(shown)
    return console.export_text()


class Orchestrator:
    """Answers as `hone.Client` does. `asked`: the methods and arguments of all calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def rollouts(self, job: str, step: int | None, *, limit: int) -> RolloutList:
        self.asked.append(("rollouts", job, step, limit))
        return RolloutList(step=4, rollouts=(rollout(1.0),))

    def held_out(self, job: str, step: int | None, name: str, *, limit: int) -> RolloutList:
        self.asked.append(("held_out", job, step, name, limit))
        answer = rollout(1.0).model_copy(update={"advantage": None})
        return RolloutList(step=8, rollouts=(answer,))


@pytest.fixture
def orchestrator(monkeypatch: pytest.MonkeyPatch) -> Orchestrator:
    fake = Orchestrator()

    monkeypatch.setattr(results, "connect", lambda: contextlib.nullcontext(fake))
    return fake


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["rollouts", "first", *words], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]


def header(shown: str) -> list[str]:
    return cells(next(line for line in shown.splitlines() if "completion" in line))


def test_a_steps_rollouts_have_their_advantages(orchestrator: Orchestrator) -> None:
    code, shown = run("--step", "4")
    assert (code, orchestrator.asked) == (0, [("rollouts", "first", 4, 16)])
    assert shown.splitlines()[0].strip() == "step 4"
    assert header(shown) == ["prompt", "completion", "reward", "advantage", "why"]


def test_held_out_completions_are_titled_and_have_no_advantages(orchestrator: Orchestrator) -> None:
    code, shown = run("--held-out", "-n", "3")
    assert (code, orchestrator.asked) == (0, [("held_out", "first", None, "", 3)])
    assert shown.splitlines()[0].strip() == "held-out problems after step 8"
    assert header(shown) == ["prompt", "completion", "reward", "why"]


def test_a_held_out_set_is_named_by_an_option(orchestrator: Orchestrator) -> None:
    code, shown = run("--eval-set", "hard")
    assert (code, orchestrator.asked) == (0, [("held_out", "first", None, "hard", 16)])
    assert shown.splitlines()[0].strip() == "held-out problems after step 8"


def test_a_grader_that_says_more_has_a_line_of_verdict_reason_output_and_time() -> None:
    assert reasons({"tests": LATE, "judge": FAILED, "form": PLAIN}) == [
        "tests: time_limit; test 3 of 5; printed 'still\\x1b[2J here'; 4.00 s",
        "judge: error; 429; model_grader_server_error; cached",
    ]


def test_a_fork_is_shown_with_its_reason() -> None:
    forked = rollout(1.0).model_copy(update={"forked": ("message 2 has another content",)})
    text = printed(rollout_table(RolloutList(step=1, rollouts=(forked,))))
    assert "forked: message 2 has another content" in text


def test_a_reward_from_one_grader_is_shown_once_and_short() -> None:
    right = Part(value=1.0, detail="evaluated to 7", cached=True)
    listed = RolloutList(
        step=1,
        rollouts=(
            rollout(1.0, python_value=right),
            rollout(0.0, python_value=PLAIN.model_copy(update={"value": 0.0})),
        ),
    )
    text = printed(rollout_table(listed))
    assert cells(text.splitlines()[4]) == ["3+4", "7", "1", "1", "evaluated to 7; cached"]
    half = RolloutList(step=1, rollouts=(rollout(0.5, python_value=right),))
    assert "python_value" in printed(rollout_table(half)), "weighed by a half, it is not the reward"


def test_a_reward_without_a_value_shows_its_verdict() -> None:
    text = printed(
        rollout_table(
            RolloutList(step=4, rollouts=(rollout(None, tests=LATE, judge=FAILED), rollout(1.0)))
        )
    )
    assert "step 4" in text and "time_limit; test 3 of 5" in text
    assert cells(text.splitlines()[4])[:6] == ["3+4", "7", "error", "0", "", ""]


def test_what_a_model_wrote_can_neither_move_the_cursor_nor_style_the_table() -> None:
    text = printed(
        rollout_table(RolloutList(step=1, rollouts=(rollout(1.0, "\x1b[2J[red]x[/red]\r"),)))
    )
    assert "\x1b" not in text and "\r" not in text and "\\x1b[2J[red]x[/red]\\r" in text


def test_a_jobs_rollouts_are_graded_again_by_a_grader_and_its_params(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    class Regrading:
        def regrade(self, *given: object) -> RegradeReport:
            asked.extend(given)
            return RegradeReport(steps=(), examples=())

    monkeypatch.setattr(grade, "connect", lambda: contextlib.nullcontext(Regrading()))
    words = ("grade", "length", "--param", "max=3", "--job", "first", "--step", "3:9", "-n", "2")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "0 of 0 rewards would change" in done.stdout
    rewards = (RewardSpec(grader="length", params={"max": 3}),)
    assert asked == ["first", 3, 9, rewards, 2]


def test_a_regrade_shows_each_step_the_totals_and_the_examples() -> None:
    steps = (
        RegradedStep(
            step=3,
            num_rollouts=8,
            old_reward=0.25,
            new_reward=0.5,
            old_missing=0,
            new_missing=1,
            num_changed=3,
            flipped=(1, 4),
        ),
        RegradedStep(
            step=4,
            num_rollouts=8,
            old_reward=None,
            new_reward=0.5,
            old_missing=8,
            new_missing=0,
            num_changed=8,
            flipped=(0,),
        ),
    )
    example = RegradedRollout(step=3, position=1, old=rollout(0.0), new=rollout(0.75, tests=LATE))
    lines = printed(regrade_table(RegradeReport(steps=steps, examples=(example,)))).splitlines()
    assert cells(lines[3]) == ["3", "8", "0.25", "0.5", "0", "1", "3", "2"]
    assert "11 of 16 rewards would change, and 3 advantages their sign." in [
        line.strip() for line in lines
    ]
    assert any("0.75" in line and "time_limit" in line for line in lines)
    assert "most different" not in printed(regrade_table(RegradeReport(steps=steps, examples=())))
