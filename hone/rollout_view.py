"""Shows stored rollouts: prompts, completions and each grader's verdict.

Prompts, completions and what programs print are the model's: control characters in them never reach
the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from shared.wire import GradedRollout, Part, RegradedRollout, RegradeReport, RolloutList

EXPECTED = ("ok", "wrong")
"""Verdicts that need no explaining."""


def rollout_table(listed: RolloutList, *, held_out: bool = False) -> Table:
    """Returns the rollouts as TRL prints them: prompt, completion, rewards, advantage; and the
    reasons. A grader's value has a column of its own unless it is the reward. Without any
    advantage, as of held-out completions, there is no column of it."""
    names = sorted({name for rollout in listed.rollouts for name in rollout.parts})
    if len(names) == 1 and all(
        part.value == rollout.reward
        for rollout in listed.rollouts
        for part in rollout.parts.values()
    ):
        names = []
    advantages = [
        "\n".join(map(_number, each.turn_advantages)) or _number(each.advantage)
        for each in listed.rollouts
    ]
    has_advantages = any(advantages)
    table = Table(
        "prompt",
        "completion",
        *map(shown, names),
        "reward",
        *(["advantage"] if has_advantages else []),
        "why",
        title=f"held-out problems after step {listed.step}" if held_out else f"step {listed.step}",
    )
    for rollout, advantage in zip(listed.rollouts, advantages, strict=True):
        table.add_row(
            shown(prompt_text(rollout)),
            shown(rollout.completion),
            *(_part(rollout.parts.get(name)) for name in names),
            _number(rollout.reward),
            *([advantage] if has_advantages else []),
            shown("\n".join([*reasons(rollout.parts), *map("forked: {}".format, rollout.forked)])),
        )
    return table


def regrade_table(report: RegradeReport) -> Group:
    """Returns the differences of a regrade, step by step, and the rollouts whose reward differs
    most."""
    steps = Table(
        "step",
        "rollouts",
        "reward",
        "would be",
        "missing",
        "would be",
        "rewards change",
        "advantages flip",
    )
    for step in report.steps:
        steps.add_row(
            str(step.step),
            str(step.num_rollouts),
            _number(step.old_reward),
            _number(step.new_reward),
            str(step.old_missing),
            str(step.new_missing),
            str(step.num_changed),
            str(len(step.flipped)),
        )
    changed, total = (
        sum(step.num_changed for step in report.steps),
        sum(step.num_rollouts for step in report.steps),
    )
    flipped = sum(len(step.flipped) for step in report.steps)
    sentence = f"{changed} of {total} rewards would change, and {flipped} advantages their sign."
    return Group(steps, sentence, *([_examples(report.examples)] if report.examples else []))


def _examples(examples: tuple[RegradedRollout, ...]) -> Table:
    table = Table(
        "step",
        "prompt",
        "completion",
        "reward",
        "would be",
        "advantage",
        "would be",
        "why",
        title="most different",
    )
    for example in examples:
        table.add_row(
            str(example.step),
            shown(prompt_text(example.new)),
            shown(example.new.completion),
            _number(example.old.reward),
            _number(example.new.reward),
            _number(example.old.advantage),
            _number(example.new.advantage),
            shown("\n".join(reasons(example.new.parts))),
        )
    return table


def reasons(parts: Mapping[str, Part]) -> list[str]:
    """Returns a line for each grader that had more to say than a number: verdict (unless it is
    "ok"), detail, errors, what was printed, and time. A line begins with the grader's name if there
    are several graders."""
    lines: list[str] = []
    for name, part in parts.items():
        facts = [
            part.detail,
            *part.errors,
            f"printed {part.stdout.strip()!r}" if part.stdout.strip() else "",
        ]
        if any(facts) or part.verdict not in EXPECTED:
            took = "cached" if part.cached else f"{part.seconds:.2f} s"
            verdict = "" if part.verdict == "ok" else part.verdict
            told = "; ".join(fact for fact in (verdict, *facts, took) if fact)
            lines.append(f"{name}: {told}" if len(parts) > 1 else told)
    return lines


def prompt_text(rollout: GradedRollout) -> str:
    if isinstance(rollout.prompt, str):
        return rollout.prompt.strip()
    return str(rollout.prompt[-1].get("content", ""))


def shown(text: str) -> str:
    """Returns the text with control characters as escapes such as `\\x1b`, and without meaning as
    markup."""
    return escape(
        "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
    )


def _part(part: Part | None) -> str:
    return "" if part is None else part.verdict if part.value is None else _number(part.value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
