r"""Rewards a mathematically right answer: `\boxed{}`, GSM8K's `#### 18`, or what the text states at
its end.

Plain numbers ("1,200", "$18", "3/4", "1.6e-19", "18.0 dollars") and texts are compared here,
formulas in a process with limits of time and memory (`grading/answers/`). Where the row's answer is
a plain number, an unmarked text is read here too (`grading/answers/statements.py`); where it is a
formula or a text, by math-verify in that process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field

from services.reward.grading.answers import Amount, Named, Relation, Text
from services.reward.grading.answers.comparing import Formulas, NeedsFormulas, numbers_of, same
from services.reward.grading.answers.forms import read
from services.reward.grading.answers.latex import clean
from services.reward.grading.answers.numbers import Number, equal, final_answer, number
from services.reward.grading.answers.statements import (
    TAIL_CHARS,
    says_answer,
    stated_number,
    without_markdown,
)
from services.reward.grading.limited.pool import Call
from services.reward.grading.registry import (
    Column,
    ItemGrader,
    Params,
    grader,
    right_or_wrong,
    wrong_row,
)
from shared.wire import Part, ScoreItem

MAX_ANSWER_CHARS = 2000
MAX_PLAIN_CHARS = 500
SHOWN_CHARS = 40

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")
"""The first letters of a word, which is no command of LaTeX."""

MEMORY_MIB = 3072
"""Memory that one comparison may take, the process and its libraries included."""


class MathParams(Params):
    """Where the right answer is, and what counts as an answer."""

    answer: Column = "answer"
    """The column of the right answer: a number, LaTeX, or a whole solution that ends in `####` or a
    `\\boxed{}`."""

    cpu_s: float = Field(default=5.0, gt=0, le=60)
    """How many seconds of CPU time one comparison may take. An answer that takes longer earns 0."""

    strict: bool = False
    """Only an answer that the completion marks with `\\boxed{}` or `####` counts."""

    expressions: bool = False
    """Where the row's answer is a plain number, an expression that evaluates to it counts too: `12
    \\cdot 34` for `408`. A completion may then repeat the question."""


@grader("math")
class Math(ItemGrader[MathParams]):
    """1 if the completion's final answer is mathematically equal to the row's, else 0.

    Where the row's answer is a plain number, the completion's must be one too, worked out: `8 + 9`,
    `34/2` and `\\sqrt{289}` are not `17`, and of a text that marks no answer the last sentence with
    a number, or the one that says "the answer is", must state one number. How it is written is
    free, and so is how a formula is written. A task that asks for another notation (3 dozen in
    digits, 5 km in m, 75% as a decimal) or another form of a formula (expand, simplify) can
    therefore be answered with its question: use `exact_match` for it, or `regex`.
    """

    pure = True
    has_full_mark = True

    def content(self, item: ScoreItem) -> Any:
        return [item.completion, item.row[self.params.answer]]

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def reference(self, row: Mapping[str, Any]) -> str:
        wanted, whole = self._wanted(row), str(row[self.params.answer])
        return whole if final_answer(whole) else f"\\boxed{{{wanted}}}"

    def _wanted(self, row: Mapping[str, Any]) -> str:
        value = row[self.params.answer]
        if type(value) not in (str, int, float) or not str(value).strip():
            fault = f"column {self.params.answer!r} is {value!r:.80}; expected a number or text"
            raise wrong_row(fault)
        wanted = final_answer(str(value)) or str(value).strip()
        form = read(wanted) if "=" in wanted else None
        if isinstance(form, Relation) and all(number(side) for side in form.sides):
            fault = f"column {self.params.answer!r} is {wanted!r:.80}, which no answer can equal"
            raise wrong_row(fault)
        return wanted

    async def grade_item(self, item: ScoreItem) -> Part:
        completion, wanted = item.completion, self._wanted(item.row)
        answer = final_answer(completion)
        if answer is not None:
            return await self._compared(_inner(answer), wanted)
        if self.params.strict:
            return right_or_wrong(False, "no answer in \\boxed{} or after ####")
        if _is_plain(completion) or _is_text_of(wanted, completion):
            return await self._compared(without_markdown(completion), wanted)
        end = completion.rstrip()[-SHOWN_CHARS:]
        shown = f"no \\boxed{{}} or ####, read from {end!r}"
        if _known_number(wanted) is None:
            return await self._searched(completion, wanted, shown)
        stated = stated_number(completion)
        if stated is not None:
            return await self._compared(stated, wanted, f"{shown}: {stated!r:.80}")
        if self.params.expressions:
            return await self._searched(completion, wanted, shown)
        return right_or_wrong(
            False, f"{shown}, which states no plain number, wanted {wanted!r:.80}"
        )

    async def _compared(self, answer: str, wanted: str, shown: str = "") -> Part:
        if len(answer) > MAX_ANSWER_CHARS:
            return right_or_wrong(False, f"an answer of {len(answer)} characters")
        shown = shown or f"{answer!r:.80}"
        known = _known_number(wanted)
        if known and not self.params.expressions and not _is_worked_out(answer, known):
            return _part(False, f"{shown} is no plain number", wanted)
        plain, wanted_plain = number(answer), number(wanted)
        if plain and wanted_plain:
            return _part(equal(plain, wanted_plain), shown, wanted)
        try:
            right = clean(answer) == clean(wanted) or same(read(answer), read(wanted), Formulas())
            return _part(right, shown, wanted)
        except NeedsFormulas:
            call = self._call("compared", answer, wanted)
        right, why = await self.tools.limited.run(call)
        return _part(right, shown, wanted, why)

    async def _searched(self, completion: str, wanted: str, shown: str) -> Part:
        """Returns the part for a completion in which math-verify finds the answer."""
        if completion.rstrip().endswith("?") and not says_answer(completion):
            return _part(False, f"{shown}, which is a question", wanted)
        call = self._call("found_in", completion[-TAIL_CHARS:], wanted)
        right, why = await self.tools.limited.run(call)
        return _part(right, shown, wanted, why)

    def _call(self, function: str, given: str, wanted: str) -> Call:
        return Call("answers.formulas", function, (given, wanted), self.params.cpu_s, MEMORY_MIB)


@lru_cache(maxsize=4096)
def _known_number(wanted: str) -> Number | None:
    """Returns the plain number that a row's answer is, or has a name for; None if it is none.
    Cached because all completions of a group have the same row."""
    form = read(wanted)
    form = form.values[-1] if isinstance(form, Named) else form
    return form.number if isinstance(form, Amount) else None


def _inner(answer: str) -> str:
    """Returns a marked answer without Markdown, and what `#### The answer is 18` states."""
    answer = without_markdown(answer)
    return stated_number(answer) or answer if says_answer(answer) else answer


def _is_plain(completion: str) -> bool:
    """Returns whether a completion without a marked answer is only a number, a word, or an equation
    without words before its last side: "8 + 9 = 17 apples", not "He has 8 + 9 = 17 apples"."""
    if len(completion) > MAX_PLAIN_CHARS or "\n" in completion.strip() or says_answer(completion):
        return False
    form = read(without_markdown(completion))
    if isinstance(form, Text):
        return " " not in completion.strip()
    relation = form.relation if isinstance(form, Named) else form
    sides = relation.sides[:-1] if isinstance(relation, Relation) else ()
    return bool(numbers_of(form)) and not any(map(_WORD.search, sides))


def _is_text_of(wanted: str, completion: str) -> bool:
    """Returns whether a completion is the row's answer as it is written there."""
    is_short = len(completion) <= MAX_PLAIN_CHARS
    return is_short and clean(without_markdown(completion)) == clean(wanted)


def _is_worked_out(answer: str, wanted: Number) -> bool:
    """Returns whether `answer` is a plain number. A fraction is one in its lowest terms, or in the
    row's."""
    return any(
        not found.is_division or found.terms == wanted.terms for found in numbers_of(read(answer))
    )


def _part(right: bool, shown: str, wanted: str, why: str = "") -> Part:
    return right_or_wrong(right, f"{shown}, wanted {wanted!r:.80}" + (f": {why}" if why else ""))
