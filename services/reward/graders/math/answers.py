r"""Finds the final answer in a text, and reads plain numbers exactly. Pure.

"... so \boxed{\frac{3}{4}}"  ->  "\frac{3}{4}"  ->  3/4
"... \n#### 1,200 dollars"    ->  "1,200 dollars"  ->  1200
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from services.reward.graders.math.units import SCALES, Unit, after_number, unit

MAX_NUMBER_CHARS = 500

_BRACE = re.compile(r"[{}]")
_HASH = re.compile(r"####[ \t]*([^\n]+)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\[()\[\]$!]|\$|\*\*|\\left|\\right|[€£¥₹]")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,300})"
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?) "
    rf"?(?:(?P<whole>{_DIGITS})(?P<decimals>\.\d{{0,300}})?|(?P<only>\.\d{{1,300}}))"
    rf"(?: ?/ ?(?P<over>{_DIGITS})| (?P<top>\d{{1,9}})/(?P<bottom>\d{{1,9}}))?"
    r" ?(?P<percent>%|percent\b)?(?P<after>(?:(?<=%)| ).+)?(?P<attached>(?<=\d)[°A-Za-z].*)?"
)
_NAME = re.compile(r"[A-Za-z]\w{0,20} ?= ?")


@dataclass(frozen=True)
class Number:
    """A number as written: its exact `value`, whether with a percent sign, whether as digits alone
    (no point, no fraction), and its unit if it has one that is known."""

    value: Fraction
    is_percent: bool
    is_whole: bool
    unit: Unit | None = None


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`, or else what follows the last `####`; None if
    there is neither."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        start = text.index("{", start) + 1
        depth = 1
        for brace in _BRACE.finditer(text, start):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return text[start : brace.start()].strip()
    found = _HASH.findall(text)
    return found[-1].strip() if found else None


def number(answer: str) -> Number | None:
    """Returns the number that `answer` is, whatever its currency, thousands separators or LaTeX,
    and whatever it counts; None if it is none. 5! is none: it is a formula."""
    if len(answer) > MAX_NUMBER_CHARS:
        return None
    text = (
        _FRACTION.sub(r" \1/\2", _TEXT.sub(r" \1", answer))
        .replace("{,}", ",")
        .replace("\\,", " ")
        .replace("\\%", "%")
    )
    text = " ".join(_DROPPED.sub("", text.replace("\\ ", " ")).split()).rstrip(".,;")
    found = _NUMBER.fullmatch(_NAME.sub("", text, count=1).strip())
    counted = _counted(found) if found else None
    if found is None or counted is None:
        return None
    scale, known_unit = counted
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
    signed = -value if found["sign"] in ("-", "−") else value
    return Number(signed * scale, bool(found["percent"]), is_whole, known_unit)


def equal(given: Number, wanted: Number) -> bool:
    """Returns whether two numbers are the same: exactly if both are written as whole ones, else to
    six decimals.

    75% is 75 and 0.75, whichever is wanted. 5 km is 5000 m, is 5, and is not 5 m: where both have a
    unit it counts.
    """
    value = given.value
    if given.unit and wanted.unit:
        if given.unit.measures != wanted.unit.measures:
            return False
        value *= given.unit.size / wanted.unit.size
    values = [value]
    if given.is_percent != wanted.is_percent:
        values.append(value / 100 if given.is_percent else value * 100)
    slack = (
        Fraction(0)
        if given.is_whole and wanted.is_whole and not given.is_percent
        else Fraction(5, 10**7)
    )
    return any(abs(value - wanted.value) <= slack for value in values)


def _plain(digits: str) -> str:
    return digits.replace(",", "").replace(" ", "")


def _counted(found: re.Match[str]) -> tuple[int, Unit | None] | None:
    """Returns what `after_number` does of what follows the digits. Without a blank between, only a
    known unit, or k for thousand, does: 5x is a formula."""
    attached = found["attached"]
    if not attached:
        return after_number(found["after"] or "")
    if attached in ("k", "K"):
        return SCALES["k"], None
    known = unit(attached)
    return (1, known) if known else None
