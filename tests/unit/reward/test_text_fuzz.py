"""Graders of text against hostile ones: no text is right, none is missing, none holds the service
up. A judge quotes each in a reply that means the least. The soak run has 20,000 texts for each
grader."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from services.reward.grading import registry
from services.reward.grading.calling import Caller
from services.reward.grading.judging import JudgeGrader, Question
from services.reward.grading.registry import GraderTools
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem
from tests.support.hostile_texts import hostile_texts

ROW = {"answer": "8675309", "formula": r"\frac{\sqrt{7}}{3}+xyw", "word": "Evelyn", "n": [3, 7, 5]}
STALL_S = 0.5
"""Of CPU time on the event loop that one text may take."""

OUTPUT = {"input": "{{ sample.output_text }}", "reference": "{{ item.word }}"}
ASKED = [{"role": "user", "content": "Rate {{ sample.output_text }}"}]
GRADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "math, a number": ("math", {}),
    "math, a word": ("math", {"answer": "word"}),
    "math, a formula": ("math", {"answer": "formula", "cpu_s": 1}),
    "exact_match": ("exact_match", {}),
    "regex": ("regex", {"pattern": r"(?:answer|is)[: ]*(\w+ ?)+", "group": 1, "column": "word"}),
    "string_check": ("string_check", {**OUTPUT, "operation": "ilike"}),
    "text_similarity": (
        "text_similarity",
        {**OUTPUT, "evaluation_metric": "rouge_l", "pass_threshold": 0.9},
    ),
    "python_value": ("python_value", {"target": "answer_number", "numbers": "n"}),
    "multi": (
        "multi",
        {
            "graders": {"a": {"type": "string_check", "name": "a", **OUTPUT, "operation": "eq"}},
            "calculate_output": "max(a, 0) ** 2",
        },
    ),
    "think_format": ("think_format", {}),
    "length": ("length", {"min": 30, "max": 40, "shape": "linear"}),
    "llm_judge": ("llm_judge", {"model": "m", "rubric": "Rate {{ sample.output_text }}"}),
    "score_model": ("score_model", {"model": "m", "input": ASKED}),
    "label_model": (
        "label_model",
        {"model": "m", "input": ASKED, "labels": ["good", "bad"], "passing_labels": ["good"]},
    ),
}
VERDICTS = {"score_model": {"result": 0}, "label_model": {"result": "bad"}}
"""What the judges mean; `llm_judge` gives a reason too, which is the text."""

THOUGHT = re.compile(r"<think>(?:(?!</?think>).)*</think>(?!\s*\Z)(?:(?!</?think>).)+", re.S)


def thought(text: str) -> float:
    return float(THOUGHT.fullmatch(text) is not None)


def near_length(text: str) -> float:
    if len(text) < 30:
        return len(text) / 30
    return max(0.0, min(1.0, 2 - len(text) / 40))


WORTH: dict[str, Callable[[str], float]] = {"think_format": thought, "length": near_length}
"""What a text earns where that is not always 0."""


async def quoting(name: str, question: Question, nonce: str) -> tuple[str, int]:
    """Returns what a judge replies that quotes the completion and means the least."""
    verdict = VERDICTS.get(name, {"reason": question.completion[:1000], "score": 0})
    return f"{question.completion}\n{json.dumps({'key': nonce, **verdict})}", 1


async def parts_of(tools: GraderTools, name: str, count: int) -> tuple[list[Part], float]:
    """Returns the verdicts on the texts, and the most CPU time that the event loop took for one."""
    grader, params = GRADERS[name]
    bound = registry.bind(RewardSpec(grader=grader, params=params), tools)
    if isinstance(bound, JudgeGrader):
        bound._reply = partial(quoting, grader)  # pyright: ignore
    caller = Caller(bound)
    found: list[Part] = []
    longest_s = 0.0
    first = ScoreItem(prompt="", completion="", row={**ROW, "answer_number": 8675309})
    await caller.grade([first])  # imports what it needs
    for text in hostile_texts(count):
        item = ScoreItem(prompt="", completion=text, row={**ROW, "answer_number": 8675309})
        start = time.thread_time()
        found += await caller.grade([item])
        longest_s = max(longest_s, time.thread_time() - start)
    await bound.close()
    return found, longest_s


async def check(tools: GraderTools, name: str, count: int) -> None:
    parts, longest_s = await parts_of(tools, name, count)
    worth = WORTH.get(name, lambda _: 0.0)
    texts = enumerate(hostile_texts(count))
    wrong = [(at, text) for at, text in texts if parts[at].value != worth(text)]
    assert (len(parts), wrong) == (count, [])
    assert longest_s < STALL_S


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADERS)
async def test_no_hostile_text_is_right_or_missing_or_slow(
    scripted_tools: GraderTools, name: str
) -> None:
    await check(scripted_tools, name, 60)


@pytest.mark.soak
@pytest.mark.parametrize("name", GRADERS)
async def test_no_hostile_text_of_20_000_is_right_or_missing_or_slow(
    scripted_tools: GraderTools, name: str
) -> None:
    await check(scripted_tools, name, 20_000)
