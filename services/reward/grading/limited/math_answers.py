"""Compares mathematical answers that are more than plain numbers and texts."""

from __future__ import annotations

import logging
import re

from services.reward.grading.answers.comparing import same
from services.reward.grading.answers.forms import read
from services.reward.grading.answers.formulas import SympyFormulas, Unreadable
from services.reward.grading.answers.kinds import (
    Text,
)
from services.reward.grading.answers.latex import clean
from services.reward.grading.answers.numbers import number

_SAID = re.compile(r"\banswer(?: is|:| ?=)+:? *([^\n]{1,200})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?:\s|\*|$)")
_FOLLOWS = re.compile(
    r"[eE][-+]?\d{1,3}\b"
    r"|\$? (?:squared|cubed|factorial|percent|hundred|thousand|million|billion|trillion|dozen)\b"
)
"""What changes the number that it stands behind."""


def prepare() -> None:
    import math_verify  # noqa: F401

    logging.disable()


def compared(given: str, wanted: str) -> tuple[bool, str]:
    """Returns whether two answers say the same, and why they cannot be compared, if so."""
    try:
        return same(read(given), read(wanted), SympyFormulas()), ""
    except Unreadable as error:
        return False, str(error)


def found_in(text: str, wanted: str) -> tuple[bool, str]:
    """Returns what `compared` does of the answer that `text` ends with."""
    answer = _said(text, wanted) or _found(text)
    return compared(answer, wanted) if answer else (False, "there is no answer in it")


def _said(text: str, wanted: str) -> str | None:
    """Returns what stands behind the last "the answer is", if it is a number, or the row's answer
    a text."""
    for said in reversed(_SAID.findall(text)):
        answer = clean(_SENTENCE_END.split(said, maxsplit=1)[0])
        if number(answer) or isinstance(read(wanted), Text):
            return answer
        return None
    return None


def _found(text: str) -> str | None:
    """Returns the answer that math-verify finds; what it reads in part is none."""
    from math_verify import parse

    found = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    answer = next((one for one in reversed(found) if isinstance(one, str)), "")
    end = text.rfind(answer) + len(answer)
    follows = _FOLLOWS.match(text, end) if answer else None
    if follows is None or not number(answer):
        return answer
    return f"{answer}{follows[0]}"
