"""`math` on the pairs of tests/data/answer_pairs.jsonl, which are right or wrong by construction: a
completion (`given`), a row's answer (`wanted`), and whether it is `right`. Their answers are laid
out as in GSM8K, MATH, AIME and sets of science questions; what is wrong differs in a sign, a digit,
a unit, a name, an order or a bracket, says more than the answer, or says nothing."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from services.reward.grading import registry
from shared.job import RewardSpec
from shared.wire import Execution, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, tools_of

DATA = Path(__file__).parents[2] / "data"


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


PAIRS = read("answer_pairs.jsonl")
REPORTED = read("answer_kinds.jsonl")
"""Kinds of verdicts that readers of `math` reported as wrong, with wrong answers beside them."""


def test_there_are_20_pairs_of_each_of_111_kinds_right_and_wrong_ones() -> None:
    kinds = Counter(pair["kind"] for pair in PAIRS)
    assert (len(kinds), set(kinds.values())) == (111, {20})
    assert all(
        {one["right"] for one in PAIRS if one["kind"] == kind} == {True, False} for kind in kinds
    )


PAGE = Path(__file__).parents[3] / "docs" / "final-answers.md"


def pairs_of_page() -> list[tuple[str, str, bool]]:
    """The pairs of the page's table "Which answers are equal": each answer with the row beside it,
    or with every row where their numbers differ."""
    table = PAGE.read_text("utf-8").partition("## Which answers are equal")[2].partition("\n## ")[0]
    pairs: list[tuple[str, str, bool]] = []
    for line in table.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) == 6 and "`" in cells[1]:
            given, wanted = (re.findall(r"`([^`]+)`", cell) for cell in cells[1:3])
            wanted = [one.replace("\\|", "|") for one in wanted]
            each = zip(given, wanted, strict=True) if len(given) == len(wanted) else None
            for one, row in each or product(given, wanted):
                pairs.append((one, row, cells[3].strip() == "1"))
    return pairs


MARKED_ONLY = {r"3, \text{ where } n > 0", "x = 3 for n ≥ 1", "5 i"}
"""Answers that are read as the table says where they are marked, and otherwise as sentences."""


@pytest.mark.parametrize("form", [r"\boxed{%s}", "%s"])
async def test_the_page_is_true_of_answers_in_a_box_and_alone(form: str) -> None:
    pairs = pairs_of_page()
    assert len(pairs) > 100
    await check(
        [
            {"given": form.replace("%s", given), "wanted": wanted, "right": right}
            for given, wanted, right in pairs
            if form != "%s" or given not in MARKED_ONLY
        ]
    )


async def check(tried: list[dict[str, Any]]) -> None:
    tools = tools_of(ScriptedSandbox(Execution(verdict="ok")))
    math = registry.bind(RewardSpec(grader="math"), tools)
    mistaken: list[dict[str, Any]] = []
    for pair in tried:
        item = ScoreItem(prompt="", completion=pair["given"], row={"answer": pair["wanted"]})
        (part,) = await math.grade([item])
        mistaken += [] if part.value == float(pair["right"]) else [pair]
    await tools.limited.close()
    assert mistaken == []


async def test_no_pair_of_any_kind_is_graded_wrongly() -> None:
    """Four right and four wrong pairs of each kind."""
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for pair in PAIRS:
        kinds.setdefault((pair["kind"], pair["right"]), []).append(pair)
    await check([pair for pairs_of_kind in kinds.values() for pair in pairs_of_kind[:4]])


@pytest.mark.soak
async def test_no_pair_is_graded_wrongly() -> None:
    await check(PAIRS)


@pytest.mark.parametrize("kind", dict.fromkeys(pair["kind"] for pair in REPORTED))
async def test_no_pair_of_a_reported_kind_is_graded_wrongly(kind: str) -> None:
    await check([pair for pair in REPORTED if pair["kind"] == kind])
