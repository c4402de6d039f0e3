r"""Reads plain numbers exactly. Pure.

"\frac{3}{4}"            ->  3/4
"1,200 dollars"          ->  1200 dollars
"1.6 \times 10^{-19}"    ->  1.6e-19
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from services.reward.grading.answers.text import clean, without_marks
from services.reward.grading.answers.units import (
    NOTHING,
    SCALES,
    NumberSuffix,
    after_number,
    agree,
    unit,
)

MAX_NUMBER_CHARS = 500

ROUNDED_DIGITS = 6
"""A number without a finite decimal, such as 1/3, equals its decimal of at least so many digits."""

LONG_DIGITS = 12
"""A decimal of so many digits is taken to be rounded."""

_FRACTION = re.compile(r"\\frac ?(?:\{([^{}]*)\}|(\d)) ?(?:\{([^{}]*)\}|(\d)(?!\d))")
_REPEATING = re.compile(
    r"(\d{0,20})\.(\d{0,20}?)"
    r"(?:\\(?:overline|bar|dot) ?\{ ?(\d{1,20}) ?\}|\((\d{1,20})\)|(\d{1,3}?)\5{2,9}…"
    r"|(\d{2,3})\6…)"
)
_CUT = re.compile(r"(\.\d+)…$")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ '’_]\d{3})+|\d{1,3}(?:\.\d{3}){2,9}|\d{1,300})"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?) ?(?P<money>[$€£¥₹]?|US\$|(?:USD|EUR|GBP|JPY|INR|Rs\.?) ) ?(?P<inner>-?)"
    rf"(?:(?P<whole>{_DIGITS})(?P<decimals>\.\d{{0,300}})?|(?P<only>\.\d{{1,300}}))"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})(?![\d.])"
    r"| ?(?:\\times|\\cdot|[x*]) ?10 ?\^ ?"
    r"(?:\{ ?(?P<power>[-+]?\d{1,3}) ?\}|(?P<bare>[-+]?\d{1,3})))?"
    rf"(?: ?/ ?(?P<over>{_DIGITS})| (?P<top>\d{{1,9}})/(?P<bottom>\d{{1,9}}))?"
    r" ?(?P<percent>%|per ?cent(?:age)?\b|pct\b)?(?P<after>(?:(?<=%)| ).+|(?<=\})[°A-Za-z].*)?"
    r"(?P<attached>(?<=\d)[°¢€£¥₹ΩμA-Za-z].*)?"
)
_ORDINAL = re.compile(r"(?<=\d)(?: ?\^ ?\{? ?| ?)(?:st|nd|rd|th)\b(?: ?\})?", re.IGNORECASE)
_AND = re.compile(r"(?<=[a-z])(?: and)? (?=\d)")
MAX_COMPOUND = 3
"""Most amounts that are added, as in 1 h 20 min 5 s."""

_ONES: list[str] = re.split(
    " ",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen",
)
_TENS: list[str] = re.split(" ", "twenty thirty forty fifty sixty seventy eighty ninety")
_PARTS: list[str] = re.split(" ", "half third quarter fifth sixth seventh eighth ninth tenth")
_ALONE = {"half", *SCALES} - {"k"}
"""Words that are a number by themselves. With another behind them they may be a name: Hundred Years
War."""

_SPOKEN = re.compile(
    rf"(?P<sign>(?:minus|negative) )?(?:(?P<tens>{'|'.join(_TENS)})(?:[- ](?P<and>"
    rf"{'|'.join(_ONES[1:10])}))?|(?P<ones>{'|'.join(_ONES)})|(?P<an>an?)(?= (?:{'|'.join(SCALES)}|"
    rf"half|third|quarter)\b))(?![a-z])(?:[- ](?P<part>{'|'.join(_PARTS)})s?(?![- \w]))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Number:
    """A number as written: its exact `value`, whether with a percent sign, and what it counts.

    `digits`: how many significant ones it has where it is written as a decimal, and `step` what one
    of the last of them is worth; a whole number or a fraction has neither. `is_attached`: a unit of
    one letter stands at its digits, which may as well be a variable. `terms`: what stands above and
    below the line of a fraction.
    """

    value: Fraction
    is_percent: bool = False
    counted: NumberSuffix = NOTHING
    digits: int = 0
    step: Fraction | None = None
    is_attached: bool = False
    terms: tuple[Fraction, int] | None = None

    @property
    def is_division(self) -> bool:
        """Returns whether it is a division that is not carried out: 8/2, 6/8 or 1.5/2, not 3/4."""
        if self.terms is None:
            return False
        above, below = self.terms
        return above.denominator != 1 or gcd(above.numerator, below) != 1

    @property
    def is_rounded(self) -> bool:
        """Returns whether the written decimals cannot be all decimals of the number."""
        return self.digits >= LONG_DIGITS or not terminates(self.value)

    def times(self, factor: Fraction) -> Number:
        step = self.step and self.step * factor
        return Number(self.value * factor, False, NOTHING, self.digits, step)


def number(answer: str) -> Number | None:
    """Returns the number that `answer` is, whatever its currency, thousands separators or LaTeX,
    and whatever it counts; None if it is none. 5! is none: it is a formula."""
    if len(answer) > MAX_NUMBER_CHARS:
        return None
    text = _ORDINAL.sub("", without_marks(clean(answer)))
    if "\\" in text or "…" in text or "(" in text:
        text = _REPEATING.sub(_repeated, _FRACTION.sub(_as_slash, text))
        text = " ".join(_CUT.sub(r"\1", text).split())
    if text[:1].isalpha():
        text = f"a {text.lower()}" if text.lower() in _ALONE else text
        spoken = _SPOKEN.match(text)
        text = _digits(spoken) + text[spoken.end() :] if spoken else text
    found = _NUMBER.fullmatch(text)
    counted = _counted(found) if found else None
    if found is None or counted is None:
        return _compound(text)
    mantissa = _plain(found["whole"] or "") + (found["decimals"] or found["only"] or "")
    exponent = int(found["exponent"] or found["power"] or found["bare"] or 0)
    scale = Fraction(10) ** exponent * counted.scale if exponent else Fraction(counted.scale)
    value = Fraction(f"0{mantissa}0" if "." in mantissa else mantissa)
    over, top, bottom = (int(_plain(found[name] or "0")) for name in ("over", "top", "bottom"))
    if (found["over"] and not over) or (found["top"] and not bottom):
        return None
    terms = (value, over) if over else (Fraction(top), bottom) if bottom else None
    if over or bottom:
        value = value / (over or 1) + (Fraction(top, bottom) if bottom else 0)
    negative = (found["sign"] == "-") != (found["inner"] == "-")
    is_decimal = ("." in mantissa or exponent != 0) and not over and not bottom
    places = len(mantissa.partition(".")[2])
    attached = found["attached"] or ""
    return Number(
        (-value if negative else value) * scale,
        bool(found["percent"]),
        counted,
        len(mantissa.replace(".", "").lstrip("0")) if is_decimal else 0,
        Fraction(1, 10**places) * abs(scale) if is_decimal else None,
        len(attached) == 1 and attached.isalpha() and attached not in "kK",
        terms,
    )


def equal(given: Number, wanted: Number) -> bool:
    """Returns whether two numbers are the same, exactly as they are written.

    Where one cannot be written as a decimal, the other has to be its first `ROUNDED_DIGITS` digits
    or more. 5 km is 5000 m, is 5, and is not 5 m: where both have a unit it counts.
    """
    factor = agree(given.counted, wanted.counted)
    if (
        given.is_percent != wanted.is_percent
        and (wanted if given.is_percent else given).counted != NOTHING
    ):
        return False
    if factor is None or _may_be_variable(given, wanted) or _may_be_variable(wanted, given):
        return False
    return any(_near(given.times(one), wanted) for one in factors(given, wanted, factor))


def factors(given: Number | None, wanted: Number | None, factor: Fraction) -> list[Fraction]:
    """Returns what a given value may be multiplied by, for `factor`: 75% is 75 and 3/4, and 0.75%
    is 0.0075 only."""
    if bool(given and given.is_percent) == bool(wanted and wanted.is_percent):
        return [factor]
    if given and given.is_percent:
        return [factor / 100, *([factor] if abs(given.value) >= 1 else [])]
    return [factor * 100, *([factor] if wanted and abs(wanted.value) >= 1 else [])]


def _near(given: Number, wanted: Number) -> bool:
    is_same = given.value == wanted.value
    return is_same or is_rounding(given, wanted) or is_rounding(wanted, given)


def is_rounding(decimal: Number, number: Number) -> bool:
    """Returns whether `decimal` is what was made of `number`, which no decimal is, by rounding or
    cutting it to enough digits."""
    return (
        number.is_rounded
        and decimal.step is not None
        and decimal.digits >= ROUNDED_DIGITS
        and abs(decimal.value - number.value) < abs(decimal.step)
    )


def terminates(value: Fraction) -> bool:
    """Returns whether `value` can be written as a decimal."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _may_be_variable(one: Number, other: Number) -> bool:
    """5m is no 5: its m may be a unit or a variable."""
    return one.is_attached and not (other.counted.unit or other.counted.words)


def _as_slash(found: re.Match[str]) -> str:
    top, bottom = (found[1] or found[2] or "").strip(), (found[3] or found[4] or "").strip()
    if bottom.startswith("-"):
        top, bottom = (top[1:] if top.startswith("-") else f"-{top}"), bottom[1:].strip()
    return f" {top}/{bottom}"


def _repeated(found: re.Match[str]) -> str:
    """Returns 0.1(6) as 1/6."""
    whole, fixed, *patterns = found.groups()
    repeated = next(filter(None, patterns))
    top = int(f"{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}")
    value = Fraction(top, (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return f"{value.numerator}/{value.denominator}"


def _digits(found: re.Match[str]) -> str:
    """Returns "twenty-one" as 21 and "two thirds" as 2/3."""
    ones, tens, part = (
        (found[name] or "").lower() for name in ("ones" if found["ones"] else "and", "tens", "part")
    )
    value = 1 if found["an"] else _ONES.index(ones or "zero")
    value += 10 * (_TENS.index(tens) + 2) if tens else 0
    part = f"/{_PARTS.index(part) + 2}" if part else ""
    return f"{'-' if found['sign'] else ''}{value}{part}"


def _compound(text: str) -> Number | None:
    """Returns 2 hours 30 minutes as 2.5 hours: amounts of one measure in smaller and smaller units,
    each less than one of the unit before."""
    texts = _AND.split(text, MAX_COMPOUND)
    parts = [number(part) for part in texts] if len(texts) > 1 else []
    amounts = [(part.value, part.counted.unit) for part in parts if part and part.counted.unit]
    if not 1 < len(amounts) == len(parts):
        return None
    (total, first), *others = amounts
    left = first.size
    for value, smaller in others:
        if smaller.measures != first.measures or not 0 <= value * smaller.size < left:
            return None
        total, left = total + value * smaller.size / first.size, smaller.size
    return Number(total, counted=NumberSuffix(1, first)) if amounts[0][0] >= 0 else None


def decimal_comma(text: str) -> str:
    """Returns 1,22 as 1.22. With a blank behind the comma, or groups of three, it is none."""
    found = re.match(
        r"([-+$€£]*(?:\d{1,3}(?:[ .]\d{3})+|\d+)),(\d{1,2}|\d{4,})(?=$| ?[^\d\s,.])", text
    )
    return f"{re.sub('[ .]', '', found[1])}.{found[2]}{text[found.end() :]}" if found else text


def _plain(digits: str) -> str:
    return re.sub(r"[ ,.'’_]", "", digits)


def _counted(found: re.Match[str]) -> NumberSuffix | None:
    """Returns what `after_number` does of what follows the digits. Without a blank between, only a
    known unit, or k for thousand, does: 5x is a formula."""
    attached = found["attached"]
    if attached in ("k", "K"):
        counted: NumberSuffix | None = NumberSuffix(SCALES["k"])
    elif attached:
        known = unit(attached)
        counted = NumberSuffix(1, known) if known else None
    else:
        counted = after_number(found["after"] or "")
    if not found["money"] or counted is None:
        return counted
    if found["percent"]:
        return None
    money = "dollars" if found["money"] == "$" else found["money"].strip()
    if counted.unit:
        return None if counted.unit != unit(money) else counted
    return NumberSuffix(counted.scale, unit(money))
