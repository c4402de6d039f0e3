"""What a completion gets that made its grader fail, where the grader could grade others of its row.

"Missing" is left out of a group's normalization, so a text that brings it about would escape a
negative advantage. It gets the least that the others got, and no more than 0 (by a negative weight
the most, and no less than 0): its advantage is never positive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from services.reward.grading.failures import ErrorName
from services.reward.grading.registry import Grader
from shared.host.logs import get_logger
from shared.wire import Part, ScoreItem

BY_TEXT: frozenset[ErrorName] = frozenset(
    (
        "formula_parse_error",
        "model_grader_parse_error",
        "model_grader_refusal_error",
        "python_grader_runtime_error",
        "unresponsive_reward_error",
    )
)
"""Errors that a completion's text can cause. It cannot cause that a judge is away or that the
sandbox fails."""


class Chosen:
    """Passes parts on, except failures that a text may have caused: these wait for the other
    parts."""

    def __init__(
        self, grader: Grader[Any], items: Sequence[ScoreItem], tell: Callable[[int, Part], None]
    ) -> None:
        self._grader = grader
        self._items = items
        self._tell = tell
        self._values: dict[int, float] = {}
        self._held: dict[int, Part] = {}

    def tell(self, position: int, part: Part) -> None:
        # How long a judge takes is no text's doing.
        by_text = BY_TEXT - {"unresponsive_reward_error"} if self._grader.asks_models else BY_TEXT
        if part.value is None and not by_text.isdisjoint(part.errors):
            self._held[position] = part
            return
        if part.value is not None:
            self._values[position] = part.value
        self._tell(position, part)

    def tell_held(self) -> None:
        """Tells the parts that waited, now that all others are there."""
        num = 0
        graded: dict[str, list[float]] = defaultdict(list)
        for position, value in (self._values if self._held else {}).items():
            graded[self._row(position)].append(value)
        for position, part in self._held.items():
            if others := graded.get(self._row(position)):
                is_penalty = self._grader.spec.weight < 0
                value = max(0.0, *others) if is_penalty else min(0.0, *others)
                why = f"it gets {value:g}: the grader fails on this text, not on others of its row"
                detail = f"{part.detail}; {why}"
                part = part.model_copy(
                    update={"value": value, "verdict": "wrong", "detail": detail[-1000:]}
                )
                num += 1
            self._tell(position, part)
        if num:
            get_logger().warning(
                "reward fails on some texts",
                reward=self._grader.spec.label,
                job=self._grader.tools.job_id,
                failed=num,
                graded=len(self._values),
                first=next(iter(self._held.values())).detail[:200],
            )

    def _row(self, position: int) -> str:
        """Returns what tells the item's row from others: rows that are compared with each other
        would take as many looks as a request has pairs of items."""
        item = self._items[position]
        return repr((item.prompt, item.row))
