"""Texts that are no answer, of the kinds that break readers: junk, nested braces, unicode, fences in
any order, programs with a few characters changed, and huge ones."""

# ruff: noqa: E501
from __future__ import annotations

import random
from collections.abc import Callable, Iterator

HUGE_CHARS = 260_000
_FENCES = (
    "```",
    "````",
    "~~~",
    "```python",
    "```py",
    "~~~python3",
    "   ```",
    "\u00a0```",
    "```json",
)
_CODE = (
    *("def f(x):", "    return x - 1", "class Solution:", "print(0)", "exit()", "import os", ""),
    *("f = lambda *a: None", '"""', "'", "\\", "x = [" * 9, "\tif x:", "raise SystemExit", "#"),
)
_WRONG = (
    "def f(x):\n    values = [x, x * 2, str(x), {x: x}]\n    return values[x % 4]\n\nprint(f(1))\n"
)
_ODD = (
    "\0\x01\x1b\r\u00a0\u0085\u2028\u200b\ufeff\u202e\u0301\ud7ff\ue000\ufffd\U0001f600\U0010ffff"
)


def _junk(draw: random.Random) -> str:
    return "".join(chr(draw.randrange(32, 127)) for _ in range(draw.randrange(400)))


def _braces(draw: random.Random) -> str:
    size = draw.choice((3, 50, 300, 5000))
    opening = "".join(draw.choice("([{") for _ in range(size))
    return draw.choice(("", "f = ", "return ")) + opening + draw.choice(("", "1", ")" * size))


def _unicode(draw: random.Random) -> str:
    return "".join(
        draw.choice(_ODD) if draw.random() < 0.3 else chr(draw.randrange(0xD7FF))
        for _ in range(draw.randrange(300))
    )


def _fences(draw: random.Random) -> str:
    lines = [draw.choice(draw.choice((_FENCES, _CODE))) for _ in range(draw.randrange(60))]
    return draw.choice(("\n", "\r\n", "\n> ", "\n    ")).join(lines)


def _changed(draw: random.Random) -> str:
    text = list(_WRONG)
    for _ in range(draw.randrange(1, 12)):
        at = draw.randrange(len(text))
        text[at : at + draw.randrange(3)] = draw.choice(
            ("", " ", "(", ":", "\n", "0", draw.choice(_ODD))
        )
    return draw.choice(("{}", "```python\n{}\n```", "```\n{}")).replace("{}", "".join(text))


def _huge(draw: random.Random) -> str:
    unit = draw.choice(
        (*_FENCES, *_CODE, *_ODD, "x = 1", "[", "{", "(", "9", " ", "\n", "a\n", "`", "`` ")
    )
    unit += draw.choice(("", "\n", " ", "\r\n"))
    return (unit or "x") * (HUGE_CHARS // max(len(unit), 1))


KINDS: dict[str, Callable[[random.Random], str]] = {
    "junk": _junk,
    "braces": _braces,
    "unicode": _unicode,
    "fences": _fences,
    "changed": _changed,
}


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Yields so many texts, a hundredth of them huge; the same for the same seed."""
    draw = random.Random(seed)
    for number in range(count):
        kind = _huge if number % 100 == 99 else draw.choice([*KINDS.values()])
        yield kind(draw)
