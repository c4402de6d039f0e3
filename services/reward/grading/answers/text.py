r"""The text of an answer: the many ways to write one thing in LaTeX become one. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

_ALIASES = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ",
    "±": r"\pm ", "√": r"\sqrt", "∛": r"\sqrt[3]", "µ": "μ", "\u00a0": " ",
    "≈": r"\approx ", "\u2009": " ", "\u202f": " ",
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac",
    r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\leq": r"\le", r"\geq": r"\ge",
    r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\neq": r"\ne", r"\lt": "<", r"\gt": ">",
    r"\colon": ":", r"\textbf": r"\text", r"\textit": r"\text", r"\textrm": r"\text",
    r"\mathrm": r"\text", r"\mathbf": r"\text", r"\mathit": r"\text", r"\mbox": r"\text",
    r"\operatorname": r"\text", r"\textnormal": r"\text", r"\Omega": "Ω", r"\mu": "μ",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\left": "", r"\right": "", r"\displaystyle": "",
    r"\underline": r"\text", r"\large": "", r"\Large": "", r"\huge": "", r"\pounds": "£",
    r"\big": "", r"\Big": "", r"\bigl": "", r"\bigr": "", 
    r"\degree": "°", r"\%": "%", r"\ ": " ", r"\,": " ", r"\;": " ", r"\:": " ",
    r"\!": "", r"\(": "", r"\)": "", r"\[": "", r"\]": "", "~": " ",
    r"\varnothing": r"\emptyset", "∅": r"\emptyset", r"\ce": r"\text", "ℝ": r"\mathbb{R}",
    "⟨": r"\langle ", "⟩": r"\rangle ", r"\lor": " or ", r"\vee": " or ",
    r"\land": " and ", r"\wedge": " and ", r"\rightarrow": "→", r"\longrightarrow": "→",
    r"\Bigl": "", r"\Bigr": "", r"\middle": "", r"\implies": "→", r"\Rightarrow": "→",
}  # fmt: skip
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z])|[−–×·⋅÷π∞≤≥≠∪∈±√∛≈µ∅ℝ⟨⟩\u00a0\u2009\u202f~]")
_PLAIN = re.compile(r"[\w .,;:=+/()%!\n-]*", re.ASCII)
_DEGREES = re.compile(r"\^ ?(?:\{ ?(?:\\circ|°) ?\}|\\circ|°)")
_BOLD = re.compile(r"(?<![\w)}\]])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w({\[])")
_UNSEEN = re.compile("[\u200b-\u200f\u2060\ufeff]")
_SIGNS = {
    "<=": "\\le ", ">=": "\\ge ", "!=": "\\ne ",
    "{:}": ":", "{}": "",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_CLOSER = re.compile(r" ?\{ ?, ?\} ?|(?<=,)\\ (?=\\!)| ?\\! *")
"""A comma without the blank behind it, as in 70{,}000, and negative blanks."""

_COLOR = re.compile(r"\\(?:color|textcolor) ?\{[^{}]{1,30}\}")
_TWICE = re.compile(r"\\\\(?=[a-zA-Z]{2})")
"""A command that was escaped twice."""
_SO_ON = re.compile(r"(?<=\d) ?(?:\.{3}|\\l?dots\b|…)")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(
    r"(√|∛|\\sqrt ?(?=\())\s*(?:\(((?:[^()]|\([^()]*\))*)\)|(\d+(?:\.\d+)?|[A-Za-zπ](?![A-Za-z])))"
)
"""A root without braces: √(x), √12, \\sqrt(x)."""

_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_LOWERED = re.compile("[₀-₉]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
_DOLLAR = re.compile(r"(?<!\\)\$")
_NOISE = re.compile(r"(?<![\d.])\d+\.\d{9,17}(?![\d…])")
"""A decimal with as many digits as a float has, such as 0.30000000000000004."""

_OVER = re.compile(r"\{?(?<!\w)(\w++) ?\\over(?![a-z]) ?(\w+)\}?")
"""It begins where a word does: else a run of letters is tried from each of them."""

TEXT = re.compile(r"\\text ?\{((?:[^{}]|\{[^{}]*\})*)\}")


def clean(text: str) -> str:
    """Returns an answer's text without what only says how it looks: `$`, `\\left`, `\\dfrac`, thin
    blanks, a full stop. A dollar sign that means money stays."""
    if "\\\\" in text and not re.search(r"(?<!\\)\\begin", text):
        text = _TWICE.sub(r"\\", text)
    text = _CLOSER.sub(lambda found: "," * ("," in found[0]), _UNSEEN.sub("", text))
    text = _SIGN.sub(lambda found: _SIGNS[found[0]], _COLOR.sub("", text))
    text = _NOISE.sub(_without_noise, text)
    text = _BOLD.sub(r"\1", text).replace("**", "^")
    text = _ROOT.sub(_braced, text)
    text = _SO_ON.sub("…", _PI.sub(r"\\pi ", text))
    if _PLAIN.fullmatch(text):
        return " ".join(text.split()).rstrip(".,;").strip()
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text)
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\q?quad", " ", text)
    text = _COMMAND.sub(lambda found: _ALIASES.get(found[0], found[0]), text.replace(r"\$", "$"))
    text = _VULGAR.sub(_fraction, text)
    text = _RAISED.sub(_with("^"), _LOWERED.sub(_with("_"), text))
    text = _DEGREES.sub("°", text)
    return " ".join(text.split()).rstrip(".,;").strip()


def _with(mark: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{mark}{{{found[0].translate(_DIGITS)}}}"


def _braced(found: re.Match[str]) -> str:
    return rf"\sqrt{'[3]' * (found[1] == '∛')}{{{found[2] or found[3]}}}"


def _without_noise(found: re.Match[str]) -> str:
    """Returns 0.30000000000000004 as 0.3: 15 digits of a float are right, and where the last of
    these are zeros the decimal that it was made of is shorter."""
    rounded = f"{Decimal(found[0]):.15g}"
    is_short = len(rounded.rstrip("0")) <= 13 and 16 <= len(found[0].lstrip("0.")) <= 18
    return f"{Decimal(rounded).normalize():f}" if is_short else found[0]


def _fraction(found: re.Match[str]) -> str:
    value = Fraction(unicodedata.numeric(found[0])).limit_denominator(10)
    return f" {value.numerator}/{value.denominator}"


def without_marks(text: str) -> str:
    """Returns `text` with what is in `\\text{}` as words of their own."""
    return " ".join(TEXT.sub(r" \1", text).split()) if "\\" in text else text


_KEYED = [
    (TEXT, r"\1"),
    (re.compile(r"([_^]) ?\{ ?(\w+|\d?[+-]|[+-]?\d+) ?\}(?! ?\d)"), r"\1\2"),
    (re.compile(r"(?<=[A-Za-z)\]])_ ?(?=\d)"), ""),
    (re.compile(r"(?<!\d) +| +(?!\d)"), ""),
]
"""What makes no other text of an answer: braces, blanks, `\\text`, a digit that is lowered."""


def key(text: str) -> str:
    """Returns the text by which cleaned answers are equal as text."""
    for pattern, replacement in _KEYED:
        text = pattern.sub(replacement, text)
    if "→" in text or "->" in text or "\\to" in text:  # a reaction, whose sides have no order
        sides = re.split(r"→|-+>|\\to(?![a-z])", text)
        species = [sorted(re.split(r"(?<=[\w)])\+(?=[\dA-Z])", side)) for side in sides]
        return "→".join("+".join(side) for side in species)
    return text


def split(text: str, separator: str) -> list[str]:
    """Returns the parts of `text` between the separators that are outside of all brackets."""
    parts, depth, start, position = [], 0, 0, 0
    pattern = re.compile(separator)
    while position < len(text):
        found = pattern.match(text, position) if depth <= 0 else None
        if found and found.end() > position:
            parts.append(text[start:position].strip())
            start = position = found.end()
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    return [*parts, text[start:].strip()]
