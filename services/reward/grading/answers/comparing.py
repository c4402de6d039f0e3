r"""Whether two answers say the same. Text, plain numbers and words are decided in process
(`quick`); all else by math-verify in a limited process (`compared`), because a formula decides how
long it takes. math-verify parses, solves and simplifies; what it forgives is refused by `VETOES`.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Any

from services.reward.grading.answers.final import is_denied, without_emphasis
from services.reward.grading.answers.numbers import (
    ROUNDED_DIGITS,
    Number,
    decimal_comma,
    equal,
    number,
    terminates,
)
from services.reward.grading.answers.text import TEXT, clean, key, split, without_marks
from services.reward.grading.answers.units import NOTHING, NumberSuffix, after_number, agree

VETOES = {
    "unevaluated": "an expression that is not worked out, where the row's answer is",
    "words": "other letters: a word is no product of its letters",
    "notation": "another text: times, dates, ratios, bases and chemistry are compared as text",
    "unread": "a part that math-verify drops or guesses",
    "unit": "another unit",
    "value": "another value, beyond rounding to 6 digits",
    "brackets": "other brackets",
    "false": "an equation that does not hold",
    "unsolved": "an equation that is still to be solved",
    "always": "a relation that holds always or never",
    "backwards": "an interval from a larger to a smaller number, which is empty",
}
"""What math-verify forgives, or guesses, and is refused here."""


class Veto(Exception):
    def __init__(self, name: str, shown: str = "") -> None:
        said = VETOES[name]
        super().__init__(f"{said}, {shown!r:.60}" if shown else said)


Outcome = tuple[bool, str]
"""Whether the answers are equal, and the rule by which they are or are not."""

_SIDES = r"=|\\approx(?![a-z])|\\equiv(?![a-z])"
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in|notin)(?![A-Za-z])")
_LETTERS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ '’.!?,-])*")
_APPLIED = re.compile(r"(?:sin|cos|tan|cot|sec|csc|ln|log|exp) ?[a-z]")
_NAME = re.compile(
    r"\[?m?(?:\\(?:angle|triangle|overline|vec|hat|bar|mathbb|mathcal) ?)?"
    r"(?:\{?[A-Za-z][A-Za-z ]{0,30}\}?|\\(?!frac|sqrt|sin|cos|tan|log|ln|text)[A-Za-z]+)"
    r" ?(?:_ ?(?:\{[^{}]{1,20}\}|\w))?'{0,3}(?: ?\^ ?(?:\{ ?(?:-1|\*) ?\}|\*))?"
    r" ?(?:\([^()]{1,40}\)|\[[A-Z]\]|[A-Z])?\]?|P ?\([^()]{1,40}\)|\\frac ?\{d\w\} ?\{d\w\}"
)
_LEADING = re.compile(r"^(?:=|\\approx(?![A-Za-z])) *")
_LABELLED = re.compile(
    r"^(?:\\text ?\{[A-Za-z ]{3,40}\}|[A-Za-z](?: ?'{1,3}| ?\^ ?\{ ?-1 ?\}) ?\([a-z]\)"
    r"|\\frac ?\{ ?d ?[a-z] ?\} ?\{ ?d ?[a-z] ?\}|P ?\([^()=]{1,40}\)|\\\|[^|=]{1,20}\\\|"
    r"|\\lim ?_ ?\{[^{}]{1,40}\} ?[a-z] ?\([a-z]\)) ?=(?!=) ?(?=\S)"
)
"""What an answer is said to be, where no solver can read it: an area, a derivative, a limit."""

_QUOTES = re.compile(r"^['’](.*)['’]$")
MIN_WORD = 3
"""Letters of a word, whose case does not matter: `AB` and `ab` are other names."""

_AROUND = re.compile(r"(?:\\text ?)?\{((?:[^{}]|\{[^{}]*\})+)\}|\(((?=[^()]*\d)[^()\[\],;]+)\)")
_ALIASES = {
    "all real numbers": r"(-\infty,\infty)",
    "all reals": r"(-\infty,\infty)",
    r"\mathbb{R}": r"(-\infty,\infty)",
    "empty set": r"\emptyset",
    "the empty set": r"\emptyset",
    "does not exist": "DNE",
    "no solutions": "no solution",
    "infinity": r"\infty",
    "positive infinity": r"\infty",
    "negative infinity": r"-\infty",
}
_SPECIES = r"(?>\d*(?:[A-Z][a-z]?\d*|\((?=[A-Z])|\)\d*)+(?:\^?\d?[+-](?![\dA-Z(]))?)"
_CONDITION = re.compile(
    r"(.*?[^\s,;:(])(?:[,;:]? ?(?:\(|\\text ?\{)? ?\b(?:where|for|if|when|at|with|whenever"
    r"|provided|given|assuming|such that)\b(?: that\b)?|(?:,| (?=\()) ?"
    r"(?=\(?([A-Za-z]) ?(?:[<>]|\\(?:ge|le|ne)(?![a-z])|\\in ?\\mathbb)))(.*)"
)
_CONDITION_WORDS: set[str] = {
    *re.split(
        " ",
        "all any every each some real integer integers positive negative non nonnegative natural "
        "whole number numbers constant constants arbitrary is are an and",
    )
}
_RELATED = re.compile(r"[<>=]|\\(?:ge|le|ne|in)(?![a-z])")
_ROUNDED = r"\\approx(?![a-z])"
_NOTATIONS = re.compile(
    r"\d+(?:(?::|to)\d+)+|[\d-]+-[A-Z][a-z]{2}|-?[\dA-F.]+_\{?\d+\}?|\d{4}-\d\d-\d\d"
    r"|\d\d?([-/.])\d\d?\1\d{4}|(?:\[[A-Z][a-z]\])?(?:[1-7][spdf]\^?\{?\d\d?\}? ?){2,}"
    rf"|(?=.*(?:[A-Za-z)]\d|[+-]$)){_SPECIES}|(?=.*→){_SPECIES}(?:[+→]{_SPECIES})+"
)
_HOURS = re.compile(r"0?(\d\d?)(?::(\d\d))? ?([ap])m")
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DATE = re.compile(rf"(?=.*[A-Z])(?:(?:\d{{1,4}}(?:st|nd|rd|th)?|{_MONTH})[ .,]*(?:of )?){{2,3}}")
_MERIDIEM = re.compile(r" ?([ap])\.? ?m\.?(?![a-z])", re.IGNORECASE)
_SAYS = r"(?:(?:[Tt]he )?(?:correct )?(?:[Aa]nswer|[Oo]ption|[Cc]hoice)(?: is)?:? )"
_LABEL = re.compile(rf"{_SAYS}?(?:\(([A-Za-z])\)|([A-Za-z])[.)])|{_SAYS}([A-J])")
_CHOICE = re.compile(
    rf"{_SAYS}?(?:\(([A-J])\)|([A-J])(?:[.):]| -(?= [A-Za-z]{{3}}))) "
    r"((?!and|or|not|no\b|[A-J](?:[,.;)]|$))(?!(?:coli|elegans|melanogaster|subtilis|difficile"
    r"|albicans|botulinum|anthracis|cereus|thaliana|faecalis|pylori|sapiens|influenzae)$)"
    r"(?!.*(?:\([A-J]\)|(?<![A-Za-z])[A-J][.):] |(?:and|or|,|&) \(?[A-J]\)?$))[^\s+*/^=<>|].*)"
)
"""A choice: its letter and what it stands for. E. coli is a name, and `A. 1 or B. 2` is two."""


def quick(given: str, wanted: str, expressions: bool = False) -> Outcome | None:
    """Returns the outcome for two answers of text, words or plain numbers; None for others. With
    `expressions`, one that evaluates to the row's number is right."""
    ours, theirs = _without_conditions(unwrapped(given), unwrapped(wanted))
    if ours != theirs and re.search(_ROUNDED, ours + theirs):
        return None
    row = plain_number(theirs)
    try:
        is_spaced = "," in theirs and ours.replace(", ", ",") == theirs  # 58, 500
        if ours == theirs or (is_spaced if row else key(ours) == key(theirs)):
            return ours != "", "equal as text"
        if (by_letter := _by_letter(ours, theirs)) is not None:
            return by_letter, "equal as text" if by_letter else VETOES["words"]
        ours, theirs = _without_letters(ours, theirs)
        row = plain_number(theirs)
        if row and not expressions:
            _refuse_unevaluated(ours, row)
        (name, plain), (wanted_name, wanted_plain) = _named(ours), _named(theirs)
        wanted_plain = wanted_plain or number(decimal_comma(theirs))
        is_alone = number(ours) is not None or (name and row)
        if (
            is_alone
            and plain
            and wanted_plain
            and (not (name and wanted_name) or name == wanted_name)
        ):
            same = equal(plain, wanted_plain)
            return same, "equal as numbers" if same else "not equal as numbers"
        is_e = theirs == "e" and number(ours)  # 2.718282
        if not row and not is_e and (word := _word(theirs)):
            same = _same_word(_word(ours), word)
            return same, "equal as text" if same else VETOES["words"]
        if _NOTATIONS.fullmatch(mark := _noted(theirs)):
            if _NOTATIONS.fullmatch(ours := _noted(ours)) and _squeezed(ours) == _squeezed(mark):
                return True, "equal as text"
            raise Veto("notation")
    except Veto as veto:
        return False, str(veto)
    return None


def plain_number(answer: str) -> Number | None:
    """Returns the plain number that an answer is, or names: `x = 3`."""
    return _named(answer)[1]


def _named(answer: str) -> tuple[str, Number | None]:
    """Returns the name that an answer gives to a plain number, "" if none, and the number."""
    sides = split(answer, _SIDES)
    if any(re.search(r",|;|\band\b|\bor\b", side) for side in sides[:-1]):
        return "", None
    if len(sides) == 1:
        return "", number(answer)
    if not _NAME.fullmatch(without_marks(sides[0])):
        sides = sides[::-1]
    is_named = _NAME.fullmatch(without_marks(sides[0]))
    return key(sides[0]) * (len(sides) == 2), number(sides[-1]) if is_named else None


def unwrapped(text: str) -> str:
    """Returns an answer's cleaned text without braces, `\\text{}` or a leading `=` around it, and
    without brackets around one number or formula."""
    text = _LEADING.sub("", _LABELLED.sub("", clean(text)))
    while (found := _AROUND.fullmatch(text)) is not None:
        text = (found[1] or found[2]).strip()
    head, sign, last = text.partition(r"\approx")
    text = f"{head}={last}" if sign and _NAME.fullmatch(without_marks(head)) else text
    head, sign, last = text.rpartition("=")
    if sign and (tail := re.search(r"(?<=\d)(?: ?\\text ?\{[^{}]*\}| [a-z]{3,})$", last)):
        text = f"{head.replace(tail[0], '')}={last}"  # 8 apples + 9 apples = 17 apples
    return _ALIASES.get(text, _ALIASES.get(without_marks(text).lower(), text))


def _without_conditions(ours: str, theirs: str) -> tuple[str, str]:
    """Returns both answers without a condition that one of them has, or both: 5, where x > 0."""
    (given, condition), (wanted, wanted_condition) = _conditioned(ours), _conditioned(theirs)
    is_same = not (condition and wanted_condition) or key(condition) == key(wanted_condition)
    return (given, wanted) if is_same else (ours, theirs)


def _conditioned(text: str) -> tuple[str, str]:
    """Returns a value and the condition behind it, "" if it has none. That x is 2 is no condition
    of x + 1, and neither is anything that more values stand behind."""
    found = _CONDITION.fullmatch(text) if "\\begin" not in text else None
    if found is None:
        return text, ""
    head, bare, condition = found[1], found[2], without_marks(found[3]).strip("{}() ")
    words = {*re.findall(r"(?<![\\A-Za-z])[a-z]{2,}", condition)}
    letters = re.findall(r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z])", condition)
    is_used = letters and re.search(rf"(?<![\\A-Za-z]){letters[0]}(?![A-Za-z])", head)
    is_condition = (
        letters
        and words <= _CONDITION_WORDS
        and (words or _RELATED.search(condition))
        and not (is_used and "=" in condition)
        and all(head.count(one) == head.count(other) for one, other in ("()", "[]", "{}"))
    )
    if bare:
        is_condition = is_condition and is_used and not _RELATION.search(head)
    return (head, condition) if is_condition else (text, "")


def _refuse_unevaluated(given: str, row: Number) -> None:
    sides = split(given, _SIDES)
    ends = [number(sides[-1]), number(sides[0])]
    if not any(one and (not one.is_division or one.terms == row.terms) for one in ends):
        raise Veto("unevaluated", given)


def _by_letter(ours: str, theirs: str) -> bool | None:
    """Returns whether an answer is the row's choice, by its letter; None where it has none, or is
    also compared by what the letter stands for."""
    (given, body), (letter, wanted) = _choice(ours), _choice(theirs)
    if not wanted or (not letter and len(theirs) == 1 and theirs.isupper()):
        return _same_word(given or ours, letter or theirs)
    if not letter:
        return None
    if given == letter or ours == letter:
        return None if body and given else True
    return False if given else None


def _without_letters(ours: str, theirs: str) -> tuple[str, str]:
    """Returns both answers without the letter of a choice before what it stands for."""
    return _choice(ours)[1] or ours, _choice(theirs)[1] or theirs


def _choice(text: str) -> tuple[str, str]:
    """Returns the letter of a choice and what it stands for, either of which may be ""."""
    words = without_marks(text).strip("{} ")
    if label := _LABEL.fullmatch(words):
        return next(filter(None, label.groups())), ""
    found = _CHOICE.fullmatch(words)
    return (found[1] or found[2], found[3]) if found else ("", text)


def _word(text: str) -> str:
    """Returns the letters that are all of `text`, without blanks and full stops; "" if there are
    others."""
    words = without_marks(text).strip()
    if (
        not _LETTERS.fullmatch(words)
        or re.fullmatch(r"\w!+", words)
        or _APPLIED.fullmatch(words)
        or "," in words
    ):
        return ""
    return _QUOTES.sub(r"\1", re.sub(r"[ .!?]", "", words))


def _same_word(ours: str, theirs: str) -> bool:
    is_word = len(theirs) >= MIN_WORD or theirs.lower() == "no"
    return ours.casefold() == theirs.casefold() if is_word else ours == theirs


def _noted(text: str) -> str:
    """Returns a time by 24 hours, a date by its sorted parts, and other text without blanks."""
    text = _MERIDIEM.sub(lambda found: found[1].lower() + "m", without_marks(text))
    if time := _HOURS.fullmatch(text):
        return f"{int(time[1]) % 12 + 12 * (time[3] == 'p')}:{time[2] or '00'}"
    if _DATE.fullmatch(text):
        return "-".join(sorted(re.findall(r"\d+|[A-Z][a-z]{2}", text)))
    return re.sub(r"(?<!\d) | (?!\d)|(?<=\d) (?=[1-7][spdf])", "", key(text))


def _squeezed(text: str) -> str:
    return re.sub(r"[ {}^]|^0(?=\d:)", "", text.replace("to", ":"))


# From here on in the limited process.

DIGITS = 100
"""Of two numbers that are equal. Fewer would make a small number 0."""

MAX_WORD = 4
"""Letters that stand together in a formula: more are a word, of which no product is made."""

_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth arsinh "
    "arcosh artanh ln log exp max min gcd lcm"
)
_COMMANDS = frozenset(
    f"""{_FUNCTIONS} frac sqrt binom cdot times div pi infty circ lfloor rfloor lceil rceil vert
lvert rvert sum prod int lim to limits mod overline bar hat vec mathbb mathcal angle triangle nabla
partial ell alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda nu
xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi
Psi pm mp cup cap setminus emptyset le ge ne in notin approx equiv text begin end mid""".split()
)
_NAMES = "|".join(_FUNCTIONS.split())
_FUNCTION = re.compile(rf"\\text ?\{{ ?({_NAMES}) ?\}}|(?<![\\A-Za-z])({_NAMES})(?![A-Za-z])")
_TOKEN = re.compile(
    r"\\variable\{[A-Za-z]+\}|\\(?:begin|end) ?\{[a-z]*\}(?:\{[lcr|]*\})?|\\\\"
    r"|\\(?P<command>[A-Za-z]+)|\\[{}]|&"
    r"|(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<letter>[A-Za-zΩμ])"
    r"|[-+*/^_(){}\[\]|,;:=<>°%]|!(?!!)|\s+"
)
_WORD = re.compile(
    rf"(?<![\\A-Za-z{{])[A-Za-z]{{{MAX_WORD + 1},}}"
    r"|\\text ?\{(?! ?(?:and|or) ?\})[^{}]*[a-z]{2}"
)
_TWO_NUMBERS = re.compile(r"(?<![_^])(?<![_^\d]\d)\d\s+\d|[\d)\]}] ?_ ?(?!\{?\d+\}? ?\^)")
_FIXES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\\text ?\{ ?(and|or) ?\}"), r" \1 "),
    (re.compile(r"(?<=[\d)\]}])(and|or)(?=[A-Za-z(\[\\-])"), r" \1 "),
    (re.compile(r"(?<![\d.}\\])(\d+) ?(?:\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}|(?<= )(\d+)/(\d+))"),
     r"(\1+\\frac{\2\4}{\3\5})"),
    (re.compile(r"(\d(?:\.\d+)?)[eE](-?\d+)(?![\d.])"), r"\1\\cdot 10^{\2}"),
    (re.compile(r"(\\sqrt) ?(\[[^\[\]]*\]) ?(\d|[A-Za-z](?![A-Za-z]))"), r"\1\2{\3}"),
    (re.compile(r"(?<![_^\d.])(\d+|\)) ?\((?=-?[\d.]+\))"), r"\1\\cdot ("),
    (re.compile(r"\\(sin|cos|tan|cot|sec|csc) ?\^ ?(?:\{ ?- ?1 ?\}|-1)"), r"\\arc\1 "),
    (re.compile(r"(?<=[)\]}]) ?U ?(?=[(\[\\])"), r"\\cup "),
    (re.compile(r"\\langle ?(.*?) ?\\rangle"), r"(\1)"),
    (re.compile(r"\\\{ ?[a-z](?: ?\\in ?\\mathbb ?\{? ?R ?\}?)? ?(?:\\mid|:|\|) ?(.*)\\\}"), r"\1"),
    (re.compile(r"\\(?:hat|vec) ?\{? ?\\?([ijk])(?:math)? ?\}?"), r"\\hat{\1}"),
]  # fmt: skip
_LETTER = (
    r"(?:(?<![\\A-Za-z])[A-Za-z]"
    r"|\\(?:alpha|beta|gamma|theta|lambda|mu|rho|sigma|tau|phi|omega|Delta))"
)
_LONG_NAME = re.compile(
    rf"{_LETTER} ?_ ?(?:\{{ ?(?:\\text ?\{{)? ?\\?[A-Za-z][A-Za-z ,]{{1,20}}\}}{{1,2}}|\\max|\\min"
    r"|\\text ?\{[^{}]{1,20}\})|(?<![\\A-Za-z])E ?_ ?(?:\{ ?\w+ ?\}|\w)"
    rf"|{_LETTER}(?: ?'{{1,3}}| ?\^ ?\{{? ?-1 ?\}}?(?= ?\())(?: ?\(-?[\w.]+\))?"
    rf"|{_LETTER} ?\^ ?\{{? ?\* ?\}}?(?![\d(A-Za-z])"
)
"""A name that math-verify does not read as one: h_{max}, E_k, f'(2), f^{-1}(2), x^*."""

_AS_LETTERS = str.maketrans("0123456789", "GHIJKLMNOP")

_SYSTEM = re.compile(
    r"(?:\\\{ ?)?\\begin ?\{(cases|aligned|array|gathered|matrix)\}(?:\{[lcr]+\})?(.*)"
    r"\\end ?\{\1\}(?: ?\.)?|([^{}]*=[^{}]*\\\\[^{}]*=[^{}]*)"
)
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_INTERVAL = re.compile(r"([\[\]])([^\[\],;]+[,;][^\[\],;]+)([\[\]])")
_TURNED = re.compile(
    rf"(?:[A-Za-z] ?(?:=|\\in) ?)?{_INTERVAL.pattern}(?: ?\\cup ?{_INTERVAL.pattern})*"
)
_BRACKETS = re.compile(r"([\[(])[^()\[\]]*,[^()\[\]]*([\])])")
_TAIL = re.compile(
    r"(?P<formula>.*[\d)}!°A-Za-z]) ?\\text ?\{(?P<words>[^{}]*)\}(?P<power>\^\S+)?"
    r"|(?P<bare>.*[)}]) (?P<after>[A-Za-z°][A-Za-z°/^{}\d ]*)"
)


@dataclass(frozen=True)
class Chain:
    """An equation: the `values` that its `name` has, the last one first. Without a name these are
    its sides. `plain`: the last one and the computed ones. `is_bound`: an inequality of one
    name, and the set that it says."""

    name: str
    values: list[Any]
    relation: Any
    plain: list[Any] = field(default_factory=list)
    is_bound: bool = False


def prepare(function: str) -> None:
    import math_verify  # noqa: F401

    logging.disable()


def compared(given: str, wanted: str, expressions: bool = False) -> Outcome:
    """Returns whether two answers say the same, and by which rule."""
    try:
        ours, theirs = _values(given), _values(wanted)
    except Veto as veto:
        return False, str(veto)
    outcomes = [_compared(one, other, expressions) for other in theirs for one in ours]
    return next((one for one in outcomes if one[0]), outcomes[0])


def _values(answer: str) -> list[str]:
    """Returns an answer's value and the decimals to which it is rounded: x = 22/7 and x = 3.14 for
    x = 22/7 \\approx 3.14. Raises Veto where one is not the value, rounded."""
    exact, *decimals = split(unwrapped(answer), _ROUNDED)
    if not decimals:
        return [answer]
    name, sign, _ = exact.partition("=")
    name = f"{name}=" if sign and _NAME.fullmatch(without_marks(name)) else ""
    values = [exact, *decimals]
    value = exact.rpartition("=")[2]
    # each beside the value itself: 17 \approx 35/2 \approx 18 would lead from 17 to 18
    is_true = len(values) <= MAX_VALUES and all(_is_rounded(value, one) for one in decimals)
    if not is_true:
        raise Veto("false", answer)
    return [exact, *(f"{name}{one}" for one in decimals)]


MAX_VALUES = 3
"""Of a value and its roundings: a longer chain could lead from any number to any other."""


def _is_rounded(exact: str, decimal: str) -> bool:
    """Returns whether a decimal is a value, rounded or cut. Of two formulas only the coefficients
    may differ, by 1 %."""
    import sympy

    plain = number(decimal)
    if plain is None or plain.terms:  # 0.33 \\approx 1/3
        exact, decimal = decimal, exact
        plain = number(decimal)
    (value, unit), (rounded, rounded_unit) = _read(exact), _read(decimal)
    factor = agree(unit, rounded_unit)
    if factor is None or not all(isinstance(one, sympy.Expr) for one in (value, rounded)):
        return False
    value = value * sympy.Rational(factor.numerator, factor.denominator)
    if plain is None or plain.terms or not value.is_number:
        ratio = sympy.simplify(value / rounded)
        return bool(ratio.is_number and abs(ratio - 1).evalf() < sympy.Rational(1, 100))
    if (value * rounded).is_negative:
        return False
    digits = str(plain.value)
    step = plain.step or Fraction(10) ** (len(digits) - len(digits.rstrip("0") or digits))
    # a whole number may be rounded up, but not to the next power of ten
    least, most = (-1, 1) if step == 1 else (-0.51, 1 if plain.step else 0.51)
    for scale in (1, 100) if plain.is_percent else (1,):
        left = (abs(value * scale) - abs(rounded)).evalf(DIGITS) / sympy.Rational(str(step))
        if least < left < most:
            return True
    return False


def _compared(given: str, wanted: str, expressions: bool) -> Outcome:
    if (known := quick(given, wanted, expressions)) is not None:
        return known
    given, wanted = _without_conditions(unwrapped(given), unwrapped(wanted))
    given, wanted = _without_letters(given, wanted)
    try:
        is_copied = _OPERATION.search(split(given, _SIDES)[-1]) and not _OPERATION.search(wanted)
        if is_copied and not expressions:
            raise Veto("unevaluated", given)
        try:
            theirs, their_unit = _read(wanted)
        except Veto:
            *others, last = split(wanted, _SIDES)
            if len(others) < 2:  # as math-verify reads what it cannot read as a whole
                raise
            theirs, their_unit = _read(last)
        ours, our_unit = _read(given)
        factor = agree(our_unit, their_unit)
        import sympy

        if factor is None or (factor != 1 and not isinstance(ours, sympy.Expr)):
            raise Veto("unit")
        if factor != 1:
            ours = ours * sympy.Rational(factor.numerator, factor.denominator)
        brackets = [
            set(_BRACKETS.findall(one.replace(r"\langle", "(").replace(r"\rangle", ")")))
            for one in (given, wanted)
        ]
        if all(brackets) and brackets[0] != brackets[1] and r"\cup" not in given + wanted:
            raise Veto("brackets")
        if isinstance(ours, list) and wanted[:1] == "(" and "\\{" not in given:
            ours = tuple(ours) if isinstance(_ordered(theirs), tuple) else ours
        same = _same(ours, theirs)
        return same, "equal by math-verify" if same else "not equal by math-verify"
    except Veto as veto:
        return False, str(veto)


_OPERATION = re.compile(r"\\(?:int|sum|prod|lim)(?![a-z])|\\frac ?\{ ?(?:d|\\partial) ?\}")
"""What the problem asks to carry out, where the row's answer has none of it."""

_YES_NO = re.compile(r"\b(yes|no)\b(?=[,.!;:]|$)", re.IGNORECASE)
_CORRECT = re.compile(r"(?<![\w(])\(?([A-J])\)? is (?:the )?(?:correct|right)\b")
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!and\b|or\b)[A-Za-z]{3,}")
_SAID = re.compile(r"\b(?:answer|option|choice)(?: is|:| ?=)+:? *([^\n]{1,200})", re.IGNORECASE)
_ENVIRONMENT = (
    r"(?:(?<!\\)\$\$.{1,2000}?\$\$|(?<!\\)\$[^$\n]{1,2000}(?<!\\)\$"
    r"|\\\[.{1,2000}?\\\]|\\\(.{1,2000}?\\\))"
)
_MATH = re.compile(rf"{_ENVIRONMENT}(?:\s*(?:,? ?and|,? ?or|,)\s*{_ENVIRONMENT}){{0,5}}", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?:\s|\*|$)")
_FOLLOWS = re.compile(
    r"[eE][-+]?\d{1,3}\b"
    r"|\$? (?:squared|cubed|factorial|percent|hundred|thousand|million|billion|trillion|dozen)\b"
)
"""What changes the number that it stands behind."""


def found_in(text: str, wanted: str, expressions: bool) -> tuple[str, bool, str]:
    """Returns the answer that `text` ends with, and the outcome for it."""
    text = without_emphasis(text)
    if not (answer := _chosen(text, wanted) or _said(text, wanted) or _found(text)):
        return "", False, "no answer"
    return answer, *compared(answer, wanted, expressions)


def _chosen(text: str, wanted: str) -> str:
    """Returns the choice that a text is, or calls correct, if the row is a letter; the yes or no
    that it begins with, if the row is one."""
    if unwrapped(wanted).lower() in ("yes", "no"):
        words = {one.lower() for one in _YES_NO.findall(text)}
        return words.pop() if len(words) == 1 and _YES_NO.match(text.lstrip()) else ""
    if not re.fullmatch(r"\(?[A-J]\)?", unwrapped(wanted)):
        return ""
    if "\n" not in text.strip() and _CHOICE.fullmatch(text.strip()):
        return text.strip()
    called = _CORRECT.findall(text)
    return called[-1] if called else ""


def _said(text: str, wanted: str) -> str:
    """Returns what stands behind the last "the answer is", if it is a number or a formula without
    words beside it, or the row's answer a text."""
    for said in reversed(_SAID.findall(text)):
        answer = clean(_SENTENCE_END.split(said, maxsplit=1)[0])
        is_text = _word(unwrapped(wanted)) or _LABEL.fullmatch(unwrapped(wanted))
        is_formula = _PROSE.search(answer) is None
        return answer if number(answer) or is_text or is_formula else ""
    return ""


def _found(text: str) -> str:
    """Returns the last formula of a text, or behind its last "answer", or else the number that
    math-verify finds; what it reads in part is none."""
    from math_verify import parse

    for part in (text[text.lower().rfind("answer") :], text):
        formulas = [*_MATH.finditer(part)]
        for at, formula in enumerate(reversed(formulas)):
            if not is_denied(part, formula):
                return formula[0]
            before = formulas[-at - 2].end() if at + 1 < len(formulas) else 0
            if _SENTENCE_END.search(part, before, formula.start()):
                return ""
        if formulas:
            return ""
    found = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    answer = next((one for one in reversed(found) if isinstance(one, str)), "")
    end = text.rfind(answer) + len(answer)
    follows = _FOLLOWS.match(text, end) if answer else None
    return answer if follows is None or not number(answer) else f"{answer}{follows[0]}"


def _read(text: str) -> tuple[Any, NumberSuffix]:
    """Returns the sympy object that all of an answer is, and the unit behind it. Raises Veto."""
    import sympy

    text = unwrapped(text)
    if plain := number(text):
        value = _exactly(plain)
        exact = sympy.Float(value, plain.digits or 1) if plain.step else sympy.Rational(value)
        return exact, plain.counted
    counted = NOTHING
    head, sign, last = text.rpartition("=")
    if sign and (plain := number(last)) and not plain.is_percent:
        text, counted = f"{head}={_exactly(plain)}", plain.counted
    elif tail := _TAIL.fullmatch(text):
        words = f"{tail['words'] or tail['after']}{tail['power'] or ''}"
        found = after_number(words.strip())
        if found and found.scale == 1:
            text, counted = tail["formula"] or tail["bare"], found
    if text[:1] == "$":
        text, counted = text[1:].strip(), after_number("dollars") or NOTHING
    joint = "and" if re.search(r"(?<![a-z])and(?![a-z])", text) else "or"
    if system := _SYSTEM.fullmatch(text):
        rows = [row for row in split(system[2] or system[3], r"\\\\") if row]
        if system[1] == "cases" or all("=" in row for row in rows):
            return [_row(row, joint) for row in rows], counted
    comma = "," if ";" not in text else r"(?!)"
    parts = split(
        text, comma + r"|(?:,? *(?:\\text ?\{ ?)?(?<![A-Za-z\\])(?:and|or)(?![a-z])(?: ?\})?)"
    )
    if len(parts) > 1 and all(_RELATION.search(one) or "=" in one for one in parts):
        return _listed([_form(_parsed(one), joint) for one in parts], joint), counted
    if len(parts) == 1 and text.count(r"\pm") == 1:
        both = [text.replace(r"\pm", sign) for sign in "+-"]
        return _listed([_form(_parsed(one), joint) for one in both], joint), counted
    return _form(_parsed(text), joint), counted


def _row(row: str, joint: str) -> Any:
    """Returns an equation of a system, or a value and its condition of a function by cases."""
    parts = split(row.replace("&=", "="), r"&|,(?= )|\\text ?\{ ?(?:if|for|when) ?\}")
    forms = [_form(_parsed(part), joint) for part in parts if part]
    return tuple(forms) if len(forms) > 1 else forms[0]


def _exactly(plain: Number) -> str:
    """Returns a number as a decimal, if it was written as one, or else as a fraction."""
    value = plain.value
    return f"{Decimal(value.numerator) / value.denominator:f}" if plain.step else str(value)


def _latex_of(answer: str) -> str:
    """Returns LaTeX that math-verify reads as all of the answer. Raises Veto where it would drop or
    guess a part."""
    text = _LONG_NAME.sub(_variable, answer)
    text = _FUNCTION.sub(lambda found: f"\\{found[1] or found[2]} ", text)
    if _WORD.search(text):
        raise Veto("unread", _WORD.search(text)[0])  # pyright: ignore[reportOptionalSubscript]
    if _TURNED.fullmatch(text):  # [2, 5[ is [2, 5)
        text = _INTERVAL.sub(
            lambda found: (
                "[("[found[1] == "]"] + found[2].replace(";", ",") + "])"[found[3] == "["]
            ),
            text,
        )
    if text.startswith("[["):
        rows = [row.strip("[] ").replace(",", "&") for row in split(text[1:-1], ",")]
        text = r"\begin{pmatrix}" + r" \\ ".join(rows) + r"\end{pmatrix}"
    text = text.replace("°", r"^\circ " if _ANGLE.search(text) else "")
    for pattern, replacement in _FIXES:
        text = pattern.sub(replacement, text)
    text = TEXT.sub(r"\1", text)
    if _TWO_NUMBERS.search(text):
        raise Veto("unread", answer)
    parts: list[str] = []
    position, is_letter = 0, False
    is_differential = re.search(r"\\int|d ?[A-Za-z]|d\}|d ?_", text)
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or (token["command"] and token["command"] not in _COMMANDS):
            raise Veto("unread", text[position:])
        written = r"\mathcal{I}" if token[0] == "I" and text[token.end() :][:1] != "_" else token[0]
        is_d = token[0] == "d" and not is_letter and not is_differential
        written = r"\variable{d}" if is_d else written
        parts.append(f"_{{{written}}}" if is_letter and token["number"] else written)
        position, is_letter = token.end(), bool(token["letter"])
    return "".join(parts)


def _variable(found: re.Match[str]) -> str:
    """Returns a name as a variable of letters from which math-verify makes no function."""
    code = re.sub(r"[ {}\\]|text", "", found[0]).encode().hex().upper()
    return rf"\variable{{{code.translate(_AS_LETTERS)}}}"


def _parsed(text: str) -> Any:
    import sympy
    from latex2sympy2_extended.latex2sympy2 import (
        ConversionConfig,
        NormalizationConfig,
        latex2sympy,
        normalize_latex,
    )

    try:
        latex = normalize_latex(
            _latex_of(text), NormalizationConfig(True, False, True, True, "none", False)
        )
        config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
        found = latex2sympy(
            latex, None, True, True, normalization_config=None, conversion_config=config
        )
    except (MemoryError, RecursionError, Veto):
        raise
    except Exception as error:  # of whatever kind its parser raises on a stranger's text
        raise Veto("unread", text) from error
    if found == sympy.S.EmptySet and "emptyset" not in text and "\\{" not in text:
        raise Veto("backwards", text)
    return found


def _form(found: Any, joint: str) -> Any:
    """Returns a list for values in any order, a tuple for values in order, a Chain for an equation;
    else the sympy object, exact. `joint`: whether inequalities hold together, or one of them."""
    import sympy
    from math_verify.grader import unwrap_fcs

    if isinstance(found, sympy.MatrixExpr):
        found = found.doit()
    if isinstance(found, sympy.MatrixBase):
        is_column = found.shape[1] == 1 < found.shape[0]
        return tuple(_form(one, joint) for one in found) if is_column else _exact(found)
    if isinstance(found, sympy.Union):
        found = sympy.Union(*found.args)
    if isinstance(found, sympy.FiniteSet):
        parts = getattr(found, "_unsorted_args", found.args)  # math-verify's keeps what is twice
        return _listed([_form(one, joint) for one in parts], joint)
    if isinstance(found, sympy.Tuple):
        parts = tuple(_form(one, joint) for one in found)
        is_named = all(isinstance(one, Chain) for one in parts)  # x=1,y=2; x=3,y=4
        return tuple(one.values[0] for one in parts) if is_named else parts
    if isinstance(found, sympy.And | sympy.Eq):
        relations = getattr(found, "_unsorted_args", [found])
        if all(isinstance(one, sympy.Eq) for one in relations):
            sides = [relations[0].lhs, *(one.rhs for one in relations)]
            return _chain([(_form(one, joint), one.is_Number) for one in sides], _exact(found))
    if isinstance(found, sympy.core.relational.Relational | sympy.And):
        symbols = unwrap_fcs(found).free_symbols
        if not symbols:
            raise Veto("always", str(found))
        if len(symbols) == 1:
            try:
                values = _exact(unwrap_fcs(found)).as_set()
            except (NotImplementedError, TypeError, ValueError):
                return _exact(found)
            return Chain(str(*symbols), [values], found, is_bound=True)
    return _exact(found)


def _chain(sides: list[tuple[Any, bool]], relation: Any) -> Chain:
    """Returns an equation of sides, each with whether it is worked out."""
    import sympy

    if _name(sides[-1][0]) and not _name(sides[0][0]):
        sides = sides[::-1]
    first, last = sides[0][0], sides[-1][0]
    own = _symbols(last)

    def is_free(side: Any) -> bool:
        """Returns whether a name is none of the letters of the value."""
        is_applied = isinstance(side, sympy.core.function.AppliedUndef)
        return is_applied or own.isdisjoint(_symbols(side))

    name = _name(first) if is_free(first) else ""
    others = sides[-2 : (-len(sides) if name else None) : -1]
    others = [one for one in others if not (_name(one[0]) and is_free(one[0]))]
    point = _ordered(last) if name[:1] == "(" else None
    if isinstance(point, tuple) and name.count(",") + 1 != len(point):
        raise Veto("false")
    if name[:1] == "(" and {*(names := name[1:-1].split(","))} <= {*"xyz"}:
        last = [_in_order(names, one) for one in last] if isinstance(last, list) else last
        name, last = f"({','.join(sorted(names))})", _in_order(names, last)
    plain = [one for one, is_plain in others if is_plain]
    return Chain(name, [last, *(one for one, _ in others)], relation, [last, *plain])


def _listed(parts: list[Any], joint: str) -> Any:
    """Returns parts as a list, or as one equation where they are values of one name."""
    import sympy

    named = [one for one in parts if isinstance(one, Chain)]
    if not named or {one.name for one in named} != {named[0].name} or not named[0].name:
        return parts
    first = named[0]
    if all(one.is_bound for one in parts if isinstance(one, Chain)) and len(named) == len(parts):
        sets = [one.values[0] for one in named]
        whole = sympy.Intersection(*sets) if joint == "and" else sympy.Union(*sets)
        return Chain(first.name, [whole], first.relation, is_bound=True)
    if len(named) not in (1, len(parts)) or not isinstance(parts[0], Chain):
        return parts
    return Chain(
        first.name,
        [[one.values[0] if isinstance(one, Chain) else one for one in parts]],
        first.relation,
    )


def _exact(found: Any) -> Any:
    """Returns a sympy object with i as the imaginary unit, but next to j or k."""
    import sympy

    symbols = {one.name: one for one in found.atoms(sympy.Symbol)}
    if symbols.keys() & {"j", "k", "hat{i}", "hat{j}", "hat{k}"}:
        vectors = {
            symbols[one]: sympy.Symbol(f"hat{{{one}}}", real=True)
            for one in "ijk"
            if one in symbols
        }
        found = found.xreplace(vectors)
    elif "i" in symbols and not found.has(sympy.Sum, sympy.Product):
        found = found.xreplace({symbols["i"]: sympy.I})
    return found.doit() if isinstance(found, sympy.Expr) else found


def _symbols(form: Any) -> set[Any]:
    if isinstance(form, list | tuple):
        return set().union(*map(_symbols, form))
    return set() if isinstance(form, Chain) else {one.name for one in form.free_symbols}


def _name(form: Any) -> str:
    """Returns the name that a side of an equation is; "" for what is none."""
    import sympy
    from latex2sympy2_extended import is_expr_of_only_symbols

    form = _ordered(form)
    if isinstance(form, tuple):
        names = [_name(one) for one in form]
        return f"({','.join(names)})" if all(names) else ""
    if isinstance(form, sympy.core.function.AppliedUndef):
        plain = all(one.is_Symbol for one in form.args)
        return form.func.__name__ if plain else str(form)
    if (
        isinstance(form, sympy.Expr)
        and not (form.is_Add or form.is_Pow)
        and is_expr_of_only_symbols(form)
    ):
        return str(form)
    return ""


def _ordered(form: Any) -> Any:
    """Returns an open interval as the pair that it may be."""
    import sympy

    is_open = isinstance(form, sympy.Interval) and form.left_open and form.right_open
    return (form.start, form.end) if is_open else form


def _same(ours: Any, theirs: Any) -> bool:
    """Returns whether a given answer says what the row's says. Raises Veto."""
    import sympy

    if isinstance(theirs, list) and isinstance(ours, Chain):
        ours = _each_named(ours)
    if isinstance(ours, list) and isinstance(theirs, Chain):
        theirs = _each_named(theirs)
    if isinstance(theirs, Chain):
        return _same_equation(ours, theirs)
    if isinstance(ours, Chain):
        return _all_same(ours.values, theirs)
    if isinstance(theirs, list):
        return _same_list(_ordered(ours), theirs)
    if isinstance(ours, tuple) or isinstance(theirs, tuple):
        ours, theirs = _ordered(ours), _ordered(theirs)
        if not (isinstance(ours, tuple) and isinstance(theirs, tuple)):
            return False
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(theirs, sympy.Union) and isinstance(ours, list):  # (1, 2) or (3, 4)
        is_union = all(isinstance(one, sympy.Interval) for one in ours)
        ours = sympy.Union(*ours) if is_union else ours
    if isinstance(ours, list) or isinstance(ours, sympy.Set) != isinstance(theirs, sympy.Set):
        return False
    return _verified(ours, theirs)


def _same_equation(ours: Any, theirs: Chain) -> bool:
    value = theirs.values[0]
    if isinstance(ours, Chain):
        if theirs.name and ours.name == theirs.name:
            # An expression between the name and the value is how it was worked out.
            given = ours.values if _symbols(value) or not ours.plain else ours.plain
            return _all_same(given, value)
        if theirs.name and not _symbols(value):
            raise Veto("unsolved")
        return (
            not theirs.is_bound and not ours.is_bound and _verified(ours.relation, theirs.relation)
        )
    if not theirs.name:
        return False
    if isinstance(ours, list) and any(isinstance(one, Chain) for one in ours):
        return False
    return _same(ours, value)


def _same_list(ours: Any, theirs: list[Any]) -> bool:
    """Returns whether each part of one is a part of the other, as often; a point counts once.
    Values without names belong to the names in their order: x = 1, y = 2 is 1, 2."""
    names = {one.name for one in theirs if isinstance(one, Chain)}
    if "" not in names and len(names) == len(theirs):
        parts = ours if isinstance(ours, list | tuple) else [ours]
        if not any(isinstance(one, Chain) for one in parts):
            return len(parts) == len(theirs) and all(map(_same, parts, theirs))
    if not isinstance(ours, list):
        return False
    left = [
        one for at, one in enumerate(ours) if not isinstance(one, tuple) or one not in ours[:at]
    ]
    if len(left) != len(theirs):
        return False
    for part in theirs:
        found = next((one for one in left if _same_part(one, part)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _all_same(values: list[Any], theirs: Any) -> bool:
    """Returns whether the last value of an equation, which is the first here, is the row's. Raises
    Veto if only another one is not."""
    if not _same(values[0], theirs):
        return False
    if not all(_same_part(one, theirs) for one in values[1:]):
        raise Veto("false")
    return True


def _same_part(ours: Any, theirs: Any) -> bool:
    try:
        return _same(ours, theirs)
    except Veto:
        return False


def _each_named(chain: Chain) -> Any:
    """Returns `(x, y) = (1, 2)` as x = 1 and y = 2, and anything else unchanged."""
    names, values = chain.name[1:-1].split(","), _ordered(chain.values[0])
    if chain.name[:1] != "(" or not isinstance(values, tuple) or len(names) != len(values):
        return chain
    return [Chain(name, [value], None) for name, value in zip(names, values, strict=True)]


def _in_order(names: list[str], value: Any) -> Any:
    """Returns the (2, 1) that (y, x) is as (1, 2)."""
    point = _ordered(value)
    if not isinstance(point, tuple) or len(point) != len(names):
        return value
    return tuple(point[at] for at in sorted(range(len(names)), key=names.__getitem__))


def _verified(ours: Any, theirs: Any) -> bool:
    """Returns whether two values, relations or sets are equal, decimals exact."""
    import sympy
    from math_verify import verify

    (shape, parts), (wanted_shape, wanted) = _elements(ours), _elements(theirs)
    if shape and shape == wanted_shape:
        return all(map(_verified, parts, wanted))
    exact: list[Any] = [
        one.xreplace({x: sympy.Rational(str(x)) for x in one.atoms(sympy.Float)})
        for one in (ours, theirs)
    ]
    for one in exact:
        sides: list[Any] = [*one.args] if isinstance(one, sympy.Eq) else []
        is_value = sides and isinstance(sides[1], sympy.Expr)
        if is_value and not sympy.simplify(sides[0] - sides[1]).free_symbols:
            raise Veto("always", str(one))
        if one.has(sympy.nan, sympy.zoo):
            raise Veto("unread")
    is_expression = all(isinstance(one, sympy.Expr) for one in exact)
    same = _same_values(exact[0], exact[1]) if is_expression else None
    if same is None:
        same = verify(exact[1], exact[0], numeric_precision=DIGITS, timeout_seconds=None)
    if same or not is_expression:
        return same
    rounded = (ours, exact[1]), (theirs, exact[0])
    if any(isinstance(one, sympy.Float) and _is_rounding(one, other) for one, other in rounded):
        return True
    raise Veto("value")


def _elements(form: Any) -> tuple[Any, list[Any]]:
    """Returns what of two intervals, unions or matrices has to be the same, and their elements."""
    import sympy

    if isinstance(form, sympy.Interval):
        return (form.left_open, form.right_open), [form.start, form.end]
    if isinstance(form, sympy.Union):
        return [*map(type, form.args)], [*form.args]
    return (form.shape, [*form]) if isinstance(form, sympy.MatrixBase) else (None, [])


def _same_values(ours: Any, theirs: Any) -> bool | None:
    """Returns whether two expressions have the same values, to `DIGITS` digits of their difference
    however small it is, where their symbols are random numbers; None where they have no such value.
    math-verify takes e^{-500} for e^{-501}, and makes one logarithm of a number of a million digits
    of log_2(3) - 1.584963."""
    import sympy

    if ours == theirs:
        return True
    difference = ours - theirs
    symbols = sorted(difference.free_symbols, key=str)
    if difference.has(
        sympy.Sum,
        sympy.Product,
        sympy.Integral,
        sympy.Limit,
        sympy.oo,
        sympy.core.function.AppliedUndef,
    ):
        return None
    numbers = Random(f"{ours} {theirs}")
    for sign in (1, -1) if symbols else (1,):
        point = {one: sympy.Rational(sign * numbers.randrange(1, 4000), 997) for one in symbols}
        parts = difference.evalf(DIGITS, subs=point).as_real_imag()
        if not all(one.is_Float or one.is_Rational for one in parts):
            return None
        if any(one and (one.is_Rational or one._prec > 1) for one in parts):
            return False
    return True


def _is_rounding(decimal: Any, value: Any) -> bool:
    """Returns whether a decimal of enough digits is what was made of `value`, which no decimal is,
    by rounding or cutting it."""
    import sympy

    if not value.is_number or not value.is_real:
        return False
    number = Decimal(str(decimal))
    is_plain = decimal._prec < 53  # its zeros count: 1.414210 is no rounding of 1.414214
    written = format(number if is_plain else number.normalize(), "f")
    digits = len(written.replace("-", "").replace(".", "").lstrip("0"))
    step = sympy.Rational(1, 10 ** len(written.partition(".")[2]))
    is_endless = not value.is_Rational or not terminates(Fraction(int(value.p), int(value.q)))
    is_close = bool(abs((sympy.Rational(str(decimal)) - value).evalf(DIGITS)) < step)
    return is_endless and digits >= ROUNDED_DIGITS and is_close
