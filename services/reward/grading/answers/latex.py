r"""The text of an answer: the many ways to write one thing in LaTeX become one, and text inside of
brackets stays together. Times, dates and chemistry are compared as such a text: "3:45 p.m." is
"15:45", "July 4th, 1776" is "1776-07-04", `\text{H}_2\text{O}` is "H2O". Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

_ALIASES = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ",
    "±": r"\pm ", "√": r"\sqrt", "µ": "μ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac",
    r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\leq": r"\le", r"\geq": r"\ge",
    r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\neq": r"\ne", r"\lt": "<", r"\gt": ">",
    r"\colon": ":", r"\textbf": r"\text", r"\textit": r"\text", r"\textrm": r"\text",
    r"\mathrm": r"\text", r"\mathbf": r"\text", r"\mathit": r"\text", r"\mbox": r"\text",
    r"\operatorname": r"\text", r"\textnormal": r"\text", r"\Omega": "Ω", r"\mu": "μ",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\left": "", r"\right": "", r"\displaystyle": "",
    r"\big": "", r"\Big": "", r"\bigl": "", r"\bigr": "", r"\quad": " ", r"\qquad": " ",
    r"\degree": "°", r"\%": "%", r"\ ": " ", r"\,": " ", r"\;": " ", r"\:": " ",
    r"\!": "", r"\(": "", r"\)": "", r"\[": "", r"\]": "", "~": " ",
    r"\varnothing": r"\emptyset", "∅": r"\emptyset", r"\ce": r"\text", "ℝ": r"\mathbb{R}",
    r"\langle": "(", r"\rangle": ")", "⟨": "(", "⟩": ")",
}  # fmt: skip
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z])|[−–×·⋅÷π∞≤≥≠∪∈±√µ∅ℝ⟨⟩\u00a0\u2009\u202f~]")
_PLAIN = re.compile(r"[\w .,;:=+/()%!\n-]*", re.ASCII)
_DEGREES = re.compile(r"\^ ?(?:\{ ?(?:\\circ|°) ?\}|\\circ|°)")
_BOLD = re.compile(r"(?<![\w)}\]])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w({\[])")
_UNSEEN = re.compile("[\u200b-\u200f\u2060\ufeff]")
_SIGNS = {
    "<=": "\\le ", ">=": "\\ge ", "!=": "\\ne ",
    "{,}": ",", " {, }": ",", "{, }": ",", ",\\! ": ",", ",\\ \\! ": ",", "{:}": ":", "{}": "",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_SO_ON = re.compile(r"(?<=\d) ?(?:\.{3}|\\l?dots\b|…)")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_LOWERED = re.compile("[₀-₉]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
_DOLLAR = re.compile(r"(?<!\\)\$")
TEXT = re.compile(r"\\text ?\{((?:[^{}]|\{[^{}]*\})*)\}")
_OPEN, _CLOSE = "([{", ")]}"


def clean(text: str) -> str:
    """Returns an answer's text without what only says how it looks: `$`, `\\left`, `\\dfrac`, thin
    blanks, a full stop. A dollar sign that means money stays."""
    text = _SIGN.sub(lambda found: _SIGNS[found[0]], _UNSEEN.sub("", text))
    text = _BOLD.sub(r"\1", text).replace("**", "^")
    text = _SO_ON.sub("…", _PI.sub(r"\\pi ", text))
    if _PLAIN.fullmatch(text):
        return " ".join(text.split()).rstrip(".,;").strip()
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text)
    text = _COMMAND.sub(lambda found: _ALIASES.get(found[0], found[0]), text.replace(r"\$", "$"))
    text = _VULGAR.sub(_fraction, text)
    text = _RAISED.sub(_with("^"), _LOWERED.sub(_with("_"), text))
    text = _DEGREES.sub("°", text)
    return " ".join(text.split()).rstrip(".,;").strip()


def _with(mark: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{mark}{{{found[0].translate(_DIGITS)}}}"


def _fraction(found: re.Match[str]) -> str:
    value = Fraction(unicodedata.numeric(found[0])).limit_denominator(10)
    return f" {value.numerator}/{value.denominator}"


def without_marks(text: str) -> str:
    """Returns `text` with what is in `\\text{}` as words of their own."""
    return " ".join(TEXT.sub(r" \1", text).split()) if "\\" in text else text


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Returns the parts of `text` between the separators that are outside of all brackets."""
    parts: list[str] = []
    depth, start = 0, 0
    position = 0
    while position < len(text):
        found = separator.match(text, position) if depth <= 0 else None
        if found and found.end() > position:
            parts.append(text[start:position].strip())
            start = position = found.end()
            continue
        if text[position] == "\\":
            command = _COMMAND.match(text, position)
            end = command.end() if command else position + 1
            depth += {r"\{": 1, r"\}": -1}.get(text[position:end], 0)
            position = end
            continue
        depth += (text[position] in _OPEN) - (text[position] in _CLOSE)
        position += 1
    return [*parts, text[start:].strip()]


def depth(text: str) -> int:
    """Returns how many brackets are in each other at most."""
    now = most = 0
    for character in text:
        now += (character in _OPEN) - (character in _CLOSE)
        most = max(most, now)
    return most


def is_one_bracket(text: str) -> bool:
    """Returns whether the bracket that begins `text` is closed by its end, and not before."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth <= 0:
            return depth == 0 and position == len(text) - 1
    return False


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
