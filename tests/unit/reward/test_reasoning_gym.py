"""The grader `reasoning_gym`: the package's own scores, of answers that are no programs."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from services.reward.graders.reasoning_gym import reference_of
from services.reward.grading import registry
from services.reward.grading.failures import GradingFailed
from services.reward.job_code import inside_reasoning_gym
from services.reward.sandbox.local import LocalSandbox
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem
from tests.support.reward_helpers import tools_of

SLOTS = 1

FEW = ("chain_sum", "spiral_matrix", "countdown", "word_sorting", "graph_color")
"""Of each way to grade: text, `eval`, sympy, a configuration with an enum, no single answer."""

WITHOUT_ANSWER = {"boxnet", "rush_hour"}
"""Tasks whose problems have neither an answer nor an example of one."""

TRUE_FOR_ANY_TEXT = {"game_of_life_halting"}
"""The package compares the truth of two texts, so that any text is right (0.1.25)."""


@pytest.fixture
def package() -> Iterator[Any]:
    yield pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


def entry_of(package: Any, task: str, index: int = 0, **options: Any) -> str:
    made = package.create_dataset(task, seed=1, size=index + 1, **options)[index]
    kept = {key: made[key] for key in ("question", "answer", "metadata")}
    return repr({"task": task, "config": options} | kept)


async def grade(sandbox: LocalSandbox, entry: str, *completions: str) -> list[Part]:
    bound = registry.bind(RewardSpec(grader="reasoning_gym"), tools_of(sandbox))
    items = [ScoreItem(prompt="", completion=each, row={"entry": entry}) for each in completions]
    try:
        return [*await bound.grade(items)]
    finally:
        await bound.close()


async def test_answers_are_scored_by_their_task_in_the_sandbox(
    package: Any, sandbox: LocalSandbox
) -> None:
    entry = entry_of(package, "chain_sum")
    answer = ast.literal_eval(entry)["answer"]
    parts = await grade(
        sandbox,
        entry,
        f"<answer>{answer}</answer>",
        f"<answer>1</answer> no: <answer> {answer} </answer>",
        f"<think>{answer}</think>",
        "garbage",
    )
    assert [part.value for part in parts][:2] == [1.0, 1.0]
    assert all((part.value or 0) < 1 for part in parts[2:])


async def test_a_program_as_an_answer_is_not_run(package: Any, sandbox: LocalSandbox) -> None:
    matrix = entry_of(package, "spiral_matrix")
    target = entry_of(package, "countdown")
    attacks = [
        "__import__('os')._exit(1)",
        "[].__class__.__base__.__subclasses__()",
        "[x for x in (1,)]",
        "9**9**9**9",
    ]
    for entry, given in ((matrix, attacks), (target, attacks[:3])):
        parts = await grade(sandbox, entry, *(f"<answer>{each}</answer>" for each in given))
        assert all(part.value is not None and part.value < 0.1 for part in parts), parts


async def test_an_expression_of_sympy_is_still_read(package: Any, sandbox: LocalSandbox) -> None:
    entry = entry_of(package, "simple_integration")
    answer = ast.literal_eval(entry)["answer"]
    (part,) = await grade(sandbox, entry, f"<answer>{answer} + sqrt(4) - 2</answer>")
    assert part.value == 1.0


async def test_a_row_that_is_no_problem_is_refused(sandbox: LocalSandbox) -> None:
    bound = registry.bind(RewardSpec(grader="reasoning_gym"), tools_of(sandbox))
    for wrong in ("garbage", "{}", 5, None, "__import__('os')"):
        with pytest.raises(GradingFailed, match="expected a problem as"):
            await bound.check_row({"entry": wrong})


async def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bound = registry.bind(RewardSpec(grader="reasoning_gym"), tools_of(sandbox))
    with pytest.raises(BadRequest, match=r"pip install 'hone-rl\[reasoning-gym\]'"):
        await bound.check(["entry"])
    with pytest.raises(BadRequest, match="no column 'entry'"):
        await bound.check(["prompt"])


def _all_tasks() -> list[str]:
    try:
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return []
    return sorted({*DATASETS} - {"composite", *FEW})


@pytest.mark.parametrize(
    "task", [*FEW, *(pytest.param(one, marks=pytest.mark.compat) for one in _all_tasks())]
)
async def test_a_right_answer_earns_1_and_garbage_earns_less(package: Any, task: str) -> None:
    from services.orchestrator.data.generated import ProblemSet, rows_of
    from shared.job import ReasoningGymSpec

    asked = ProblemSet("data.train", task, ReasoningGymSpec(size=3), 1, is_held_out=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [*rows_of(asked)]
    assert len(rows) == 3
    for row in rows:
        entry = ast.literal_eval(row["entry"])
        right = reference_of(entry)
        assert (right is None) == (task in WITHOUT_ANSWER)
        given = [*([right] if right else []), "<answer>no answer at all</answer>"]
        scores = [
            value for value, _ in inside_reasoning_gym.score(given, [row["entry"]] * len(given))
        ]
        assert scores[:-1] == [1.0] * (len(given) - 1) and (
            scores[-1] < 1 or task in TRUE_FOR_ANY_TEXT
        ), (task, given, scores)
