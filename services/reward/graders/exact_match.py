"""Rewards a completion that is the expected text."""

from __future__ import annotations

from collections.abc import Sequence

from services.reward.registry import Column, Params, grader
from shared.errors import BadRequest
from shared.wire import Part, ScoreItem


class ExactMatchParams(Params):
    """`column` holds the expected text (or whole number). `strip` and `ignore_case` apply to both sides."""

    column: Column = "answer"
    strip: bool = True
    ignore_case: bool = False


@grader("exact_match")
def exact_match(items: Sequence[ScoreItem], params: ExactMatchParams) -> list[Part]:
    """1 for a completion equal to the row's `column`, else 0."""
    parts: list[Part] = []
    for position, item in enumerate(items):
        given, wanted = _normal(item.completion, params), _normal(_expected(item, params.column, position), params)
        parts.append(Part(value=float(given == wanted), detail="" if given == wanted else f"wanted {wanted!r:.80}"))
    return parts


def _expected(item: ScoreItem, column: str, position: int) -> str:
    value = item.row[column]
    if type(value) not in (str, int):
        raise BadRequest(f"column {column!r} of item {position} is {value!r:.80}; expected text or a whole number")
    return str(value)


def _normal(text: str, params: ExactMatchParams) -> str:
    text = text.strip() if params.strip else text
    return text.casefold() if params.ignore_case else text
