"""Registry and scoring: names, params, columns, weights, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from services.reward.grading import registry
from services.reward.grading.registry import (
    Column,
    Grader,
    GraderTools,
    ItemGrader,
    Params,
    grader,
)
from services.reward.grading.scoring import SAMPLER_FAILED, Scorer
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import (
    Execution,
    Part,
    Prompt,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    ValidateRequest,
)
from tests.support.reward_helpers import ScriptedSandbox, scripted, tools_of


class EchoParams(Params):
    column: Column = "reward"


@grader("test_column")
class ColumnGrader(Grader[EchoParams]):
    """Returns what the row says."""

    async def grade(self, items: Sequence[ScoreItem]) -> list[Part]:
        return [_part(item.row[self.params.column]) for item in items]


def _part(value: float | str) -> Part:
    return Part(value=None, verdict=value) if isinstance(value, str) else Part(value=value)  # type: ignore[arg-type]


@grader("test_shouts")
class Shouts(ItemGrader[Params]):
    """1 for a completion in capitals; nothing to say of an empty one."""

    async def grade_item(self, item: ScoreItem) -> Part:
        if not item.completion:
            return Part(value=None, verdict="skipped")
        return Part(value=float(item.completion.isupper()))


def item(completion: str = "A", finish_reason: str = "stop", **row: object) -> ScoreItem:
    return ScoreItem(prompt="", completion=completion, finish_reason=finish_reason, row=row)  # type: ignore[arg-type]


def request(items: list[ScoreItem], *specs: RewardSpec) -> ScoreRequest:
    return ScoreRequest(items=tuple(items), rewards=specs)


async def score(request: ScoreRequest, tools: GraderTools) -> ScoreResult:
    """The result without its times."""
    result = await Scorer(tools).score(request)
    untimed = [
        {label: part.model_copy(update={"seconds": 0.0}) for label, part in one.parts.items()}
        for one in result.scores
    ]
    return ScoreResult(
        scores=tuple(
            one.model_copy(update={"parts": parts})
            for one, parts in zip(result.scores, untimed, strict=True)
        )
    )


BY_ROW = RewardSpec(grader="test_column", weight=0.5)
SHOUTS = RewardSpec(grader="test_shouts", weight=2.0, name="loud")


async def test_a_score_is_the_weighted_sum_of_its_parts(scripted_tools: GraderTools) -> None:
    result = await score(
        request([item("A", reward=3.0), item("a", reward=1.0)], BY_ROW, SHOUTS), scripted_tools
    )
    assert [score.value for score in result.scores] == [0.5 * 3 + 2 * 1, 0.5 * 1 + 2 * 0]
    assert result.scores[0].parts == {"test_column": Part(value=3.0), "loud": Part(value=1.0)}


async def test_a_skipped_part_does_not_count_and_all_skipped_is_no_score(
    scripted_tools: GraderTools,
) -> None:
    items = [item("", reward=3.0), item("", reward="skipped")]
    result = await score(request(items, BY_ROW, SHOUTS), scripted_tools)
    assert [score.value for score in result.scores] == [1.5, None]


async def test_one_missing_part_makes_the_whole_score_missing(scripted_tools: GraderTools) -> None:
    result = await score(request([item("A", reward="error")], BY_ROW, SHOUTS), scripted_tools)
    assert result.scores[0].value is None
    assert result.scores[0].parts["loud"].value == 1.0


async def test_a_failed_completion_is_never_graded(scripted_tools: GraderTools) -> None:
    result = await score(
        request([item("A", "error", reward=1.0), item("A", reward=1.0)], SHOUTS), scripted_tools
    )
    assert result.scores[0] == Score(value=None, parts={"loud": SAMPLER_FAILED})
    assert result.scores[1].value == 2.0


async def test_a_failing_sandbox_is_a_missing_reward_and_not_zero() -> None:
    tools = tools_of(
        ScriptedSandbox(Execution(verdict="sandbox_error", stderr="the sandbox failed twice: gone"))
    )
    result = await score(request([item("1", target=1)], RewardSpec(grader="python_value")), tools)
    assert result.scores[0].value is None
    part = result.scores[0].parts["python_value"]
    assert (part.value, part.verdict, part.detail) == (
        None,
        "sandbox_error",
        "the sandbox failed twice: gone",
    )
    assert part.errors == ("python_grader_server_error",)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RewardSpec(grader="exact_mach"), "no grader 'exact_mach'; did you mean 'exact_match'?"),
        (
            RewardSpec(grader="exact_match", params={"colum": "answer"}),
            "unknown key 'colum'; did you mean 'column'?",
        ),
        (
            RewardSpec(grader="python_value", params={"timeout_s": "long"}),
            "'timeout_s': got 'long'; input should be a valid number",
        ),
        (
            RewardSpec(grader="exact_match", params={"column": "answr"}),
            "reward 'exact_match': no column 'answr'; columns are answer, prompt; did you mean "
            "'answer'? (param 'column')",
        ),
        (
            RewardSpec(grader="think_format", params={"x": 1}),
            "params of reward 'think_format': unknown key 'x'",
        ),
        (
            RewardSpec(grader="function", file="mine.py"),
            "the text of 'mine.py' must be sent along as 'source'",
        ),
    ],
)
async def test_a_mistake_in_a_reward_is_named_with_the_nearest_right_thing(
    scripted_tools: GraderTools, spec: RewardSpec, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await Scorer(scripted_tools).check([spec], ["prompt", "answer"])
    assert message in caught.value.detail


@pytest.mark.parametrize(
    ("grader", "params", "row", "message"),
    [
        ("math", {}, {"answer": None}, "column 'answer' is None; expected a number or text"),
        ("exact_match", {}, {"answer": [1]}, "column 'answer' is [1]; expected text or a whole"),
        ("regex", {"pattern": "x", "column": "answer"}, {"answer": None}, "is None; expected text"),
        ("python_value", {"numbers": "n"}, {"target": 3, "n": "1 2"}, "column 'n' is '1 2'; exp"),
        ("python_value", {"numbers": "n"}, {"target": "3", "n": [3]}, "column 'target' is '3'; e"),
    ],
)
async def test_a_row_that_no_completion_could_be_graded_by_is_refused_before_training(
    scripted_tools: GraderTools,
    grader: str,
    params: dict[str, Any],
    row: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(BadRequest) as caught:
        await Scorer(scripted_tools).check(
            [RewardSpec(grader=grader, params=params)],
            [*row],
            [Prompt(index=3, content="", row=row)],
        )
    assert caught.value.detail.startswith(f"reward {grader!r}, row 3 of the data: ")
    assert message in caught.value.detail


async def test_a_column_that_only_some_rows_have_is_not_there(scripted_tools: GraderTools) -> None:
    with pytest.raises(BadRequest, match="no column 'reward'; there are no columns"):
        await score(request([item(reward=1.0), item()], BY_ROW), scripted_tools)


async def test_two_rewards_of_one_name_are_refused(scripted_tools: GraderTools) -> None:
    with pytest.raises(BadRequest, match="two rewards are called 'test_shouts'"):
        await Scorer(scripted_tools).check([RewardSpec(grader="test_shouts")] * 2, [])


async def test_job_code_is_refused_where_the_settings_forbid_it() -> None:
    with pytest.raises(BadRequest, match="HONE_ALLOW_JOB_CODE=false"):
        await Scorer(scripted(allow_job_code=False)).check(
            [RewardSpec(source="def reward(completions): ...")], []
        )


def test_listings_show_the_params_of_graders() -> None:
    params = {info.name: set(info.params["properties"]) for info in registry.infos()}
    assert params["exact_match"] == {"column", "strip", "ignore_case"}
    assert params["python_value"] == {
        "target",
        "numbers",
        "cpu_s",
        "timeout_s",
        "memory_mib",
        "tolerance",
    }
    assert params["think_format"] == set()
    assert params["function"] == {"timeout_s"}


def test_a_name_can_be_taken_once() -> None:
    with pytest.raises(ValueError, match="two graders are called 'length'"):
        grader("length")(Shouts)


async def test_a_request_of_too_many_verdicts_is_refused(scripted_tools: GraderTools) -> None:
    rewards = [RewardSpec(grader="test_shouts", name=str(number)) for number in range(17)]
    with pytest.raises(BadRequest) as refused:
        await score(request([item("A")] * 4096, *rewards), scripted_tools)
    assert "4096 completions by 17 rewards; at most 65536 verdicts" in refused.value.detail


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rewards", [SHOUTS] * 65),
        ("columns", ["a"] * 4097),
        ("prompts", [Prompt(index=0, content="", row={})] * 65),
    ],
)
def test_a_request_to_validate_is_bounded(field: str, value: list[object]) -> None:
    body: dict[str, object] = {"rewards": [SHOUTS], "columns": []}
    assert ValidateRequest.model_validate(body).rewards == (SHOUTS,)
    with pytest.raises(ValidationError) as refused:
        ValidateRequest.model_validate(body | {field: value})
    assert [error["type"] for error in refused.value.errors()] == ["too_long"]
