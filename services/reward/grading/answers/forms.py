"""Reads an answer: text -> one of the kinds in `answers/__init__.py`. Pure."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TypeGuard

from services.reward.grading.answers import (
    Amount,
    Choice,
    Form,
    Literal,
    Named,
    Ordered,
    Relation,
    Several,
    Text,
    variables,
)
from services.reward.grading.answers.latex import (
    clean,
    depth,
    is_one_bracket,
    literal,
    split,
    without_marks,
)
from services.reward.grading.answers.numbers import number
from services.reward.grading.answers.units import NOTHING, after_number

MAX_PARTS = 64
MAX_DEPTH = 24
"""Most nested brackets: an answer with more is not read."""

_INTERVAL = re.compile(r"([\[\]])([^\[\],;]+[,;][^\[\],;]+)([\[\]])")
_TURNED = re.compile(
    rf"(?:[A-Za-z] ?(?:=|\\in) ?)?{_INTERVAL.pattern}(?: ?\\cup ?{_INTERVAL.pattern})*"
)
_SEPARATOR = re.compile(r",|;|\\text ?\{ ?(?:and|or) ?\}|\\(?:lor|vee|land)\b|(?<= )(?:and|or) ")
_BOTH = re.compile(r"\\text ?\{ ?and ?\}|\\(?:wedge|land)\b|(?<= )and ")
_UNION = re.compile(r"\\cup\b")
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in|approx|sim|equiv)(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?)matrix\}(.*)\\end\{\1matrix\}")
_ARRAY = re.compile(r"([\[(|]) ?\\begin\{array\} ?\{[^{}]*\}(.*)\\end\{array\} ?[\])|]")
_BUILDER = re.compile(
    r"[A-Za-z](?: ?\\in ?\\mathbb ?\{? ?R ?\}?)? ?(?:\\mid\b|\\vert\b|:|\|) ?(?P<rest>.*)"
)
_ROW, _CELL = re.compile(r"\\\\"), re.compile("&")
_LETTERS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ '’.!?-])*")
_APPLIED = re.compile(r"(?:sin|cos|tan|cot|sec|csc|ln|log|exp) [a-z]")
_SAYS = r"(?:(?:[Tt]he )?(?:correct )?(?:[Aa]nswer|[Oo]ption|[Cc]hoice)(?: is)?:? )"
_LABEL = re.compile(
    rf"{_SAYS}?(?:\((?P<round>[A-Za-z])\)|(?P<dotted>[A-Za-z])[.)])|{_SAYS}(?P<bare>[A-J])"
)
_CHOICE = re.compile(
    rf"{_SAYS}?(?:\((?P<round>[A-J])\)|(?P<bare>[A-J])(?P<mark>[.):])) (?P<text>(?!and|or|not)\S.*)"
)
_OTHER_CHOICE = re.compile(r"\([A-J]\)|(?<![A-Za-z])(?:[B-J](?![A-Za-z])|A(?! [a-z]|[A-Za-z]))")
_OPERATOR = re.compile(r"[+*/^=<>|]|-\D|\\(?:c[au]p|times|cdot|in|to|subset)\b")
_ALIASES = {
    "all real numbers": "(-\\infty,\\infty)",
    "all reals": "(-\\infty,\\infty)",
    "\\mathbb{r}": "(-\\infty,\\infty)",
    "empty set": "\\emptyset",
    "the empty set": "\\emptyset",
    "does not exist": "DNE",
    "no solutions": "no solution",
    "infinity": "\\infty",
    "positive infinity": "\\infty",
    "negative infinity": "-\\infty",
}
"""Whole answers in other words."""

_NAME = re.compile(
    r"m?(?:\\(?:angle|triangle|overline|vec|hat|bar|mathbb|mathcal) ?)?"
    r"(?:\{?[A-Za-z][A-Za-z ]{0,30}\}?|\\(?!frac|sqrt|sin|cos|tan|log|ln|text)[A-Za-z]+)"
    r" ?(?:_ ?(?:\{[^{}]{1,20}\}|\w))?'{0,2}(?:\^ ?\{-1\})?"
    r" ?(?:\([^()=]{1,40}\))?"
)
_NAMES = re.compile(r"\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\)")
_COMMA = re.compile(",|;")
_TAIL = re.compile(r"(?P<formula>.*[\d)}!°A-Za-z]) ?\\text ?\{(?P<words>[^{}]*)\}(?P<power>\^\S+)?")
_BARE_TAIL = re.compile(r"(?P<formula>.*[)}]) (?P<words>[A-Za-z°][A-Za-z°/^{}\d ]*)")


def read(text: str) -> Form:
    """Returns what the answer `text` is."""
    text = _in_round_brackets(clean(text))
    return Literal(text) if depth(text) > MAX_DEPTH else _read(_unwrapped(text))


def _in_round_brackets(text: str) -> str:
    """Returns `[2, 5[` as `[2, 5)`, and `]2, 5]` as `(2, 5]`: what is open has a bracket that is
    turned away."""
    if not _TURNED.fullmatch(text):
        return text
    return _INTERVAL.sub(
        lambda found: (
            ("(" if found[1] == "]" else "[") + found[2] + (")" if found[3] == "[" else "]")
        ),
        text,
    )


def _read(text: str) -> Form:
    if (written := literal(text)) is not None:
        return Literal(written)
    if plain := number(text):
        return Amount(text, plain.counted, plain)
    words = without_marks(text).strip()
    if (label := _LABEL.fullmatch(words.strip("{} "))) is not None:
        return Text(label["round"] or label["dotted"] or label["bare"])
    if (alias := _ALIASES.get(words.lower())) is not None:
        return _read(alias)
    if (choice := _CHOICE.fullmatch(words)) is not None and _is_choice(choice["text"]):
        letter, mark = choice["round"] or choice["bare"], choice["mark"] or ")"
        return Choice(letter, _read(choice["text"]), mark != ".")
    items = split(text, _SEPARATOR)
    if _LETTERS.fullmatch(words) and len(items) == 1 and not _APPLIED.fullmatch(words):
        return Text("".join(words.split()))
    if (both := _both(text)) is not None:
        return both
    if 1 < len(items) <= MAX_PARTS:
        said = [item for item in items if item]
        return _several(said) if said else Literal(text)
    if len(unions := split(text, _UNION)) > 1:
        return Several(tuple(_read(_unwrapped(part)) for part in unions[:MAX_PARTS]))
    if (rows := _matrix(text) or _nested(text)) is not None:
        return rows
    return _bracketed(text) or _related(text) or _signed(text) or _amount(text)


def _is_choice(text: str) -> bool:
    """Returns whether `text` after a letter says what that stands for, and no other letter."""
    return not _OTHER_CHOICE.search(text) and not _OPERATOR.match(text)


def _unwrapped(text: str) -> str:
    """Returns `text` without braces or `\\text{}` around all of it, and without a leading `=`."""
    text = text.removeprefix("=").strip()
    inner = re.fullmatch(r"\\text ?(\{.*\})|(\{.*\})", text)
    whole = (inner[1] or inner[2]) if inner else ""
    if whole and is_one_bracket(whole):
        return _unwrapped(whole[1:-1].strip())
    return text


def _several(items: list[str]) -> Form:
    subjects = [_subject(item) for item in items]
    if len({*subjects} - {None}) > 1:
        return Several(tuple(_of_subject(item) for item in items))
    forms = _parts(items)
    names = {form.name if isinstance(form, Named) else None for form in forms}
    first = forms[0]
    if isinstance(first, Named) and len(names) == 1:
        return Named(first.name, (Several(tuple(_value(form) for form in forms)),), first.relation)
    others_have_none = not any(isinstance(form, Named | Relation) for form in forms[1:])
    if isinstance(first, Named) and others_have_none:
        parts = (first.values[-1], *forms[1:])
        return Named(first.name, (Several(parts),), first.relation)
    return Several(tuple(forms)) if len(forms) > 1 else forms[0]


def _subject(text: str) -> str | None:
    """Returns the name that an inequality is about; None for what is none."""
    sides = split(text, _RELATION)
    if not isinstance(_related(text), Ordered):
        return None
    return "".join(sides[1 if len(sides) == 3 or _is_name(sides[1]) else 0].split())


def _of_subject(text: str) -> Form:
    """Returns an inequality with its name, which counts beside one of another name."""
    name, sides = _subject(text), split(text, _RELATION)
    form = _read(_unwrapped(text))
    relation = Relation(tuple(_signs(text, sides)), tuple(sides))
    return Named(name, (form,), relation) if name else form


def _both(text: str) -> Form | None:
    """Returns the interval that `x > 1 and x < 3` is; None for what is no two inequalities."""
    sides = split(text, _BOTH)
    if len(sides) != 2 or not all(_RELATION.search(side) for side in sides):
        return None
    if len({_subject(side) for side in sides}) > 1:
        return None
    bounds = [_related(side) for side in sides]
    above = next((one for one in bounds if _is_open_to(one, 1, "\\infty")), None)
    below = next((one for one in bounds if _is_open_to(one, 0, "-\\infty")), None)
    if above and below:
        return Ordered(above.opening, below.closing, (above.parts[0], below.parts[1]))
    return Literal(text) if all(isinstance(one, Ordered) for one in bounds) else None


def _is_open_to(form: Form | None, side: int, infinity: str) -> TypeGuard[Ordered]:
    return isinstance(form, Ordered) and form.parts[side] == Amount(infinity)


def _parts(texts: list[str]) -> list[Form]:
    """Returns what each text is; one with a plus-minus sign is two."""
    found: list[Form] = []
    for text in texts:
        form = _read(_unwrapped(text))
        found += form.parts if isinstance(form, Several) and "\\pm" in text else (form,)
    return found


def _value(form: Form) -> Form:
    return form.values[-1] if isinstance(form, Named) else form


def _matrix(text: str) -> Form | None:
    found = _MATRIX.fullmatch(text) or _ARRAY.fullmatch(text)
    if found is None:
        return None
    rows = [split(row, _CELL) for row in split(found[2].strip(), _ROW) if row]
    return _of_rows(rows, "|" if found[1] in ("v", "V", "|") else "[")


def _nested(text: str) -> Form | None:
    """Returns the matrix that `[[1, 2], [3, 4]]` is."""
    if not (text.startswith("[") and is_one_bracket(text)):
        return None
    rows = split(text[1:-1], _COMMA)
    if not all(row.startswith("[") and is_one_bracket(row) and row[-1] == "]" for row in rows):
        return None
    cells = [split(row[1:-1], _COMMA) for row in rows]
    return _of_rows(cells, "[") if len({len(row) for row in cells}) == 1 else None


def _of_rows(rows: list[list[str]], kind: str) -> Form:
    if kind == "[" and 1 < len(rows) <= MAX_PARTS and all(len(row) == 1 for row in rows):
        return Ordered("(", ")", tuple(_read(row[0]) for row in rows))
    return Ordered(
        f"{kind}matrix",
        "",
        tuple(Ordered("row", "", tuple(_read(cell) for cell in row)) for row in rows[:MAX_PARTS]),
    )


def _bracketed(text: str) -> Form | None:
    if text.startswith("\\{") and text.endswith("\\}"):
        builder = _BUILDER.fullmatch(text[2:-2].strip())
        if builder and isinstance(built := _read(builder["rest"]), Ordered):
            return built
        parts = [part for part in split(text[2:-2], _SEPARATOR) if part]
        forms = _parts(parts[:MAX_PARTS])
        is_value = len(forms) == 1 and not isinstance(forms[0], Literal)
        return forms[0] if is_value else Several(tuple(forms))
    if not (text[:1] in ("(", "[") and text[-1:] in (")", "]")):
        return None
    if not is_one_bracket(text):
        return None
    parts = split(text[1:-1], _COMMA)
    if len(parts) == 1:
        return _read(parts[0]) if text[0] == "(" and text[-1] == ")" else None
    return Ordered(text[0], text[-1], tuple(_read(_unwrapped(p)) for p in parts[:MAX_PARTS]))


def _related(text: str) -> Form | None:
    sides = split(text, _RELATION)
    if not 1 < len(sides) <= MAX_PARTS:
        return None
    signs = _signs(text, sides)
    if "" in sides:
        return Literal(text)
    relation = Relation(tuple(signs), tuple(sides))
    if signs == ["="] and _NAMES.fullmatch(sides[0]):
        point = _read(sides[1])
        if isinstance(point, Ordered) and len(point.parts) == len(sides[0].split(",")):
            return _point("".join(sides[0].split()), point, relation)
        return relation
    if set(signs) == {"="} or signs == ["\\in"]:
        if len(sides) == 2 and _is_name(sides[1]) and not _is_name(sides[0]):
            sides = sides[::-1]
        is_own = _head(sides[0]) & variables(" ".join(sides[1:]))
        if _is_name(sides[0]) and not is_own:
            name = "".join(without_marks(sides[0]).split())
            own = variables(sides[-1])
            values = [one for one in sides[1:-1] if not _is_name(one) or _head(one) & own]
            read = (_read(_unwrapped(side)) for side in (*values, sides[-1]))
            return Named(name, tuple(read), relation)
        return relation
    return _but_one(signs, sides) or _interval(signs, sides) or relation


def _point(name: str, point: Ordered, relation: Relation) -> Named:
    """Returns `(x, y) = (1, 2)`, and `(y, x) = (2, 1)` as the same."""
    names, parts = name.strip("()").split(","), point.parts
    if {*names} <= {*"xyz"}:
        order = sorted(range(len(names)), key=names.__getitem__)
        names, parts = [names[at] for at in order], tuple(parts[at] for at in order)
    named = Ordered(point.opening, point.closing, parts)
    return Named(f"({','.join(names)})", (named,), relation)


def _signs(text: str, sides: list[str]) -> list[str]:
    """Returns the signs between the `sides`."""
    signs: list[str] = []
    position = 0
    for left, right in pairwise(sides):
        position = text.index(left, position) + len(left)
        end = text.index(right, position)
        signs.append(text[position:end].strip())
        position = end
    return signs


def _but_one(signs: list[str], sides: list[str]) -> Form | None:
    """Returns the two intervals that `x \\ne 2` is."""
    if signs != ["\\ne"] or not _is_name(sides[0]) or variables(sides[1]):
        return None
    value = _read(sides[1])
    before, after = (Amount("-\\infty"), value), (value, Amount("\\infty"))
    return Several((Ordered("(", ")", before), Ordered("(", ")", after)))


def _interval(signs: list[str], sides: list[str]) -> Form | None:
    """Returns the interval that `x > 3` or `1 <= x < 2` is; None if it is none."""
    flipped = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    if any(sign not in flipped for sign in signs):
        return None
    if len(sides) == 2 and _is_name(sides[1]):
        sides, signs = sides[::-1], [flipped[signs[0]]]
    if len(sides) == 2 and _is_name(sides[0]):
        bound, infinity = _read(sides[1]), Amount("\\infty")
        if signs[0] in ("<", "\\le"):
            return Ordered("(", ")" if signs[0] == "<" else "]", (Amount("-\\infty"), bound))
        return Ordered("(" if signs[0] == ">" else "[", ")", (bound, infinity))
    if len(sides) == 3 and _is_name(sides[1]):
        if signs[0] in (">", "\\ge"):
            sides, signs = sides[::-1], [flipped[sign] for sign in reversed(signs)]
        if all(sign in ("<", "\\le") for sign in signs):
            opening, closing = ("(" if signs[0] == "<" else "["), (")" if signs[1] == "<" else "]")
            return Ordered(opening, closing, (_read(sides[0]), _read(sides[2])))
    return None


def _head(side: str) -> set[str]:
    """Returns the letter of a name: f of f(x)."""
    return variables(re.sub(r"[_(].*", "", side))


def _is_name(side: str) -> bool:
    side = without_marks(side)
    return _NAME.fullmatch(side) is not None


def _signed(text: str) -> Form | None:
    """Returns both values of what has a plus-minus sign."""
    if "\\pm" not in text or text.count("\\pm") > 1:
        return None
    plus, minus = text.replace("\\pm", "+").removeprefix("+"), text.replace("\\pm", "-")
    return Several((_read(plus.strip()), _read(minus)))


def _amount(text: str) -> Form:
    for tail in (_TAIL, _BARE_TAIL):
        found = tail.fullmatch(text)
        words = f"{found['words']}{found.groupdict().get('power') or ''}" if found else ""
        counted = after_number(words.strip()) if found else None
        if found and counted and counted.scale == 1:
            return Amount(found["formula"], counted)
    money = text[:1] == "$"
    return Amount(text[1:].strip(), after_number("dollars") or NOTHING) if money else Amount(text)
