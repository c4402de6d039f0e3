r"""Answers that are what is written, and are not computed with: times, dates, chemistry. Pure.

Each has a text by which it is compared: "3:45 p.m." is "15:45", "July 4th, 1776" is "1776-07-04",
`\text{H}_2\text{O}` is "H2O".
"""

from __future__ import annotations

import re

from services.reward.grading.answers.latex import TEXT, without_marks

_MONTHS: list[str] = re.split(
    " ",
    "January February March April May June July August September October November December",
)
_MONTH = "|".join(f"{name}|{name[:3]}" for name in _MONTHS)
_DATE = re.compile(
    rf"(?:(?P<month>{_MONTH})\.? (?P<day>\d\d?)|(?P<first>\d\d?)(?:st|nd|rd|th)? (?:of )?"
    rf"(?P<then>{_MONTH})\.?)(?:st|nd|rd|th)?(?:,? (?P<year>\d{{4}}))?"
)
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
_UNSURE = re.compile(r"\d\d?([-/.])\d\d?\1\d{4}")
"""A date whose month may be the first or the second number."""

_CLOCK = re.compile(r"(\d\d?)(?::(\d\d)(:\d\d)?)?(?: ?([ap])\.? ?m\.?)?", re.I)
_RATIO = re.compile(r"[\d ]+(?:(?::| to )[\d ]+)+")
_BASE = re.compile(r"-?[\dA-F.]+_ ?(?:\{ ?\d+ ?\}|\d+)", re.I)

_ELEMENTS = (
    "He Li Be Ne Na Mg Al Si Cl Ar Ca Sc Ti Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Zr Nb Mo "
    "Tc Ru Rh Pd Ag Cd In Sn Sb Te Xe Cs Ba La Ce Nd Hf Ta Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr "
    "Ra Th Pu H B C N O F P S K V Y I W U"
)
_INDEX = r"(?:_ ?(?:\{\d{1,3}\}|\d)|\d{1,3})"
_ATOM = rf"(?:(?:{'|'.join(_ELEMENTS.split())}|\)){_INDEX}?|\()"
_CHARGE = r"(?:\^ ?(?:\{\d?[+-]\}|[+-])|[+-](?!\S))"
_SPECIES = re.compile(rf"\d* ?{_ATOM}+{_CHARGE}?(?: ?\((?:s|l|g|aq)\))?")
_COUNTED = re.compile(rf"[A-Za-z)]{_INDEX}|{_CHARGE}")
_ARROW = re.compile(r" ?(?:\\(?:long)?rightarrow|\\to|→|-+>) ?")
_PLUS = re.compile(r" \+ |(?<=[\w})])\+(?=[\dA-Z])")
_SHELL = r"[1-7][spdf]\^?(?:\{\d\d?\}|\d\d?)"
_SHELLS = re.compile(rf"(?:\[[A-Z][a-z]\] ?)?{_SHELL}(?: ?{_SHELL})+")
_MARKS = re.compile(r"[ {}_]")


def literal(text: str) -> str | None:
    """Returns the text by which `text` is compared; None if it is no literal."""
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return "\\emptyset"
    together = TEXT.sub(r"\1", text).strip()
    text = without_marks(text).strip()
    if found := _date(text) or _time(text) or _chemistry(together):
        return found
    if _UNSURE.fullmatch(text) or _RATIO.fullmatch(text) or _BASE.fullmatch(text):
        return re.sub(r"[ {}]", "", text.replace(" to ", ":")).lower()
    return _MARKS.sub("", text).replace("^", "") if _SHELLS.fullmatch(text) else None


def _date(text: str) -> str | None:
    if iso := _ISO.fullmatch(text):
        return iso[0]
    found = _DATE.fullmatch(text)
    if found is None:
        return None
    name, day = found["month"] or found["then"], int(found["day"] or found["first"])
    month = next(number for number, one in enumerate(_MONTHS, 1) if one.startswith(name))
    return f"{found['year'] or ''}-{month:02}-{day:02}"


def _time(text: str) -> str | None:
    found = _CLOCK.fullmatch(text)
    if found is None or not (found[2] or found[4]):
        return None
    hour, half = int(found[1]), (found[4] or "").lower()
    if 1 <= hour <= 12 and half:
        hour, half = hour % 12 + 12 * (half == "p"), ""
    elif not found[2]:
        return None  # 154 pm is a length
    return f"{hour}:{found[2] or '00'}{found[3] or ''}{half}"


def _chemistry(text: str) -> str | None:
    """Returns a formula of chemistry, or a reaction, whose two sides have no order. Letters alone
    are none: NaCl is a text."""
    sides = _ARROW.split(text)
    species = [_PLUS.split(side) for side in sides]
    if not all(_SPECIES.fullmatch(one.strip()) for side in species for one in side):
        return None
    if len(sides) == 1 and (len(species[0]) > 1 or not _COUNTED.search(text)):
        return None
    written = [sorted(_MARKS.sub("", one) for one in side) for side in species]
    return "->".join(" + ".join(side) for side in written)
