"""What stands after a number: a unit, which may make two equal numbers different amounts; a word
that multiplies it; or words that only name what is counted. Pure."""

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
_EV = Fraction(1_602_176_634, 10**28) * 1000
_LENGTH, _MASS, _TIME, _CURRENT = "m", "g", "s", "A"
# Sizes are in metres, grams, seconds and amperes; a joule is 1000 g m^2/s^2.
_ENERGY = {_MASS: 1, _LENGTH: 2, _TIME: -2}
_POWER_OF_WORK = {_MASS: 1, _LENGTH: 2, _TIME: -3}
_FORCE = {_MASS: 1, _LENGTH: 1, _TIME: -2}
_PRESSURE = {_MASS: 1, _LENGTH: -1, _TIME: -2}
_VOLTAGE = {_MASS: 1, _LENGTH: 2, _TIME: -3, _CURRENT: -1}
_RESISTANCE = {_MASS: 1, _LENGTH: 2, _TIME: -3, _CURRENT: -2}
_CAPACITY = {_MASS: -1, _LENGTH: -2, _TIME: 4, _CURRENT: 2}
_UNITS: list[tuple[dict[str, int], dict[str, Fraction | int]]] = [
    (
        {_LENGTH: 1},
        {
            "pm": Fraction(1, 10**12),
            "nm nanometer nanometers": Fraction(1, 10**9),
            "μm um micrometer micrometers": Fraction(1, 10**6),
            "mm millimeter millimeters millimetre millimetres": Fraction(1, 1000),
            "cm centimeter centimeters centimetre centimetres": Fraction(1, 100),
            "dm decimeter decimeters": Fraction(1, 10),
            "m meter meters metre metres": 1,
            "km kilometer kilometers kilometre kilometres": 1000,
            "in inch inches": _INCH,
            "ft foot feet": 12 * _INCH,
            "yd yard yards": 36 * _INCH,
            "mi mile miles": 63_360 * _INCH,
        },
    ),
    (
        {_MASS: 1},
        {
            "μg": Fraction(1, 10**6),
            "mg milligram milligrams": Fraction(1, 1000),
            "g gram grams": 1,
            "kg kilogram kilograms": 1000,
            "ton tons tonne tonnes": 10**6,
            "oz ounce ounces": _POUND / 16,
            "lb lbs pound pounds": _POUND,
        },
    ),
    (
        {_LENGTH: 3},
        {
            "ml mL milliliter milliliters millilitre millilitres cc": Fraction(1, 10**6),
            "l L liter liters litre litres": Fraction(1, 1000),
        },
    ),
    (
        {_TIME: 1},
        {
            "ns": Fraction(1, 10**9),
            "μs": Fraction(1, 10**6),
            "ms millisecond milliseconds": Fraction(1, 1000),
            "s sec secs second seconds": 1,
            "min mins minute minutes": 60,
            "h hr hrs hour hours": 3600,
            "day days": 86_400,
            "week weeks": 604_800,
        },
    ),
    ({_TIME: -1}, {"Hz hertz": 1, "kHz": 1000, "MHz": 10**6, "GHz": 10**9}),
    (_FORCE, {"N newton newtons": 1000, "kN": 10**6}),
    (
        _ENERGY,
        {
            "J joule joules": 1000,
            "kJ kilojoule kilojoules": 10**6,
            "MJ": 10**9,
            "cal calorie calories": 4184,
            "kcal kilocalorie kilocalories": 4_184_000,
            "kWh": 3_600_000_000,
            "eV": _EV,
            "keV": _EV * 1000,
            "MeV": _EV * 10**6,
        },
    ),
    (_POWER_OF_WORK, {"mW": 1, "W watt watts": 1000, "kW kilowatt kilowatts": 10**6, "MW": 10**9}),
    (
        _PRESSURE,
        {
            "Pa pascal pascals": 1000,
            "kPa": 10**6,
            "MPa": 10**9,
            "bar": 10**8,
            "atm atmosphere atmospheres": 101_325_000,
        },
    ),
    ({_CURRENT: 1}, {"mA": Fraction(1, 1000), "A amp amps ampere amperes": 1}),
    ({_CURRENT: 1, _TIME: 1}, {"C coulomb coulombs": 1}),
    (_VOLTAGE, {"mV": 1, "V volt volts": 1000, "kV": 10**6}),
    (
        _CAPACITY,
        {
            "pF": Fraction(1, 10**15),
            "nF": Fraction(1, 10**12),
            "μF microfarad microfarads": Fraction(1, 10**9),
            "F farad farads": Fraction(1, 1000),
        },
    ),
    (_RESISTANCE, {"Ω ohm ohms": 1000, "kΩ": 10**6}),
    ({"mol": 1}, {"mmol": Fraction(1, 1000), "mol mole moles": 1}),
    ({"month": 1}, {"month months": 1, "year years": 12}),
    ({"dollar": 1}, {"cent cents ¢": Fraction(1, 100), "dollar dollars USD US$": 1}),
    ({"euro": 1}, {"€ euro euros EUR": 1}),
    ({"sterling": 1}, {"£ GBP": 1}),
    ({"yen": 1}, {"¥ yen JPY": 1}),
    ({"rupee": 1}, {"₹ rupee rupees Rs Rs. INR": 1}),
    # None of these is a multiple of another.
    ({"degree": 1}, {"° degree degrees": 1}),
    ({"radian": 1}, {"rad radian radians": 1}),
    ({"celsius": 1}, {"°C": 1}),
    ({"fahrenheit": 1}, {"°F": 1}),
    ({"kelvin": 1}, {"K kelvin": 1}),
]
_KNOWN = {
    name: (measures, Fraction(size))
    for measures, units in _UNITS
    for names, size in units.items()
    for name in names.split()
}
_WRITTEN = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "Nm": "N m"}
_TEMPERATURE = re.compile(r"(?:°|degrees?) ?([CF])(?:elsius|ahrenheit)?\b")
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
_FACTOR = re.compile(
    r"(?:(?P<word>square|sq\.?|cubic) )?(?P<unit>[^\d^ {}]+)"
    r"(?:\^\{?(?P<power>-?[1-9])\}?)? ?"
)
_JOINT = re.compile(r"\\cdot ?|·|\*")
MAX_FACTORS = 6

_WORDS = re.compile(r"[A-Za-zÀ-ɏ]['A-Za-zÀ-ɏ-]*(?:[ ,/]+[A-Za-zÀ-ɏ]['A-Za-zÀ-ɏ-]*){0,9}")
_SHORT = {"a", "an", "at", "for", "in", "of", "on", "the", "us", "per", "ml", "tv", "tvs"}
_CHANGING_TEXT = """
and or by to pi plus minus times over divided multiplied percent percentage pct per-cent half
halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths
eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth one
two three four five six seven eight nine ten eleven twelve twenty zero hundreds thousands millions
billions dozens squared cubed factorial root roots sqrt power powers raised base choose mod modulo
modulus inverse reciprocal negative positive not less more fewer than least most between below
under above except remainder pair pairs couple double triple twice thrice gross score log exp sin
cos tan theta alpha beta gamma lambda sigma omega infinity undefined approximately about almost
nearly around january february march may april june july august september october november december
into through up exponent squares cubes billionth is was equals equal cubic square
"""
_CHANGING = frozenset(_CHANGING_TEXT.split()) | set(SCALES)
_BLANKS = {"per", "of", "the", "a", "an", "in", "for", "each"}


@dataclass(frozen=True)
class Unit:
    """`measures`: what is measured, as powers of base measures, for example (("m", 1), ("s", -1))
    for a speed; `size`: how much of the base units one is."""

    measures: tuple[tuple[str, int], ...]
    size: Fraction


@dataclass(frozen=True)
class Counted:
    """What stands after a number: it is multiplied by `scale`, and is of a known `unit`, or of
    things that have a name, by its `words`."""

    scale: int = 1
    unit: Unit | None = None
    words: frozenset[str] = frozenset()


NOTHING = Counted()


def agree(ours: Counted, theirs: Counted) -> Fraction | None:
    """Returns by how much an amount of `ours` has to be multiplied to be one of `theirs`; None
    where they are amounts of different things. What names nothing agrees with all."""
    if ours.unit and theirs.unit:
        same = ours.unit.measures == theirs.unit.measures
        return ours.unit.size / theirs.unit.size if same else None
    if (ours.unit and theirs.words) or (ours.words and theirs.unit):
        return None
    if (
        ours.words
        and theirs.words
        and not (ours.words <= theirs.words or theirs.words <= ours.words)
    ):
        return None
    return Fraction(1)


def after_number(text: str) -> Counted | None:
    """Returns what `text` says that stands after a number; None if it is neither unit nor name of
    what is counted ("or 6", "squared", "x")."""
    first, _, rest = text.strip().partition(" ")
    scale = SCALES.get(first, 1)
    rest = (rest if first in SCALES else text).strip()
    found = unit(rest)
    if found or not rest:
        return Counted(scale, found)
    words = re.findall(r"[^\W\d_]+", rest.lower())
    if words[:1] in (["square"], ["cubic"]) and words[1:] in (["unit"], ["units"]):
        return Counted(scale, None, frozenset((words[0], "unit")))
    if not _WORDS.fullmatch(rest) or any(
        word in _CHANGING or (len(word) < 3 and word not in _SHORT) for word in words
    ):
        return None
    names = frozenset(_stem(word) for word in words if word not in _BLANKS)
    return Counted(scale, None, names) if names else None


def unit(text: str) -> Unit | None:
    """Returns the unit that all of `text` is, such as "km/h" or "m s^{-1}"; None if it is no
    known unit."""
    text = _TEMPERATURE.sub(r" °\1", text.replace("μ ", "μ"))
    text = _WRITTEN.get(text, " ".join(_JOINT.sub(" ", text).split()))
    above, *below = re.split(r" ?/ ?| per ", text)
    factors = [(1, factor) for factor in _factors(above)]
    factors += [(-1, factor) for factor in _factors("".join(below).strip("()"))]
    if not factors or len(below) > 1 or len(factors) > MAX_FACTORS or (below and not below[0]):
        return None
    powers: dict[str, int] = {}
    size = Fraction(1)
    for sign, factor in factors:
        known = _KNOWN.get(factor["unit"]) if factor else None
        if factor is None or known is None:
            return None
        word = (factor["word"] or "").rstrip(".")
        power = sign * int(factor["power"] or _POWERS.get(word, 1))
        size *= known[1] ** power
        for measure, one in known[0].items():
            powers[measure] = powers.get(measure, 0) + power * one
    measures = tuple(sorted((measure, power) for measure, power in powers.items() if power))
    return Unit(measures, size)


def _factors(text: str) -> list[re.Match[str] | None]:
    """Returns the units that are multiplied in `text`, and None for what is no unit."""
    found: list[re.Match[str] | None] = []
    start = 0
    while start < len(text) and len(found) <= MAX_FACTORS:
        factor = _FACTOR.match(text, start)
        found.append(factor)
        start = factor.end() if factor and factor.end() > start else len(text)
    return found


def _stem(word: str) -> str:
    return word[:-1] if word.endswith("s") and len(word) > 3 else word
