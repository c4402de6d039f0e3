"""What is graded of a completion that has a reasoning part: what follows it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.reward.grading.reasoning import answer_of
from services.reward.grading.registry import GraderTools
from services.reward.grading.scoring import Scorer
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Execution, Prompt, ScoreItem, ScoreRequest
from tests.support.reward_helpers import ScriptedSandbox, tools_of

BOXED = r"<think>try \boxed{4}, no</think> The answer is \boxed{5}."
HARMONY = "<|channel|>analysis<|message|>4?<|end|><|start|>assistant<|channel|>final<|message|>{}"
ASSISTANT = "<|end|><|start|>assistant"

ANSWERS = {
    "no thought": ("It is 5.", "", "It is 5."),
    "one": ("<think>4?</think>\n\n5", "", "5"),
    "indented code after it": ("<think>4?</think>\n    return 5", "", "    return 5"),
    "never ends": ("<think>4?", "", ""),
    "several": ("<think>4?</think><think>5?</think>5", "", "5"),
    "between answers": ("<think>4?</think>4. No: <think>5?</think>5", "", "5"),
    "after words": ("Let me see. <think>4?</think>5", "", "5"),
    "nested": ("<think>a<think>4?</think>b</think>5", "", "5"),
    "another that never ends": ("<think>4?</think>4\n<think>5?", "", ""),
    "opened by a template": ("4?</think>5", "<|im_start|>assistant\n<think>\n", "5"),
    "opened by an unknown template": ("4?</think>5", "", "5"),
    "opened by a template, never ends": ("4? 5", "<|im_start|>assistant\n<think>\n", ""),
    "closed by a template": ("5", "assistant\n<think>\n\n</think>\n\n", "5"),
    "a draft with an open fence": ("<think>```python\n4</think>5", "", "5"),
    "named in the prompt": ("5", "Write <think> before you think.", "5"),
    "named in a thought": ("<think>I end with `</think>`.</think>5", "", "5"),
    "named in an answer": ("`<think>` begins a thought: 5", "", "`<think>` begins a thought: 5"),
    "named in the answer to a thought": ("<think>4</think>`</think>` ends", "", "`</think>` ends"),
    "named without quotes": ("The tag <think> begins it: 5", "", "The tag <think> begins it: 5"),
    "a pair in backticks": ("`<think>a</think>` is one", "", "`<think>a</think>` is one"),
    "in a string": ('f = "<think>a</think>"', "", 'f = "<think>a</think>"'),
    "in a split": ("s.split('</think>')[1]", "", "s.split('</think>')[1]"),
    "in a split by a line": (
        "return s.split('</think>\\n')[-1]",
        "",
        "return s.split('</think>\\n')[-1]",
    ),
    "in a pattern": (
        r"re.sub(r'<think>.*?</think>\s*', '', s)",
        "",
        r"re.sub(r'<think>.*?</think>\s*', '', s)",
    ),
    "in a string with more": (r'x = f"<think>{s}</think>\n"', "", r'x = f"<think>{s}</think>\n"'),
    "between apostrophes": ("that's it.</think>It's 5, isn't it", "", "It's 5, isn't it"),
    "between quotations": ("'a' is it</think>'b' 5", "", "'b' 5"),
    "harmony": (HARMONY.format("5"), ASSISTANT, "5"),
    "harmony, its end shown": (HARMONY.format("5<|return|>"), "", "5"),
    "harmony, prompt unknown": (HARMONY.format("5"), "", "5"),
    "harmony without its tokens": ("analysis4? assistantfinal5", "", "5"),
    "harmony with a preamble": (
        "analysis4?assistantcommentaryI call.assistantfinal5",
        ASSISTANT,
        "5",
    ),
    "harmony, final at once": ("final5", ASSISTANT, "5"),
    "harmony, never ends": ("<|channel|>analysis<|message|>4? 5", "", ""),
    "harmony without its tokens, never ends": ("analysisIs it 4? 5", "", ""),
    "harmony, lower case, never ends": ("analysisis it 4? 5", ASSISTANT, ""),
    "harmony, a call": ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", ""),
    "harmony, analysis in the prompt": (
        "4?assistantfinal5",
        f"{ASSISTANT}<|channel|>analysis<|message|>",
        "5",
    ),
    "harmony, final in the prompt": ("5", f"{ASSISTANT}<|channel|>final<|message|>", "5"),
    "harmony, its marks in the answer": (
        "analysis4?assistantfinalWrite assistantfinal. 5",
        ASSISTANT,
        "Write assistantfinal. 5",
    ),
    "an analysis that is no channel": (
        "analysis: it is 5, as assistantfinalize says",
        "",
        "analysis: it is 5, as assistantfinalize says",
    ),
    "no harmony": ("analysis of it: 5", "", "analysis of it: 5"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_is_what_follows_the_reasoning(name: str) -> None:
    completion, prompt_end, answer = ANSWERS[name]
    assert answer_of(completion, prompt_end) == answer


def test_other_tags_take_the_place_of_the_known_ones() -> None:
    tags = ("<reasoning>", "</reasoning>")
    assert answer_of("<reasoning>4?</reasoning>\n5", tags=tags) == "5"
    assert answer_of("4?</reasoning>5", "<reasoning>\n", tags) == "5"
    assert answer_of("<think>4?</think>5", tags=tags) == "<think>4?</think>5"
    assert answer_of("analysis4?assistantfinal5", tags=tags) == "analysis4?assistantfinal5"


@pytest.mark.parametrize(
    "unit",
    [
        *("<think>", "</think>", "<think></think>", "`<think>", "a <think>", "```\n", "\n", "`"),
        *("analysis", "<|channel|>", "<|channel|>final<|message|>", "<|return|> "),
    ],
)
def test_the_time_to_find_an_answer_grows_with_the_text_alone(unit: str) -> None:
    text = "<|channel|>final<|message|>" + unit * (200_000 // len(unit))
    start = time.process_time()
    for each in (text, text[27:], f"{text[27:]}</think>x"):
        answer_of(each)
    assert time.process_time() - start < 5  # quadratic took minutes


async def graded(
    tools: GraderTools, spec: RewardSpec, completion: str, row: dict[str, Any], **of_item: Any
) -> tuple[float | None, str]:
    scorer = Scorer(tools)
    try:
        item = ScoreItem(**{"prompt": "", **of_item}, completion=completion, row=row)
        (score,) = (await scorer.score(ScoreRequest(items=(item,), rewards=(spec,)))).scores
        return score.value, score.parts[spec.label].detail
    finally:
        await scorer.close()


OPENAI = {"input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"}

BY_GRADER: dict[str, tuple[dict[str, Any], str, float, float]] = {
    "math": ({}, BOXED, 0, 1),
    "exact_match": ({}, "<think>4</think>\n5", 0, 1),
    "regex": (
        {"pattern": r"\d", "which": "first", "column": "answer"},
        "<think>4</think>\n5",
        0,
        1,
    ),
    "string_check": ({**OPENAI, "operation": "eq"}, "<think>4</think>\n5", 0, 1),
    "text_similarity": (
        {**OPENAI, "evaluation_metric": "fuzzy_match", "pass_threshold": 0.99},
        "<think>4</think>\n5",
        0,
        1,
    ),
    "multi": (
        {
            "graders": {"a": {"type": "string_check", "name": "a", **OPENAI, "operation": "eq"}},
            "calculate_output": "a",
        },
        "<think>4</think>\n5",
        0,
        1,
    ),
    "length": ({"max": 3}, "<think>4</think>\n5", 0, 0),
}


@pytest.mark.parametrize("name", BY_GRADER)
async def test_a_grader_reads_the_answer_and_not_the_thought(
    scripted_tools: GraderTools, name: str
) -> None:
    params, completion, of_thought, of_answer = BY_GRADER[name]
    spec = RewardSpec(grader=name, params=params)
    found = [
        (await graded(scripted_tools, spec, completion, {"answer": answer}))[0]
        for answer in ("4", "5")
    ]
    assert found == [of_thought, of_answer]


async def test_code_in_a_thought_is_not_the_program() -> None:
    sandbox = ScriptedSandbox(Execution(verdict="ok", value=8))
    tools = tools_of(sandbox)
    spec = RewardSpec(grader="python_value")
    completion = "<think>```python\n4\n```</think>The value is in my head."
    await graded(tools, spec, completion, {"target": 8})
    assert sandbox.asked[0].inputs["_source"] == "The value is in my head."
    await tools.limited.close()


async def test_a_verdict_says_that_no_answer_follows_the_reasoning(
    scripted_tools: GraderTools,
) -> None:
    spec, row = RewardSpec(grader="exact_match"), {"answer": "5"}
    completion = "Is it 4, or 5"
    asked = {"prompt": "2 + 3?\n<think>\n"}
    value, detail = await graded(scripted_tools, spec, completion, row, **asked)
    assert (value, detail) == (0, "wanted '5'; no answer follows the completion's reasoning")
    value, _ = await graded(scripted_tools, spec, "5", row, **asked, prompt_end="")
    assert value == 1


async def test_reasoning_false_grades_all_of_a_completion(scripted_tools: GraderTools) -> None:
    spec = RewardSpec(grader="exact_match", reasoning=False)
    row = {"answer": "<think>4</think>5"}
    assert (await graded(scripted_tools, spec, "<think>4</think>5", row))[0] == 1


async def test_a_reference_answer_is_not_read_as_a_thought(scripted_tools: GraderTools) -> None:
    prompt = Prompt(index=0, content="2 + 3?\n<think>\n", row={"answer": "5"})
    scorer = Scorer(scripted_tools)
    (tried,) = await scorer.tried((RewardSpec(grader="math"),), (prompt,))
    assert (tried.reference, tried.empty) == (1, 0)
    await scorer.close()


FORMATS = [
    ("because</think>so", "<|im_start|>assistant\n<think>\n", 1),
    ("because, so", "<|im_start|>assistant\n<think>\n", 0),
    ("<think>because</think>so", "<|im_start|>assistant\n<think>\n", 0),
    ("because</think>so", "<|im_start|>assistant\n", 0),
    ("<think>because</think>so", "<|im_start|>assistant\n", 1),
]


@pytest.mark.parametrize(("completion", "prompt_end", "value"), FORMATS)
async def test_think_format_begins_where_the_prompt_ends(
    scripted_tools: GraderTools, completion: str, prompt_end: str, value: float
) -> None:
    spec = RewardSpec(grader="think_format")
    found = await graded(scripted_tools, spec, completion, {}, prompt_end=prompt_end)
    assert found[0] == value


async def test_think_format_takes_other_tags(scripted_tools: GraderTools) -> None:
    spec = RewardSpec(grader="think_format", reasoning=("[THINK]", "[/THINK]"))
    assert (await graded(scripted_tools, spec, "[THINK]4?[/THINK]5", {}))[0] == 1
    assert (await graded(scripted_tools, spec, "<think>4?</think>5", {}))[0] == 0


@pytest.mark.parametrize("tags", [("", "</a>"), ("<a>",), "<a>", ("<a>", "<a>")])
def test_reasoning_that_is_no_two_tags_is_refused(tags: Any) -> None:
    with pytest.raises((ValueError, BadRequest)):
        RewardSpec(grader="math", reasoning=tags)
