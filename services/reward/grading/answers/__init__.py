"""Reads and compares final answers of mathematics and science. Pure; no service is imported.

numbers.py    where the marked answer is in a text, and plain numbers, exactly
statements.py the number that a text without a marked answer states
units.py      what stands after a number
latex.py      the text of an answer; times, dates and chemistry, which are compared as text
forms.py      which kind of answer a text is
comparing.py  whether two answers say the same
formulas.py   whether two formulas do, by sympy: in a limited process only

The kinds of answers:

"DBCA", "(C)", "Tuesday"       Text        letters alone
"(C) Paris"                    Choice      a letter, and what it stands for
"3/4", "18 eggs", "10\\sqrt{2} cm"  Amount   a number or a formula, and what it counts
"1, 2", "\\pm 1", "\\{1, 2\\}"  Several     in any order
"(1, 2]", "[1, 2[", a matrix, "[[1, 2], [3, 4]]", "x > 3"
                               Ordered     in this order, between these brackets
"x = 3", "f(x) = 2x"           Named       a value under a name
"2x + 3y = 5", "3 = 3"         Relation
"11:30", "101_2", "H_2O"       Literal     the same text, or not
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from services.reward.grading.answers.numbers import Number
from services.reward.grading.answers.units import NOTHING, Counted

_CONSTANTS = {"e", "i", "\\pi", "\\infty", "\\cdot", "\\times", "\\frac", "\\sqrt", "\\text"}
_ATOM = re.compile(r"[A-Za-z]|\\[A-Za-z]+")


@dataclass(frozen=True)
class Text:
    letters: str


@dataclass(frozen=True)
class Literal:
    text: str


@dataclass(frozen=True)
class Choice:
    """A letter and what it stands for; `is_marked` unless that is only a dot: E. coli."""

    letter: str
    text: Form
    is_marked: bool


@dataclass(frozen=True)
class Amount:
    """A formula, what it counts, and the number that it is if it is a plain one."""

    formula: str
    counted: Counted = NOTHING
    number: Number | None = None

    @property
    def has_variables(self) -> bool:
        return self.number is None and bool(variables(self.formula))


@dataclass(frozen=True)
class Several:
    parts: tuple[Form, ...]


@dataclass(frozen=True)
class Ordered:
    opening: str
    closing: str
    parts: tuple[Form, ...]


@dataclass(frozen=True)
class Relation:
    """`signs` stand between the `sides`, which are formulas."""

    signs: tuple[str, ...]
    sides: tuple[str, ...]


@dataclass(frozen=True)
class Named:
    """`values`: one, or several that are said to be equal."""

    name: str
    values: tuple[Form, ...]
    relation: Relation = field(compare=False)


Form = Text | Literal | Choice | Amount | Several | Ordered | Relation | Named


def variables(formula: str) -> set[str]:
    """Returns the letters and commands in `formula` that may stand for anything."""
    return set(_ATOM.findall(re.sub(r"\(.*\)$", "", formula) or formula)) - _CONSTANTS
