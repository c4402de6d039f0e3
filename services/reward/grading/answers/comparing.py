"""Whether two answers say the same. Pure, but for formulas: see `Formulas`,
and `SympyFormulas` in formulas.py.

What the row's answer is decides how it is compared: letters alone are a text, and only the same
letters in this order are right; `2ab` is a formula, and `2ba` is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from services.reward.grading.answers import (
    Amount,
    Choice,
    Form,
    Literal,
    Named,
    Ordered,
    Relation,
    Several,
    Text,
)
from services.reward.grading.answers.forms import read
from services.reward.grading.answers.latex import without_marks
from services.reward.grading.answers.numbers import Number, equal
from services.reward.grading.answers.units import agree

_QUOTES = re.compile(r"^['’](.*)['’]$")
"""Quotes around a text. A single one is part of the name: A' is not A."""

_VECTOR = re.compile(
    r"\\(?:hat|vec)(?: ?\{ ?\\?([ijk])(?:math)? ?\}| ?\\?([ijk])(?:math)?(?![A-Za-z]))"
)
_HAT = re.compile(r"\\hat\{[ijk]\}")
_LETTER = re.compile(r"(?<![\\A-Za-z])([ijk])(?![A-Za-z])")
"""A unit vector by its letter alone."""

MIN_WORD = 3
"""Letters of a word, whose case does not matter: `AB` and `ab` are other names."""


class Formulas:
    """Compares formulas. This one says that it cannot: they belong in a process with limits."""

    def same(self, given: Amount, wanted: Amount, factor: Fraction) -> bool:
        raise NeedsFormulas

    def same_relation(self, given: Relation, wanted: Relation) -> bool:
        raise NeedsFormulas


class NeedsFormulas(Exception):
    """The answers cannot be compared without formulas."""


def same(given: Form, wanted: Form, formulas: Formulas) -> bool:
    """Returns whether two answers say the same. Raises NeedsFormulas where `formulas` does."""
    if isinstance(given, Several):
        wanted = _each_named(wanted)
    elif isinstance(wanted, Several):
        given = _each_named(given)
    if isinstance(wanted, Named):
        return _same_as_named(given, wanted, formulas)
    if isinstance(given, Named):
        if isinstance(wanted, Relation):
            return formulas.same_relation(given.relation, wanted)
        return all(same(value, wanted, formulas) for value in given.values)
    if isinstance(wanted, Choice) or isinstance(given, Choice):
        return _same_choice(given, wanted, formulas)
    if isinstance(wanted, Text | Literal):
        return type(given) is type(wanted) and _same_text(given, wanted)
    if isinstance(wanted, Relation):
        return isinstance(given, Relation) and formulas.same_relation(given, wanted)
    if isinstance(given, Relation):
        # 1 + 2 = 3 says 3, and 4 = 3 nothing.
        return set(given.signs) == {"="} and all(
            same(read(side), wanted, formulas) for side in given.sides
        )
    if isinstance(wanted, Amount):
        return _same_amount(given, wanted, formulas)
    if isinstance(wanted, Ordered):
        return (
            isinstance(given, Ordered)
            and (given.opening, given.closing) == (wanted.opening, wanted.closing)
            and _same_in_order(given.parts, wanted.parts, formulas)
        )
    if isinstance(given, Ordered) and (given.opening, given.closing) == ("(", ")"):
        return _names(wanted) and _same_in_order(given.parts, wanted.parts, formulas)
    return isinstance(given, Several) and _same_in_any_order(given, wanted, formulas)


def numbers_of(form: Form) -> list[Number]:
    """Returns the plain number that an answer is, under a name or behind the letter of a choice
    too; of a chain of equations those at its ends, the last one first."""
    if isinstance(form, Choice):
        return numbers_of(form.text) if form.is_marked else []
    ends: tuple[Form, ...] = (form,)
    if isinstance(form, Named):
        ends = (form.values[-1], form.values[0])
    elif isinstance(form, Relation) and set(form.signs) == {"="}:
        ends = (read(form.sides[-1]), read(form.sides[0]))
    return [end.number for end in ends if isinstance(end, Amount) and end.number]


def _each_named(form: Form) -> Form:
    """Returns `(x, y) = (1, 2)` as x = 1 and y = 2, and all else as it is."""
    point = form.values[-1] if isinstance(form, Named) and form.name.startswith("(") else None
    if not (isinstance(form, Named) and isinstance(point, Ordered)):
        return form
    named = zip(form.name.strip("()").split(","), point.parts, strict=True)
    return Several(tuple(Named(name, (part,), form.relation) for name, part in named))


def _names(several: Several) -> bool:
    """Returns whether each part has a name of its own."""
    names = {part.name for part in several.parts if isinstance(part, Named)}
    return len(names) == len(several.parts)


def _has_bounds_of_several(several: Several) -> bool:
    named = [part for part in several.parts if isinstance(part, Named)]
    return len({part.name for part in named if "=" not in part.relation.signs}) > 1


def _same_in_order(given: Sequence[Form], wanted: Sequence[Form], formulas: Formulas) -> bool:
    return len(given) == len(wanted) and all(
        same(ours, theirs, formulas) for ours, theirs in zip(given, wanted, strict=True)
    )


def _same_as_named(given: Form, wanted: Named, formulas: Formulas) -> bool:
    value = wanted.values[-1]
    if isinstance(given, Named):
        if given.name == wanted.name:
            return all(same(one, value, formulas) for one in given.values)
        return not _is_solved(wanted) and formulas.same_relation(given.relation, wanted.relation)
    if isinstance(given, Relation):
        # x = 3 is not answered by an equation that is still to be solved.
        return not _is_solved(wanted) and formulas.same_relation(given, wanted.relation)
    parts = given.parts if isinstance(given, Several) else ()
    names = {part.name for part in parts if isinstance(part, Named)}
    return names <= {wanted.name} and same(given, value, formulas)


def _is_solved(named: Named) -> bool:
    return not any(
        value.has_variables if isinstance(value, Amount) else _is_letter(value)
        for value in named.values
    )


def _is_letter(form: Form) -> bool:
    return isinstance(form, Text) and len(form.letters) == 1


def _same_choice(given: Form, wanted: Form, formulas: Formulas) -> bool:
    """A letter is right for itself with what it stands for, and what it stands for too."""
    if isinstance(given, Choice) and isinstance(wanted, Choice):
        return given.letter == wanted.letter and same(given.text, wanted.text, formulas)
    if isinstance(given, Choice):
        if isinstance(wanted, Text) and len(wanted.letters) == 1:
            return given.letter == wanted.letters
        return given.is_marked and same(given.text, wanted, formulas)
    assert isinstance(wanted, Choice)
    return wanted.is_marked and (given == Text(wanted.letter) or same(given, wanted.text, formulas))


def _same_text(given: Form, wanted: Form) -> bool:
    if isinstance(given, Text) and isinstance(wanted, Text):
        ours, theirs = (_QUOTES.sub(r"\1", text.letters.strip(".!?")) for text in (given, wanted))
        long = len(theirs) >= MIN_WORD or theirs.lower() == "no"
        return ours.casefold() == theirs.casefold() if long else ours == theirs
    return given == wanted


def _same_amount(given: Form, wanted: Amount, formulas: Formulas) -> bool:
    if isinstance(given, Text) and _is_letter(given):
        given = Amount(given.letters)
    if not isinstance(given, Amount):
        return False
    given, wanted = _with_hats(given, wanted)
    if given.number and wanted.number:
        return equal(given.number, wanted.number)
    factor = agree(given.counted, wanted.counted)
    return factor is not None and formulas.same(given, wanted, factor)


def _with_hats(given: Amount, wanted: Amount) -> tuple[Amount, Amount]:
    r"""Returns both with i, j and k as unit vectors, where one has them as such: as `\hat{i}`. In a
    row's answer i alone is the imaginary unit, and next to j or k it is none."""
    ours, theirs = (_VECTOR.sub(r"\\hat{\1\2}", one.formula) for one in (given, wanted))
    have_hats = [_HAT.search(formula) is not None for formula in (ours, theirs)]
    if have_hats == [False, True]:
        ours = _LETTER.sub(r"\\hat{\1}", without_marks(ours))
    elif have_hats == [True, False] and len(set(_LETTER.findall(theirs))) > 1:
        theirs = _LETTER.sub(r"\\hat{\1}", without_marks(theirs))
    return _written(given, ours), _written(wanted, theirs)


def _written(amount: Amount, formula: str) -> Amount:
    return amount if formula == amount.formula else Amount(formula, amount.counted)


def _same_in_any_order(given: Several, wanted: Several, formulas: Formulas) -> bool:
    """Returns whether each part of one is a part of the other, as often. Values without names
    belong to the names in their order: x = 1, y = 2 is 1, 2."""
    if _names(wanted) and not any(isinstance(part, Named) for part in given.parts):
        return _same_in_order(given.parts, wanted.parts, formulas)
    if _has_bounds_of_several(given) and not any(isinstance(one, Named) for one in wanted.parts):
        return False  # x < 1 or y > 2 is no union
    left = list(given.parts)
    if len(left) != len(wanted.parts):
        return False
    for part in wanted.parts:
        found = next((one for one in left if same(one, part, formulas)), None)
        if found is None:
            return False
        left.remove(found)
    return True
