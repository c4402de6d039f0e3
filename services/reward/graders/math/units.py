"""What stands after a number: a unit, which may make two equal numbers different amounts; a word
that multiplies it; or a word that only names what is counted. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

SCALES = {
    "k": 10**3,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_INCH = Fraction(254, 10_000)
_POUND = Fraction(45_359_237, 100_000)
_MEASURES: dict[str, dict[str, Fraction | int]] = {
    "length": {
        "mm millimeter millimeters millimetre millimetres": Fraction(1, 1000),
        "cm centimeter centimeters centimetre centimetres": Fraction(1, 100),
        "m meter meters metre metres": 1,
        "km kilometer kilometers kilometre kilometres": 1000,
        "inch inches": _INCH,
        "ft foot feet": 12 * _INCH,
        "yd yard yards": 36 * _INCH,
        "mi mile miles": 63_360 * _INCH,
    },
    "mass": {
        "mg milligram milligrams": Fraction(1, 1000),
        "g gram grams": 1,
        "kg kilogram kilograms": 1000,
        "oz ounce ounces": _POUND / 16,
        "lb lbs pound pounds": _POUND,
    },
    "volume": {
        "ml mL milliliter milliliters millilitre millilitres": Fraction(1, 1000),
        "l L liter liters litre litres": 1,
    },
    "time": {
        "ms millisecond milliseconds": Fraction(1, 1000),
        "s sec secs second seconds": 1,
        "min mins minute minutes": 60,
        "h hr hrs hour hours": 3600,
        "day days": 86_400,
        "week weeks": 604_800,
    },
    "calendar": {"month months": 1, "year years": 12},
    "money": {"cent cents": Fraction(1, 100), "dollar dollars": 1},
    # None of these is a multiple of another.
    "degrees": {"° degree degrees": 1},
    "radians": {"rad radian radians": 1},
    "celsius": {"°C": 1},
    "fahrenheit": {"°F": 1},
    "kelvin": {"K kelvin": 1},
}
_KNOWN = {
    name: (measure, Fraction(size))
    for measure, units in _MEASURES.items()
    for names, size in units.items()
    for name in names.split()
}
_SPEEDS = {"mph": "miles/hour", "kmh": "km/h", "kph": "km/h"}
_POWER = re.compile(
    r"(?:(?P<word>square|sq\.?|cubic) )?(?P<unit>[^\d^²³]+?)"
    r" ?(?:\^\{?(?P<digit>[23])\}?|(?P<sign>[²³]))?"
)
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "2": 2, "3": 3, "²": 2, "³": 3}
_COUNTED = re.compile(r"[°A-Za-zÀ-ɏ][^\d=<>+*^\\(){}\[\],;:|_$%]*")
_CHANGING = {"and", "or", "half", "third", "quarter", "pair", "times", "over", "plus", "minus"}
_CHANGING |= {"by", "to", "pi", "x", "y", "z", "n", *SCALES}


@dataclass(frozen=True)
class Unit:
    """`measures`: what is measured, for example ("length", "time") for a speed; `size`: how much of
    the base units one is."""

    measures: tuple[str, ...]
    size: Fraction


def after_number(text: str) -> tuple[int, Unit | None] | None:
    """Returns by how much `text`, which stands after a number, multiplies it, and the unit if it is
    a known one; None if it is neither unit nor name of what is counted ("or 6", "x")."""
    first, _, rest = text.strip().partition(" ")
    scale = SCALES.get(first, 1)
    rest = (rest if first in SCALES else text).strip()
    found = unit(rest)
    if found or not rest:
        return scale, found
    words = set(re.findall(r"\w+", rest.lower()))
    return None if words & _CHANGING or not _COUNTED.fullmatch(rest) else (scale, None)


def unit(text: str) -> Unit | None:
    """Returns the unit that all of `text` is, None if it is none that is known."""
    parts = re.split(r" ?/ ?| per ", _SPEEDS.get(text, text))
    found = [_single(part) for part in parts]
    if len(found) > 2 or any(part is None for part in found):
        return None
    known = [part for part in found if part]
    size = known[0].size if len(known) == 1 else known[0].size / known[1].size
    return Unit(tuple(measure for part in known for measure in part.measures), size)


def _single(text: str) -> Unit | None:
    match = _POWER.fullmatch(text.strip())
    known = _KNOWN.get(match["unit"]) if match else None
    if match is None or known is None:
        return None
    power = _POWERS.get((match["word"] or match["digit"] or match["sign"] or "").rstrip("."), 1)
    measure, size = known
    return Unit((measure if power == 1 else f"{measure}^{power}",), size**power)
