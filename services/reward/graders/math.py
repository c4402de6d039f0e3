r"""Rewards a mathematically right answer: `\boxed{}`, GSM8K's `#### 18`, or what the text states at
its end.

Plain numbers ("1,200", "$18", "3/4", "1.6e-19", "18.0 dollars") and texts are compared here,
formulas by math-verify in a process with limits of time and memory (`grading/answers/`). Where the
row's answer is a plain number, an unmarked text is read here too (`grading/answers/final.py`);
where it is a formula or a text, in that process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from services.reward.grading.answers.comparing import plain_number, quick, unwrapped
from services.reward.grading.answers.final import (
    MAX_BOXED_CHARS,
    TAIL_CHARS,
    marked_answer,
    says_answer,
    stated_answer,
    stated_number,
    tagged,
    without_markdown,
)
from services.reward.grading.answers.numbers import decimal_comma, number
from services.reward.grading.answers.text import clean, key, split
from services.reward.grading.failures import wrong_row
from services.reward.grading.limited.pool import Call
from services.reward.grading.registry import Column, ItemGrader, Params, grader, right_or_wrong
from shared.wire import Part, ScoreItem

MAX_ANSWER_CHARS = 2000
MAX_PLAIN_CHARS = 500
SHOWN_CHARS = 40

_SEPARATOR = re.compile(r",|;|\b(?:and|or)\b|\\pm")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")
"""The first letters of a word, which is no command of LaTeX."""

_WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_JOINING = {"and", "or", "for", "if", "where", "when", "with", "am", "pm", "cases", "array"} | {
    *("aligned", "matrix", "pmatrix", "bmatrix", "vmatrix", "pi", "sqrt", "sin", "cos", "tan"),
    *("log", "ln", "exp", "abs", "inf", "infty", "mod"),
}
"""Words that a formula may have."""

_SENTENCE_END = re.compile(r"[.!?。][\s*_\"'”’)\]}$]*\Z")

CUT_OFF = "it is cut off within a sentence"

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

    If the row's answer is a plain number, the completion's answer must be a computed number:
    `8 + 9`, `34/2` and `\\sqrt{289}` are not `17`. If the completion marks no answer, its last
    sentence with a number, or the sentence that says "the answer is", must state one number and
    must not be cut off by the token limit. Any notation of the number or formula is accepted. A
    task that asks for another notation (3 dozen in digits, 5 km in m, 75% as a decimal) or another
    form of a formula (expand, simplify) can therefore be answered with its own question: use
    `exact_match` or `regex` for it."""

    pure = True
    has_full_mark = True

    def content(self, item: ScoreItem) -> Any:
        return [item.completion, _is_cut_off(item), item.row[self.params.answer]]

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def reference(self, row: Mapping[str, Any]) -> str:
        wanted, whole = self._wanted(row), str(row[self.params.answer])
        return whole if marked_answer(whole) else f"\\boxed{{{wanted}}}"

    def _wanted(self, row: Mapping[str, Any]) -> str:
        value = row[self.params.answer]
        if type(value) not in (str, int, float) or not str(value).strip():
            fault = f"column {self.params.answer!r} is {value!r:.80}; expected a number or text"
            raise wrong_row(fault)
        text = str(value)[-MAX_BOXED_CHARS:].strip()
        found = marked_answer(text, is_several=True)
        wanted = found[0] if found else text
        if len(wanted) > TAIL_CHARS:
            fault = f"column {self.params.answer!r} has an answer of {len(wanted)} characters"
            raise wrong_row(f"{fault}; expected at most {TAIL_CHARS}")
        sides = split(clean(wanted), "=")
        if len(sides) > 1 and all(number(side) for side in sides):
            fault = f"column {self.params.answer!r} is {wanted!r:.80}, which no answer can equal"
            raise wrong_row(fault)
        return wanted if found else stated_answer(wanted)

    async def grade_item(self, item: ScoreItem) -> Part:
        completion, wanted = tagged(item.completion), self._wanted(item.row)
        if found := marked_answer(completion, is_several=_is_several(wanted)):
            answer, mark = found
            if mark == "after ####" and _is_cut_off(item) and completion.endswith(answer):
                return _part(f"read {answer!r:.80} ({mark})", wanted, (False, CUT_OFF))
            return await self._compared(_inner(answer), wanted, mark)
        if self.params.strict:
            return right_or_wrong(False, r"no answer in \boxed{} or after ####")
        plain = without_markdown(completion)
        row = plain_number(clean(wanted))
        if _is_alone(plain, wanted):
            plain = decimal_comma(plain) if row else plain
            return await self._compared(plain, wanted, "unmarked")
        shown = f"read {completion.rstrip()[-SHOWN_CHARS:]!r} (unmarked)"
        if _is_cut_off(item):
            return _part(shown, wanted, (False, CUT_OFF))
        if row is None:
            return await self._searched(completion, wanted, shown)
        stated = stated_number(completion)
        if stated is not None:
            return await self._compared(stated, wanted, "unmarked")
        if self.params.expressions:
            return await self._searched(completion, wanted, shown)
        return _part(shown, wanted, (False, "it states no plain number"))

    async def _compared(self, answer: str, wanted: str, mark: str) -> Part:
        if len(answer) > MAX_ANSWER_CHARS:
            return right_or_wrong(False, f"an answer of {len(answer)} characters")
        shown = f"read {answer!r:.80} ({mark})"
        outcome = quick(answer, wanted, self.params.expressions)
        if outcome is None:
            outcome = await self.tools.limited.run(self._call("compared", answer, wanted))
        return _part(shown, wanted, outcome)

    async def _searched(self, completion: str, wanted: str, shown: str) -> Part:
        """Returns the part for a completion in which math-verify finds the answer."""
        if completion.rstrip().endswith("?") and not says_answer(completion):
            return _part(shown, wanted, (False, "it is a question"))
        call = self._call("found_in", completion[-TAIL_CHARS:], wanted)
        found, *outcome = await self.tools.limited.run(call)
        return _part(f"read {found!r:.80} (unmarked)" if found else shown, wanted, outcome)

    def _call(self, function: str, given: str, wanted: str) -> Call:
        arguments = (given, wanted, self.params.expressions)
        return Call("answers.comparing", function, arguments, self.params.cpu_s, MEMORY_MIB)


def _inner(answer: str) -> str:
    """Returns a marked answer without Markdown, and what `#### The answer is 18` states."""
    answer = without_markdown(answer)
    return stated_number(answer) or answer if says_answer(answer) else answer


def _is_cut_off(item: ScoreItem) -> bool:
    """Returns whether the sampler cut the completion off within a sentence: "84 is smaller than"
    states nothing yet, and neither does "the answer is 17" if it would have been 175."""
    return item.finish_reason == "length" and not _SENTENCE_END.search(item.completion)


def _is_several(wanted: str) -> bool:
    return number(wanted) is None and _SEPARATOR.search(wanted) is not None


def _is_alone(completion: str, wanted: str) -> bool:
    """Returns whether a completion without a marked answer is an answer and nothing else: a number,
    a word, an equation without words before its last side ("8 + 9 = 17 apples", not "He has 8 + 9 =
    17 apples"), a formula where the row is one ("1 < x and x < 3"), or the row's answer as it is
    written there."""
    text = completion.strip()
    if len(text) > MAX_PLAIN_CHARS:
        return False
    if key(clean(text)) == key(clean(wanted)):
        return True
    if "\n" in text or says_answer(text):
        return False
    *sides, last = split(clean(text), r"=|\\approx(?![a-z])")
    is_number = number(unwrapped(last)) is not None and not any(map(_WORD.search, sides))
    if is_number or plain_number(clean(wanted)) is not None:
        return is_number
    known = _JOINING | {word.lower() for word in _WORDS.findall(wanted)}
    return " " not in text or all(word.lower() in known for word in _WORDS.findall(text))


def _part(shown: str, wanted: str, outcome: Sequence[Any]) -> Part:
    right, rule = outcome
    return right_or_wrong(right, f"{shown}, wanted {wanted!r:.80}: {rule}")
