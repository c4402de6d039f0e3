r"""Finds the final answer in a text, and reads plain numbers exactly. Pure.

"... so \boxed{\frac{3}{4}}"  ->  "\frac{3}{4}"  ->  3/4
"... \n#### 1,200 dollars"    ->  "1,200 dollars"  ->  1200
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 500

_HASH = re.compile(r"####[ \t]*([^\n]+)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\[()\[\]$!]|\$|\*\*|\\left|\\right|[€£¥₹]")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,300})"
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?) "
    rf"?(?:(?P<whole>{_DIGITS})(?P<decimals>\.\d{{0,300}})?|(?P<only>\.\d{{1,300}}))"
    rf"(?: ?/ ?(?P<over>{_DIGITS})| (?P<top>\d{{1,9}})/(?P<bottom>\d{{1,9}}))?"
    r" ?(?P<percent>%|percent\b)?(?P<unit>(?:(?<=%)| ).+)?"
)
_NAME = re.compile(r"[A-Za-z]\w{0,20} ?= ?")
_UNIT = re.compile(r"[°A-Za-zÀ-ɏ][^\d=<>+*^\\(){}\[\],;:|_$%]*")
_COUNTING = {
    "and",
    "or",
    "half",
    "third",
    "quarter",
    "dozen",
    "pair",
    "hundred",
    "thousand",
    "million",
    "billion",
    "trillion",
}
_COUNTING |= {"times", "over", "plus", "minus", "by", "to", "pi", "x", "y", "z", "n"}


@dataclass(frozen=True)
class Number:
    """A number as written: its exact `value`, whether with a percent sign, and whether as digits
    alone (no point, no fraction)."""

    value: Fraction
    is_percent: bool
    is_whole: bool


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`, or else what follows the last `####`; None if
    there is neither."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        start = text.index("{", start) + 1
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if not depth:
                return text[start:position].strip()
    found = _HASH.findall(text)
    return found[-1].strip() if found else None


def number(answer: str) -> Number | None:
    """Returns the number that `answer` is, whatever its currency, unit, thousands separators or
    LaTeX; None if it is none."""
    if len(answer) > MAX_NUMBER_CHARS:
        return None
    text = (
        _FRACTION.sub(r" \1/\2", _TEXT.sub(r" \1", answer))
        .replace("{,}", ",")
        .replace("\\,", " ")
        .replace("\\%", "%")
    )
    text = " ".join(_DROPPED.sub("", text.replace("\\ ", " ")).split()).rstrip(".,;!")
    found = _NUMBER.fullmatch(_NAME.sub("", text, count=1).strip())
    if found is None or not _is_unit(found["unit"]):
        return None
    value = Fraction(
        _plain(found["whole"] or "0") + (found["decimals"] or found["only"] or ".") + "0"
    )
    if found["over"]:
        value = value / int(_plain(found["over"])) if int(_plain(found["over"])) else None
    elif found["top"]:
        value = (
            value + Fraction(int(found["top"]), int(found["bottom"]))
            if int(found["bottom"])
            else None
        )
    if value is None:
        return None
    is_whole = not any(found[part] for part in ("decimals", "only", "over", "top"))
    return Number(
        -value if found["sign"] in ("-", "−") else value, bool(found["percent"]), is_whole
    )


def equal(given: Number, wanted: Number) -> bool:
    """Returns whether two numbers are the same: exactly if both are written as whole ones, else to
    six decimals.

    75% is 75 and 0.75, whichever is wanted.
    """
    values = [given.value]
    if given.is_percent != wanted.is_percent:
        values.append(given.value / 100 if given.is_percent else given.value * 100)
    slack = (
        Fraction(0)
        if given.is_whole and wanted.is_whole and not given.is_percent
        else Fraction(5, 10**7)
    )
    return any(abs(value - wanted.value) <= slack for value in values)


def _plain(digits: str) -> str:
    return digits.replace(",", "").replace(" ", "")


def _is_unit(unit: str | None) -> bool:
    """Returns whether what follows a number only names what is counted, and does not change the
    number ("3 dozen", "3 x")."""
    if not unit:
        return True
    words = set(re.findall(r"\w+", unit.lower()))
    return bool(_UNIT.fullmatch(unit.strip())) and not words & _COUNTING
