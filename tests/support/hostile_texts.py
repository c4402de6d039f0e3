"""Texts that graders are given to stumble over: junk, nested brackets, Unicode, huge ones, and
pieces of what graders read. Always the same ones, and none of them is a right answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

_PIECES = (
    *("\\boxed{", "\\frac{", "\\text{", "{", "}", "(", ")", "[", "]", "$", "####", "\n", " "),
    *("\\sqrt", "^", "_", "\\pm", "\\cup", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\"),
    *("1", "9e99", ".", ",", "-", "1e-9", "x", "i", "e", "and", "or", "squared", "km", "°"),
    *("<think>", "</think>", "```", "```python\n", '{"score": 10}', '{"key": "', "null", "\0"),
    *("é", "𝔸", "\u202e", "\u200b", "٣", "½", "²", "∑", "🙂", "\ufeff", "the", "answer", "is"),
    *("=", "<", "!", "%", "\\infty", "\ud7ff", ":", "...", "**", "'", "\\phantom{", "\\ce{"),
    *("H_2O", "two", " hours ", "(A) ", "3:45", "May 4", "1s^2 ", "$5", "x=", "\\mid", "->"),
)  # fmt: skip
_OPENERS = ("{", "(", "[", "\\boxed{", "\\frac{", "\\text{", "\\left(", "\\sqrt{")


def hostile_texts(count: int) -> Iterator[str]:
    rng = random.Random(21)
    for number in range(count):
        kind = number % 5
        if kind == 0:
            yield "".join(rng.choices(_PIECES, k=rng.randrange(0, 40)))
        elif kind == 1:
            yield "\\boxed{" + "".join(rng.choices(_PIECES, k=rng.randrange(1, 25))) + "}"
        elif kind == 2:
            depth, opener = rng.randrange(1, 400), rng.choice(_OPENERS)
            closer = {"(": ")", "[": "]"}.get(opener[-1], "}")
            yield "#### " + opener * depth + rng.choice(_PIECES) + closer * rng.randrange(depth + 1)
        elif kind == 3:
            yield "".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randrange(1, 80)))
        else:
            yield rng.choice(_PIECES) * (rng.randrange(1, 3000) if number % 50 == 4 else 60)
