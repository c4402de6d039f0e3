"""The small graders, with values worked out by hand, and TRL's own function beside ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from services.reward import graders
from services.reward.grading import registry
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import GraderTools
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import ScoreItem


async def values(
    tools: GraderTools,
    grader: str,
    completions: list[str],
    params: dict[str, Any],
    row: dict[str, Any] | None = None,
):
    bound = registry.bind(RewardSpec(grader=grader, params=params), tools)
    parts = await bound.grade(
        [ScoreItem(prompt="", completion=text, row=row or {}) for text in completions]
    )
    return [part.value for part in parts]


LINEAR = {"min": 10, "max": 20, "shape": "linear"}


@pytest.mark.parametrize(
    ("params", "earned"),
    [
        ({"min": 2, "max": 4}, {"a": 0.0, "ab": 1.0, "abc": 1.0, "abcd": 1.0, "abcde": 0.0}),
        (LINEAR, {"": 0.0, "a" * 5: 0.5, "a" * 10: 1.0, "a" * 20: 1.0}),
        (LINEAR, {"a" * 25: 0.75, "a" * 40: 0.0, "a" * 50: 0.0}),
        ({"target": 4}, {"abc": 0.0, "abcd": 1.0, "abcde": 0.0}),
        ({"target": 4, "shape": "linear"}, {"abc": 0.75, "abcde": 0.75}),
        ({"target": 3}, {"äöü": 1.0}),  # characters, not bytes
    ],
)
async def test_length_gives_1_inside_its_range_and_outside_what_its_shape_says(
    scripted_tools: GraderTools, params: dict[str, Any], earned: dict[str, float]
) -> None:
    assert await values(scripted_tools, "length", [*earned], params) == [*earned.values()]


@pytest.mark.parametrize("params", [{}, {"target": 3, "min": 1}, {"min": 5, "max": 4}])
def test_length_refuses_params_that_mean_nothing(
    scripted_tools: GraderTools, params: dict[str, int]
) -> None:
    with pytest.raises(BadRequest, match=r"set either target|expected min <= max"):
        registry.bind(RewardSpec(grader="length", params=params), scripted_tools)


def trl_think_format(texts: list[str]) -> list[float]:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("trl is not installed")
    path = Path(found.submodule_search_locations[0]) / "rewards" / "format_rewards.py"
    spec = importlib.util.spec_from_file_location("trl_format_rewards", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.think_format_reward([[{"content": text}] for text in texts])


THOUGHTS = {
    "<think>\nbecause\n</think>\nso": 1.0,
    "<think></think>so": 1.0,
    "<think>never closed": 0.0,
    "no thought": 0.0,
    " <think>late</think>so": 0.0,
    "so\n<think>after</think>so": 0.0,
    "<think>a<think>b</think>so": 0.0,
    "<think>a</think>so<think>": 0.0,
}
STRICTER = {"<think>a</think>": 0.0, "<think>a</think> \n": 0.0, "<think>a</think>b</think>c": 0.0}


async def test_think_format_agrees_with_trl(scripted_tools: GraderTools) -> None:
    assert await values(scripted_tools, "think_format", list(THOUGHTS), {}) == list(
        THOUGHTS.values()
    )
    assert trl_think_format(list(THOUGHTS)) == list(THOUGHTS.values())


async def test_think_format_wants_an_answer_and_one_end_where_trl_does_not(
    scripted_tools: GraderTools,
) -> None:
    assert await values(scripted_tools, "think_format", list(STRICTER), {}) == [0.0, 0.0, 0.0]
    assert trl_think_format(list(STRICTER)) == [1.0, 1.0, 1.0]


async def test_exact_match_strips_and_ignores_case_as_told(scripted_tools: GraderTools) -> None:
    texts = ["Paris", " Paris\n", "paris", "Paris!"]
    row = {"answer": "Paris"}
    assert await values(scripted_tools, "exact_match", texts, {}, row) == [1.0, 1.0, 0.0, 0.0]
    assert await values(scripted_tools, "exact_match", texts, {"strip": False}, row) == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert await values(scripted_tools, "exact_match", texts, {"ignore_case": True}, row) == [
        1.0,
        1.0,
        1.0,
        0.0,
    ]


async def test_exact_match_takes_whole_numbers_and_refuses_the_rest(
    scripted_tools: GraderTools,
) -> None:
    assert await values(scripted_tools, "exact_match", ["15", "16"], {}, {"answer": 15}) == [
        1.0,
        0.0,
    ]
    with pytest.raises(
        GradingFailed, match=r"column 'answer' is \[1\]; expected text or a whole number"
    ):
        await values(scripted_tools, "exact_match", ["1"], {}, {"answer": [1]})


NEW = """
from services.reward.grading.registry import ItemGrader, Params, grader, right_or_wrong

@grader("test_of_a_new_file")
class Shouts(ItemGrader[Params]):
    async def grade_item(self, item):
        return right_or_wrong(item.completion.isupper())
"""


async def test_a_new_grader_is_one_new_file(
    scripted_tools: GraderTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_of_a_new_file.py").write_text(NEW)
    monkeypatch.setattr(graders, "__path__", [*graders.__path__, str(tmp_path)])
    graders.load()
    bound = registry.bind(RewardSpec(grader="test_of_a_new_file"), scripted_tools)
    (part,) = await bound.grade([ScoreItem(prompt="", completion="HA")])
    assert part.value == 1.0
    assert "test_of_a_new_file" in {info.name for info in registry.infos()}


async def test_an_agent_that_failed_without_room_has_a_missing_reward(
    scripted_tools: GraderTools,
) -> None:
    bound = registry.bind(RewardSpec(grader="environment"), scripted_tools)
    infos = [{"reward": 0.5}, {"reward": None}, {"reward": None, "reward_error": "no room: 400"}]
    parts = await bound.grade([ScoreItem(prompt="", completion="", info=info) for info in infos])
    assert [(part.value, part.verdict, part.detail) for part in parts] == [
        (0.5, "ok", ""),
        (None, "skipped", "the environment gave no reward"),
        (None, "error", "no room: 400"),
    ]
