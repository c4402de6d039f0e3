r"""Compares formulas by sympy, as math-verify reads them: in a limited process only, because a
formula decides how long that takes.

Two formulas without variables are equal if 60 digits of them are. Two with variables are equal if
they are equal at some points, or else if sympy simplifies their difference to 0.

The parser drops what it does not know (`\phantom{5}` is 5 to it, `x1` is x, `5'` is 5), so here
each token of a formula has to be known.
"""

from __future__ import annotations

import logging
import random
import re
from fractions import Fraction
from typing import Any

from services.reward.grading.answers import (
    Amount,
    Relation,
    Text,
)
from services.reward.grading.answers.comparing import Formulas, same
from services.reward.grading.answers.forms import read
from services.reward.grading.answers.latex import clean, without_marks
from services.reward.grading.answers.numbers import Number, factors, is_rounding, number

MAX_WORD = 4
"""Letters that stand together in a formula: more are a word, of which no product is made."""

_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth arsinh "
    "arcosh artanh ln log exp max min gcd lcm"
)
_NAMES = "|".join(_FUNCTIONS.split())
_COMMANDS = frozenset(
    f"""{_FUNCTIONS}
frac sqrt binom cdot times div pi infty circ lfloor rfloor lceil rceil vert lvert rvert sum prod
int lim to limits mod overline bar hat vec mathbb mathcal angle triangle nabla partial ell alpha
beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda nu xi rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi""".split()
)
_FUNCTION = re.compile(rf"\\text ?\{{ ?({_NAMES}) ?\}}|(?<![\\A-Za-z])({_NAMES})(?![A-Za-z])")
_TOKEN = re.compile(
    r"\\(?P<command>[A-Za-z]+)|(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<letter>[A-Za-zΩμ])"
    r"|[-+*/^_(){}\[\]|,=°]|!(?!!)|%(?=$)|\s+"
)
_WORD = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]{{{MAX_WORD + 1},}}|\\text ?\{{[^{{}}]*[A-Za-z]{{2}}")
_INDEX = re.compile(r"[_^] ?\w")
_INDEX_OF_NUMBER = re.compile(r"[\d)\]}] ?_")
_TWO_NUMBERS = re.compile(r"\d\s+\d")
_ADJACENT = re.compile(r"(?<=[\d)}])\s*(?=\()|(?<=\))\s*(?=[\dA-Za-z\\])")
_MIXED = re.compile(r"(?<![\d.}])(\d+) ?\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}")
_INVERSE = re.compile(r"\\(sin|cos|tan|cot|sec|csc) ?\^ ?(?:\{ ?- ?1 ?\}|-1)")
_ROOT = re.compile(r"(\\sqrt) ?(\[[^\[\]]*\]) ?(\d|[A-Za-z](?![A-Za-z]))")
_CURRENT = "\\mathcal{I}"
"""I alone is the imaginary unit to the parser."""


class NoFormula(ValueError):
    """A formula that cannot be read."""

    def __init__(self, formula: str) -> None:
        super().__init__(f"{formula!r:.80} cannot be read as a formula")


def latex_of(formula: str) -> str:
    """Returns the LaTeX that all of `formula` is, its functions and factors written out. Raises
    NoFormula."""
    text = _FUNCTION.sub(lambda found: f"\\{found[1] or found[2]} ", formula)
    is_word = _WORD.search(text)
    text = without_marks(text)
    if is_word or _TWO_NUMBERS.search(_INDEX.sub("", text)) or _INDEX_OF_NUMBER.search(text):
        raise NoFormula(formula)
    text = _INVERSE.sub(r"\\arc\1 ", _ROOT.sub(r"\1\2{\3}", text))
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    return _ADJACENT.sub(r"\\cdot ", _indexed(text, formula)).replace("°", "^\\circ ")


def _indexed(text: str, formula: str) -> str:
    """Returns `text` with a number right behind a letter as the letter's index."""
    parts: list[str] = []
    position, is_letter = 0, False
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or (token["command"] and token["command"] not in _COMMANDS):
            raise NoFormula(formula)
        written = _CURRENT if token[0] == "I" and text[token.end() :][:1] != "_" else token[0]
        parts.append(f"_{{{written}}}" if is_letter and token["number"] else written)
        position, is_letter = token.end(), bool(token["letter"])
    return "".join(parts)


DIGITS = 60
NUM_POINTS = 4
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_COUNTED = re.compile(r"\\(?:sum|prod)")
"""In these i may count."""


class SympyFormulas(Formulas):
    def same(self, given: Amount, wanted: Amount, factor: Fraction) -> bool:
        ours, theirs = _value(given), _value(wanted)
        return any(
            _same(ours * one, theirs, _decimal(given, one), _decimal(wanted, Fraction(1)))
            for one in factors(given.number, wanted.number, factor)
        )

    def same_relation(self, given: Relation, wanted: Relation) -> bool:
        """Returns whether two equations, or inequalities, say the same: their differences are
        multiples of each other."""
        if _texts(given) == _texts(wanted):
            return True
        if len(given.signs) != 1 or len(wanted.signs) != 1:
            return False
        (ours, our_sign), (theirs, their_sign) = _difference(given), _difference(wanted)
        if not ours.free_symbols or not theirs.free_symbols or our_sign != their_sign:
            return False
        ratio = _constant_ratio(ours, theirs)
        return ratio is not None and (our_sign in ("=", "\\ne") or ratio > 0)


def parse(formula: str) -> Any:
    """Returns the sympy expression that all of `formula` is. Raises NoFormula."""
    from latex2sympy2_extended.latex2sympy2 import (
        ConversionConfig,
        NormalizationConfig,
        latex2sympy,
    )

    text = latex_of(formula)
    has_unit = bool(_IMAGINARY.search(text)) and not _COUNTED.search(text)
    try:
        return _exact(
            latex2sympy(
                text,
                is_real=None if has_unit else True,
                convert_degrees=True,
                normalization_config=NormalizationConfig(
                    basic_latex=True,
                    units=False,
                    malformed_operators=True,
                    nits=True,
                    boxed="none",
                    equations=False,
                ),
                conversion_config=ConversionConfig(
                    interpret_as_mixed_fractions=False, lowercase_symbols=False
                ),
            ),
            has_unit,
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # of whatever kind its parser raises on a stranger's text
        raise NoFormula(formula) from error


def _exact(expression: Any, has_unit: bool) -> Any:
    """Returns the expression with its decimals as fractions and, with `has_unit`, i as the
    imaginary unit, evaluated."""
    import sympy

    if not isinstance(expression, sympy.Expr):
        raise NoFormula(str(expression))
    plain: dict[Any, Any] = {one: sympy.Rational(str(one)) for one in expression.atoms(sympy.Float)}
    plain |= {one: sympy.Symbol(one.name) for one in expression.atoms(sympy.Symbol)}
    if has_unit:
        plain |= {one: sympy.I for one in plain if str(one) == "i"}
    value = expression.xreplace(plain).doit()
    if value.has(sympy.nan):
        raise NoFormula(str(expression))
    return value


def _value(amount: Amount) -> Any:
    import sympy

    if amount.number:
        value = amount.number.value
        return sympy.Rational(value.numerator, value.denominator)
    return parse(amount.formula)


def _decimal(amount: Amount, factor: Fraction) -> Number | None:
    return amount.number.times(factor) if amount.number and amount.number.step else None


def _same(ours: Any, theirs: Any, our_decimal: Number | None, their_decimal: Number | None) -> bool:
    import sympy

    if ours == theirs:
        return True
    if ours.free_symbols or theirs.free_symbols:
        return _same_function(ours, theirs)
    near = _near(ours, theirs)
    if near is None:
        return sympy.simplify(ours - theirs) == 0
    if near:
        return True
    pairs = ((our_decimal, theirs), (their_decimal, ours))
    return any(decimal and is_rounding(decimal, _number(value)) for decimal, value in pairs)


def _near(ours: Any, theirs: Any) -> bool | None:
    """Returns whether all digits of two numbers are the same; None where they have none."""
    values = [one.evalf(DIGITS) for one in (ours, theirs)]
    if not all(value.is_number and value.is_finite for value in values):
        return None
    size = max(abs(value) for value in values)
    if size < sympy_float("1e-100"):
        return None  # 0 has no significant digits
    return bool(abs(values[0] - values[1]) <= size * sympy_float(f"1e-{DIGITS - 10}"))


def sympy_float(text: str) -> Any:
    import sympy

    return sympy.Float(text, DIGITS)


def _number(value: Any) -> Number:
    """Returns a number that sympy has, to many digits."""
    import sympy

    if value.is_Rational:
        return Number(Fraction(int(value.p), int(value.q)))
    if not value.is_real:
        return Number(Fraction(0))
    rational: Any = sympy.Rational(value.evalf(DIGITS))
    return Number(Fraction(int(rational.p), int(rational.q)), digits=DIGITS)


def _points(symbols: set[Any]) -> list[dict[Any, Any]]:
    """Returns values for the symbols, always the same ones."""
    import sympy

    draw = random.Random(7)
    ordered = sorted(symbols, key=str)
    return [
        {one: sympy.Rational(draw.randint(-300, 300) or 1, 101) for one in ordered}
        for _ in range(NUM_POINTS)
    ]


def _same_function(ours: Any, theirs: Any) -> bool:
    import sympy

    found: list[bool] = []
    for point in _points(ours.free_symbols | theirs.free_symbols):
        near = _near(ours.xreplace(point).doit(), theirs.xreplace(point).doit())
        if near is False:
            return False
        found += [near] if near else []
    return len(found) > NUM_POINTS // 2 or sympy.simplify(ours - theirs) == 0


def _difference(relation: Relation) -> tuple[Any, str]:
    """Returns what a relation says to be 0, or more than 0, and its sign."""
    left, right = (parse(side) for side in relation.sides)
    sign = relation.signs[0]
    flipped = {"<": ">", "\\le": "\\ge"}
    return (right - left, flipped[sign]) if sign in flipped else (left - right, sign)


def _constant_ratio(ours: Any, theirs: Any) -> Any:
    """Returns by what number `theirs` is multiplied in `ours`; None if by none."""
    if ours.free_symbols != theirs.free_symbols:
        return None
    ratios = [
        (ours.xreplace(point) / theirs.xreplace(point)).doit()
        for point in _points(ours.free_symbols)
    ]
    first = ratios[0].evalf(DIGITS)
    if not first.is_real or not first.is_finite or first == 0:
        return None
    return first if all(_near(one, ratios[0]) for one in ratios[1:]) else None


def _texts(relation: Relation) -> list[str]:
    return ["".join(part.split()) for part in (*relation.signs, *relation.sides)]


_SAID = re.compile(r"\banswer(?: is|:| ?=)+:? *([^\n]{1,200})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?:\s|\*|$)")
_FOLLOWS = re.compile(
    r"[eE][-+]?\d{1,3}\b"
    r"|\$? (?:squared|cubed|factorial|percent|hundred|thousand|million|billion|trillion|dozen)\b"
)
"""What changes the number that it stands behind."""


def prepare(function: str) -> None:
    import math_verify  # noqa: F401

    logging.disable()


def compared(given: str, wanted: str) -> tuple[bool, str]:
    """Returns whether two answers say the same, and why they cannot be compared, if so."""
    try:
        return same(read(given), read(wanted), SympyFormulas()), ""
    except NoFormula as error:
        return False, str(error)


def found_in(text: str, wanted: str) -> tuple[bool, str]:
    """Returns what `compared` does of the answer that `text` ends with."""
    answer = _said(text, wanted) or _found(text)
    return compared(answer, wanted) if answer else (False, "there is no answer in it")


def _said(text: str, wanted: str) -> str | None:
    """Returns what stands behind the last "the answer is", if it is a number, or the row's answer a
    text."""
    for said in reversed(_SAID.findall(text)):
        answer = clean(_SENTENCE_END.split(said, maxsplit=1)[0])
        if number(answer) or isinstance(read(wanted), Text):
            return answer
        return None
    return None


def _found(text: str) -> str | None:
    """Returns the answer that math-verify finds; what it reads in part is none."""
    from math_verify import parse

    found = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    answer = next((one for one in reversed(found) if isinstance(one, str)), "")
    end = text.rfind(answer) + len(answer)
    follows = _FOLLOWS.match(text, end) if answer else None
    if follows is None or not number(answer):
        return answer
    return f"{answer}{follows[0]}"
