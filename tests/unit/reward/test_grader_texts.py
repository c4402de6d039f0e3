"""The graders of texts: `regex`, `overlong`, OpenAI's `string_check`, `text_similarity` and
`python`, with values by hand."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Any

import pytest

from services.reward.grading import registry, templates
from services.reward.grading.failures import GradingFailed
from services.reward.grading.limited.texts import similarity
from services.reward.grading.registry import GraderTools
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Execution, Part, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, scripted, tools_of

pytestmark = pytest.mark.slow


async def grade(
    tools: GraderTools,
    grader: str,
    completion: str,
    row: dict[str, Any] | None = None,
    **params: Any,
) -> Part:
    bound = registry.bind(RewardSpec(grader=grader, params=params), tools)
    await bound.check(list(row or {}))
    (part,) = await bound.grade([ScoreItem(prompt="", completion=completion, row=row or {})])
    return part


@pytest.mark.parametrize(
    ("params", "completion", "value"),
    [
        ({"pattern": r"\d+"}, "a 12 b", 1.0),
        ({"pattern": r"\d+"}, "none", 0.0),
        ({"pattern": r"\d+", "mode": "full"}, " 12\n", 1.0),
        ({"pattern": r"\d+", "mode": "full"}, "12 b", 0.0),
        ({"pattern": "YES", "ignore_case": True}, "yes", 1.0),
        ({"pattern": "^b$"}, "a\nb\nc", 0.0),
        ({"pattern": "^b$", "multiline": True}, "a\nb\nc", 1.0),
        ({"pattern": "a.b", "dotall": True}, "a\nb", 1.0),
        (
            {"pattern": r"answer: (\w+)", "group": 1, "column": "answer"},
            "answer: A, no, answer: B ",
            1.0,
        ),
        (
            {"pattern": r"answer: (\w+)", "group": 1, "column": "answer", "which": "first"},
            "answer: A, no, answer: B",
            0.0,
        ),
        ({"pattern": r"answer: (?P<x>\w+)", "group": "x", "column": "answer"}, "answer: A", 0.0),
        ({"pattern": r"(a)|(b)", "group": 2, "column": "answer"}, "a", 0.0),
    ],
)
async def test_regex_finds_the_pattern_and_compares_its_group(
    scripted_tools: GraderTools, params: dict[str, Any], completion: str, value: float
) -> None:
    assert (
        await grade(scripted_tools, "regex", completion, {"answer": "B"}, **params)
    ).value == value


async def test_a_catastrophic_pattern_is_stopped_and_earns_nothing(
    scripted_tools: GraderTools,
) -> None:
    part = await grade(
        scripted_tools, "regex", "a" * 60 + "b", pattern=r"^(?:a|a|aa)+$", timeout_s=0.2
    )
    assert (part.value, part.verdict, part.detail) == (
        0.0,
        "time_limit",
        "the pattern took longer than 0.2 s",
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"pattern": "("}, r"is no regular expression: missing \)"),
        ({"pattern": "(a)", "group": 2}, "group 2 is not in pattern '\\(a\\)', which has 1 groups"),
        ({"pattern": "(a)", "group": "x"}, "group 'x' is not in pattern"),
        ({"pattern": ""}, "at least 1 character"),
        ({"pattern": "a{1000000000}"}, "cannot be compiled within 2 s and 1024 MiB"),
        ({"pattern": "(" * 900 + ")" * 900}, "is no regular expression: maximum recursion"),
    ],
)
async def test_regex_refuses_a_pattern_that_cannot_work(
    scripted_tools: GraderTools, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        await registry.bind(RewardSpec(grader="regex", params=params), scripted_tools).check([])


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    [(0, 0.0), (800, 0.0), (801, -0.01), (850, -0.5), (900, -1.0), (901, -1.0), (5000, -1.0)],
)
async def test_overlong_is_equation_13_of_dapo(
    scripted_tools: GraderTools, num_tokens: int, value: float
) -> None:
    for penalty in (1.0, 0.5):
        params = {"max_tokens": 900, "buffer_tokens": 100, "penalty": penalty}
        bound = registry.bind(RewardSpec(grader="overlong", params=params), scripted_tools)
        (part,) = await bound.grade([ScoreItem(prompt="", completion="x", num_tokens=num_tokens)])
        assert part.value == pytest.approx(penalty * value)


async def test_overlong_without_a_count_is_missing_and_a_buffer_of_nothing_is_a_step(
    scripted_tools: GraderTools,
) -> None:
    bound = registry.bind(
        RewardSpec(grader="overlong", params={"max_tokens": 9, "buffer_tokens": 0}), scripted_tools
    )
    with pytest.raises(GradingFailed, match="num_tokens"):
        await bound.grade([ScoreItem(prompt="", completion="x")])
    counts = [ScoreItem(prompt="", completion="x", num_tokens=count) for count in (9, 10)]
    assert [(await bound.grade([item]))[0].value for item in counts] == [0.0, -1.0]
    with pytest.raises(BadRequest, match="buffer_tokens is 10 and max_tokens 9"):
        registry.bind(
            RewardSpec(grader="overlong", params={"max_tokens": 9, "buffer_tokens": 10}),
            scripted_tools,
        )


@pytest.mark.parametrize(
    ("operation", "completion", "value"),
    [
        ("eq", "Paris", 1.0),
        ("eq", "paris", 0.0),
        ("ne", "paris", 1.0),
        ("like", "It is Paris.", 1.0),
        ("like", "It is paris.", 0.0),
        ("ilike", "It is paris.", 1.0),
        ("ilike", "It is Rome.", 0.0),
    ],
)
async def test_string_check_compares_as_openai_says(
    scripted_tools: GraderTools, operation: str, completion: str, value: float
) -> None:
    params = {
        "type": "string_check",
        "name": "n",
        "input": "{{ sample.output_text }}",
        "reference": "{{item.answer.text}}",
    }
    row = {"answer": {"text": "Paris"}}
    assert (
        await grade(scripted_tools, "string_check", completion, row, operation=operation, **params)
    ).value == value


async def test_a_template_is_filled_once_and_says_what_it_lacks(
    scripted_tools: GraderTools,
) -> None:
    params = {"reference": "{{ item.a }}{{ item.b }}", "operation": "eq"}
    row = {"a": "{{ item.b }}", "b": [1, "ü"]}
    part = await grade(
        scripted_tools,
        "string_check",
        '{{ item.b }}[1, "ü"]',
        row,
        input="{{ sample.output_text }}",
        **params,
    )
    assert part.value == 1.0
    assert (
        templates.render("{{item.a}} {{ item.b }}", ScoreItem(prompt="", completion="", row=row))
        == '{{ item.b }} [1, "ü"]'
    )
    for template, message in (
        ("{{ item.c }}", "no column 'c'; columns are a, b"),
        ("{{ sample.text }}", "names nothing; expected item.<column> or sample.output_text"),
        ("{{ 7 * 7 }}", "names nothing"),
        ("{{ item.a", r"'{{ item.a', at character 1 of a template, is not closed"),
        ("a {{ item.a }} {{ {{ item.b }}", r"'{{ {{ item.b }}', at character 16 of"),
        ("{{ item.a }}: {{ item.b }", "at character 15 of a template, is not closed"),
    ):
        with pytest.raises(BadRequest, match=message):
            await grade(scripted_tools, "string_check", "x", row, input=template, **params)
    with pytest.raises(GradingFailed, match="the row has no such value"):
        await grade(scripted_tools, "string_check", "x", row, input="{{ item.a.b }}", **params)


@pytest.mark.parametrize(
    "template",
    ["{{" * 10_000, "{{" + " " * 19_000, "{{ " * 6000, "{{" + "}" * 19_000, "{{ x {" * 3000],
)
async def test_a_template_made_to_be_slow_to_read_is_not(
    scripted_tools: GraderTools, template: str
) -> None:
    params = {"reference": "x", "operation": "eq", "input": template}
    start = time.process_time()
    with contextlib.suppress(BadRequest):
        await grade(scripted_tools, "string_check", "x", **params)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "template", ["x" * 20_001, "{{ sample.output_text }}" * 33], ids=["long", "many slots"]
)
async def test_a_template_is_bounded(scripted_tools: GraderTools, template: str) -> None:
    params = {"reference": "x", "operation": "eq", "input": template}
    with pytest.raises(BadRequest, match="at most 20000 and 32 are taken"):
        await grade(scripted_tools, "string_check", "x", **params)


@pytest.mark.slow
async def test_other_requests_are_answered_while_a_pattern_is_compiled_and_texts_compared(
    scripted_tools: GraderTools,
) -> None:
    texts = {
        "a": " ".join(f"w{n}" for n in range(3000)),
        "b": " ".join(f"w{n}" for n in range(3000, 0, -1)),
    }
    params = {"input": "{{ item.a }}", "reference": "{{ item.b }}", "evaluation_metric": "meteor"}
    work = asyncio.gather(
        grade(scripted_tools, "text_similarity", "", texts, **params),
        grade(scripted_tools, "regex", "x", pattern="a{1000000000}"),
        return_exceptions=True,
    )
    longest_s, start = 0.0, time.thread_time()
    while not work.done():
        await asyncio.sleep(0.01)
        longest_s, start = max(longest_s, time.thread_time() - start), time.thread_time()
    part, refusal = await work
    assert isinstance(part, Part) and part.value and isinstance(refusal, BadRequest)
    assert longest_s < 0.2


@pytest.mark.slow
async def test_other_requests_are_answered_while_long_tests_are_read(
    scripted_tools: GraderTools,
) -> None:
    row = {"tests": "assert f(1) == 1\n" * 5000}
    work = asyncio.create_task(grade(scripted_tools, "code_tests", "def f(x): return 2", row))
    longest_s, start = 0.0, time.thread_time()
    while not work.done():
        await asyncio.sleep(0.01)
        longest_s, start = max(longest_s, time.thread_time() - start), time.thread_time()
    assert (await work).value == 0.0
    assert longest_s < 0.2


GIVEN, WANTED = "the cat sat on the mat", "The cat is on the mat."


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("rouge_1", 2 * 5 / 12),  # the cat on the mat: 5 of 6 words on either side
        ("rouge_2", 2 * 3 / 10),  # "the cat", "on the", "the mat"
        ("rouge_3", 2 * 1 / 8),  # "on the mat"
        ("rouge_4", 0.0),
        ("rouge_5", 0.0),
        ("rouge_l", 2 * 5 / 12),
        ("gleu", (5 + 3 + 1 + 0) / (6 + 5 + 4 + 3)),
        (
            "bleu",
            math.exp((math.log(5 / 6) + math.log(3 / 5) + math.log(1 / 4) + math.log(0.1 / 3)) / 4),
        ),
        # 5 matches in 2 chunks: F = 10PR / (R + 9P) with P = R = 5/6; penalty 0.5 (2/5)^3
        ("meteor", 5 / 6 * (1 - 0.5 * (2 / 5) ** 3)),
    ],
)
def test_similarities_of_words_are_those_worked_out_by_hand(metric: str, value: float) -> None:
    assert similarity(metric, GIVEN, WANTED) == pytest.approx(value)
    assert similarity(metric, WANTED, "dog") == pytest.approx(0.0, abs=1e-3)
    assert similarity(metric, "", WANTED) == 0.0


def test_fuzzy_match_is_the_share_of_common_characters() -> None:
    assert similarity("fuzzy_match", "abcd", "abcx") == pytest.approx(2 * 3 / 8)
    assert similarity("fuzzy_match", "", "") == 1.0


async def test_text_similarity_has_a_threshold_and_refuses_cosine(
    scripted_tools: GraderTools,
) -> None:
    params = {"input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"}
    row = {"answer": WANTED}
    part = await grade(
        scripted_tools, "text_similarity", GIVEN, row, evaluation_metric="rouge_1", **params
    )
    assert part.value == pytest.approx(5 / 6)
    for threshold, value in ((0.8, 1.0), (0.9, 0.0)):
        metric = {"evaluation_metric": "rouge_1", "pass_threshold": threshold}
        assert (
            await grade(scripted_tools, "text_similarity", GIVEN, row, **metric, **params)
        ).value == value
    with pytest.raises(BadRequest, match="'cosine' needs an embedding model"):
        await grade(
            scripted_tools, "text_similarity", GIVEN, row, evaluation_metric="cosine", **params
        )


SOURCE = "def grade(sample, item):\n    return float(sample['output_text'] == item['answer'])\n"


async def test_python_sends_sample_and_item_and_returns_what_grade_returns() -> None:
    sandbox = ScriptedSandbox(Execution(verdict="ok", value=0.25, stdout="seen"))
    part = await grade(
        tools_of(sandbox), "python", "x", {"answer": "x"}, type="python", name="n", source=SOURCE
    )
    assert (part.value, part.stdout) == (0.25, "seen")
    (asked,) = sandbox.asked
    assert (asked.code, asked.expression) == (SOURCE, "grade(_sample, _item)")
    assert asked.inputs == {"_sample": {"output_text": "x"}, "_item": {"answer": "x"}}


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (
            Execution(verdict="runtime_error", stderr="KeyError: 'x'\n"),
            "runtime_error: KeyError: 'x'",
        ),
        (Execution(verdict="ok", value="1"), "returned '1'; expected a finite number"),
        (Execution(verdict="ok", value=10**400), "expected a finite number"),
    ],
)
async def test_a_failing_python_grader_is_missing_under_openais_name(
    execution: Execution, message: str
) -> None:
    with pytest.raises(GradingFailed, match=message) as caught:
        await grade(tools_of(ScriptedSandbox(execution)), "python", "x", source=SOURCE)
    assert caught.value.errors == ("python_grader_runtime_error",)


async def test_python_is_refused_where_job_code_is_or_where_it_is_not_python(
    scripted_tools: GraderTools,
) -> None:
    forbidding = scripted(allow_job_code=False)
    with pytest.raises(BadRequest, match="HONE_ALLOW_JOB_CODE=false"):
        await grade(forbidding, "python", "x", source=SOURCE)
    with pytest.raises(BadRequest, match="its source is not Python"):
        await grade(scripted_tools, "python", "x", source="def grade(")
    with pytest.raises(BadRequest, match=r"does not define grade; expected `def grade\(sample"):
        await grade(scripted_tools, "python", "x", source="def grad(sample, item): return 1")


@pytest.mark.parametrize(
    ("operation", "given", "known"),
    [
        ("eq", "{{ sample.output_text }}", "Paris!"),
        ("eq", "{{sample.output_text}}", "Paris!"),
        ("eq", "said: {{ sample.output_text }}", None),
        ("like", "{{ sample.output_text }}", None),
    ],
)
def test_string_check_knows_the_answer_that_is_to_be_given_verbatim(
    scripted_tools: GraderTools, operation: str, given: str, known: str | None
) -> None:
    params = {"input": given, "reference": "{{ item.city }}!", "operation": operation}
    grader = registry.bind(RewardSpec(grader="string_check", params=params), scripted_tools)
    assert grader.reference({"city": "Paris"}) == known


@pytest.mark.parametrize(
    ("grader", "params", "message"),
    [
        ("text_similarity", {"evaluation_metric": "rouge_l"}, "which has no word to be similar to"),
        ("text_similarity", {"evaluation_metric": "bleu"}, "which has no word to be similar to"),
        ("text_similarity", {"evaluation_metric": "fuzzy_match"}, "which has no word"),
        ("string_check", {"operation": "like"}, "the reference is empty"),
        ("string_check", {"operation": "ilike"}, "the reference is empty"),
    ],
)
async def test_a_row_by_which_every_text_would_be_right_is_refused(
    scripted_tools: GraderTools, grader: str, params: dict[str, Any], message: str
) -> None:
    spec = RewardSpec(
        grader=grader,
        params={"input": "{{ sample.output_text }}", "reference": "{{ item.answer }}", **params},
    )
    bound = registry.bind(spec, scripted_tools)
    await bound.check_row({"answer": "the cat"})
    for answer in ("", "...") if params.get("evaluation_metric") in ("rouge_l", "bleu") else ("",):
        with pytest.raises(GradingFailed, match=message):
            await bound.check_row({"answer": answer})
    assert similarity("rouge_l", "", "...") == similarity("bleu", "!", "") == 0.0


async def test_an_empty_completion_is_in_no_text(scripted_tools: GraderTools) -> None:
    params = {
        "input": "{{ item.answer }}",
        "reference": "{{ sample.output_text }}",
        "operation": "like",
    }
    bound = registry.bind(RewardSpec(grader="string_check", params=params), scripted_tools)
    await bound.check_row({"answer": "the cat"})
    items = [
        ScoreItem(prompt="", completion=text, row={"answer": "the cat"}) for text in ("", "cat")
    ]
    assert [part.value for part in await bound.grade(items)] == [0.0, 1.0]
