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
_PREFIXES = {
    "": ("", "1"), "p": ("pico", "1e-12"), "n": ("nano", "1e-9"), "μ": ("micro", "1e-6"),
    "m": ("milli", ".001"), "c": ("centi", ".01"), "d": ("deci", ".1"), "k": ("kilo", "1000"),
    "M": ("mega", "1e6"), "G": ("giga", "1e9"), "T": ("tera", "1e12"),
}  # fmt: skip
_TABLE = """
m: pnμmcdk/m meter metre 1, in inch inches .0254, ft foot feet .3048, yd yard .9144,
m: mi mile 1609.344, Å angstrom 1e-10, AU 149597870700, ly lightyear 9460730472580800,
m: um 1e-6, parsec 30856775814913673
m2: ha hectare 1e4, acre 4046.8564224
m3: μmcd/L l liter litre .001, cc 1e-6, gal gallon .003785411784, qt quart .000946352946
kg: μmk/g gram .001, ton tonne 1000, oz ounce .028349523125, lb pound .45359237,
kg: amu Da dalton 1.66053906660e-27
s: pnμm/s sec second 1, min minute 60, h hr hour 3600, day 86400, week 604800
s-1: kMGT/Hz hertz 1, kM/Bq becquerel 1, Ci curie 37e9
kg m s-2: mkM/N newton 1
kg m2 s-2: mkMG/J joule 1, k/cal calorie 4.184, kMG/Wh 3600, mkMGT/eV 1.602176634e-19
kg m2 s-3: μmkMG/W watt 1, hp horsepower 745.69987158227022
kg m-1 s-2: kMG/Pa pascal 1, m/bar 1e5, atm atmosphere 101325, mmHg torr 101325/760,
kg m-1 s-2: psi 6894.757293168
A: nμmk/A amp ampere 1
A s: pnμm/C coulomb 1
kg m2 s-3 A-1: μmkM/V volt 1
kg-1 m-2 s4 A2: pnμm/F farad 1
kg m2 s-3 A-2: mkM/Ω ohm 1
kg-1 m-2 s3 A2: μm/S siemens 1
kg m2 s-2 A-2: μm/H henry henries 1
kg s-2 A-1: nμm/T tesla 1
kg m2 s-2 A-1: m/Wb weber 1
m2 s-2: μm/Sv sievert 1, m/Gy 1
mol: nμm/mol mole 1
mol m-3: nM 1e-6, μM .001, mM 1
cd: cd candela 1, lm lumen 1
cd m-2: lx lux 1
decibel: dB decibel 1
month: month 1, year 12
dollar: cent ¢ .01, dollar USD US$ 1
euro: € euro EUR 1
sterling: £ GBP 1
yen: ¥ yen JPY 1
rupee: ₹ rupee Rs Rs. INR 1
degree: ° degree 1
radian: rad radian 1
celsius: °C 1
fahrenheit: °F 1
kelvin: K kelvin 1
"""
"""What is measured, in base measures, and the size of its units in these; the letters before a `/`
are the prefixes of a unit."""

Measures = dict[str, int]


def _read_table() -> dict[str, tuple[Measures, Fraction]]:
    known: dict[str, tuple[Measures, Fraction]] = {}
    for line in _TABLE.split("\n")[1:-1]:
        above, units = line.split(": ")
        powers = [re.fullmatch(r"([A-Za-z]+)(-?\d)?", one) for one in above.split()]
        measures = {one[1]: int(one[2] or 1) for one in powers if one}
        for names in units.strip(",").split(", "):
            *alike, size = names.split()
            prefixes, _, alike[0] = alike[0].rpartition("/")
            for prefix in ("", *prefixes):
                word, factor = _PREFIXES[prefix]
                spelled = [f"{word if len(name) > 3 else prefix}{name}" for name in alike]
                many = [one for one in spelled if len(one) > 1 and one.isalpha() and one != "ha"]
                plurals = [f"{one}s" for one in many]
                one = measures, Fraction(size) * Fraction(factor)
                known |= dict.fromkeys([*plurals, *spelled], one)
    return known


_KNOWN = _read_table()
_WRITTEN = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "Nm": "N m"}
_TEMPERATURE = re.compile(r"(?:°|degrees?) ?([CF])(?:elsius|ahrenheit)?\b")
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
_FACTOR = re.compile(
    r"(?:(?P<word>square|sq\.?|cubic) )?(?P<unit>[^\d^ {}]+)"
    r"(?:\^\{?(?P<power>-?[1-9])\}?)? ?"
)
_JOINT = re.compile(r"\\cdot ?|·|\*")
MAX_FACTORS = 6

_REMARK = re.compile(r"(.*?) ?\(([A-Za-z][A-Za-z ]*)\)")
"""Words in brackets behind a unit: 5 dollars (per person)."""

_WORDS = re.compile(r"[A-Za-zÀ-ɏ]['A-Za-zÀ-ɏ-]*(?:[ ,/]+[A-Za-zÀ-ɏ]['A-Za-zÀ-ɏ-]*){0,9}")
_SHORT = {"a", "an", "at", "for", "in", "of", "on", "the", "us", "per", "ml", "tv", "tvs"}
_CHANGING_TEXT = """
and or by to pi plus minus times over divided multiplied percent percentage pct per-cent half halves
third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth
eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth one two
three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety zero hundreds thousands
millions billions dozens lakh lakhs crore crores mil googol doubled tripled quadrupled halved
negated otherwise alternatively maybe perhaps nope wrong incorrect squared cubed factorial root
roots sqrt power powers raised base choose mod modulo modulus inverse reciprocal negative positive
not less more fewer than least most between below under above except remainder pair pairs couple
double triple twice thrice gross score log exp sin cos tan theta alpha beta gamma lambda sigma omega
infinity undefined approximately about almost nearly around january february march may april june
july august september october november december into through up exponent squares cubes billionth is
was equals equal cubic square
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
class NumberSuffix:
    """What stands after a number: it is multiplied by `scale`, and is of a known `unit`, or of
    things that have a name, by its `words`."""

    scale: int = 1
    unit: Unit | None = None
    words: frozenset[str] = frozenset()


NOTHING = NumberSuffix()


def agree(ours: NumberSuffix, theirs: NumberSuffix) -> Fraction | None:
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


def after_number(text: str) -> NumberSuffix | None:
    """Returns what `text` says that stands after a number; None if it is neither unit nor name of
    what is counted ("or 6", "squared", "x")."""
    first, _, rest = text.strip().partition(" ")
    scale = SCALES.get(first, 1)
    rest = (rest if first in SCALES else text).strip()
    if unit(rest) is None and (remark := _REMARK.fullmatch(rest)):
        said, rest = after_number(remark[2].removeprefix("in ")), remark[1]
        if said is None or said.scale != 1:
            return None
        if not rest:
            return said
    found = unit(rest)
    if found or not rest:
        return NumberSuffix(scale, found)
    words = re.findall(r"[^\W\d_]+", rest.lower())
    if words[:1] in (["square"], ["cubic"]) and words[1:] in (["unit"], ["units"]):
        return NumberSuffix(scale, None, frozenset((words[0], "unit")))
    if not _WORDS.fullmatch(rest) or any(
        word in _CHANGING
        or word.endswith(("illion", "illions", "fold"))
        or (len(word) < 3 and word not in _SHORT)
        for word in words
    ):
        return None
    names = frozenset(_stem(word) for word in words if word not in _BLANKS)
    return NumberSuffix(scale, None, names) if names or words == ["each"] else None


def unit(text: str) -> Unit | None:
    """Returns the unit that all of `text` is, such as "km/h" or "m s^{-1}"; None if it is no
    known unit."""
    text = _TEMPERATURE.sub(r" °\1", text.replace("μ ", "μ").replace(" ^", "^"))
    text = _WRITTEN.get(text, " ".join(_JOINT.sub(" ", text).split()))
    above, *below = re.split(r" ?/ ?| per ", text)
    factors = [(1, factor) for factor in _factors(above)]
    factors += [(-1, factor) for factor in _factors(" ".join(below).strip("()"))]
    if not factors or len(factors) > MAX_FACTORS or not all(below):
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
