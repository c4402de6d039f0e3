"""OpenAI's templates: `{{ item.column }}` is the row's column, `{{ sample.output_text }}` the
completion. There are no other placeholders.

A text goes in unchanged, any other value as JSON. A placeholder in a value is not filled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from services.reward.grading.failures import wrong_row
from services.reward.grading.registry import no_column
from shared.errors import BadRequest
from shared.wire import ScoreItem

MAX_CHARS = 20_000
MAX_SLOTS = 32
"""Each placeholder may hold a whole completion."""

# It reads each character once, so that no run of "{{" or of blanks makes it slow.
_SLOT = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*+)\}\}", re.DOTALL)
UNCLOSED = "{{"
SLOT = "\0"
"""Stands in for a placeholder while the text outside of placeholders is searched."""

_PATH = re.compile(r"item(\.[\w-]+)+|sample\.output_text")


def check(template: str, columns: Sequence[str], label: str) -> None:
    """Raises BadRequest for a template that is too large, a placeholder that is not closed or has
    another name, or a column that the dataset lacks."""
    paths = _paths(template)
    if len(template) > MAX_CHARS or len(paths) > MAX_SLOTS:
        raise BadRequest(
            f"reward {label!r}: a template of {len(template)} characters with {len(paths)} slots; "
            f"at most {MAX_CHARS} and {MAX_SLOTS} are taken"
        )
    outside = _SLOT.sub(lambda slot: SLOT * len(slot[0]), template)
    if (at := outside.find(UNCLOSED)) >= 0:
        raise BadRequest(
            f"reward {label!r}: {template[at : at + 40]!r}, at character {at + 1} of a template, "
            "is not closed; expected {{ item.<column> }} or {{ sample.output_text }}"
        )
    for path in paths:
        if not _PATH.fullmatch(path):
            raise BadRequest(
                f"reward {label!r}: {{{{ {path} }}}} names nothing; expected item.<column> or "
                "sample.output_text"
            )
        if path.startswith("item.") and path.split(".")[1] not in columns:
            raise BadRequest(
                f"reward {label!r}: {{{{ {path} }}}}: {no_column(path.split('.')[1], columns)}"
            )


def columns(template: str) -> set[str]:
    """Returns the columns that a template names."""
    return {path.split(".")[1] for path in _paths(template) if path.startswith("item.")}


def is_output(template: str) -> bool:
    """Returns whether the template gives exactly the completion."""
    slot = _SLOT.fullmatch(template)
    return slot is not None and slot[1].strip() == "sample.output_text"


def _paths(template: str) -> list[str]:
    return [path.strip() for path in _SLOT.findall(template)]


def render(template: str, item: ScoreItem) -> str:
    """Returns the template with this item's values. Raises GradingFailed for a value that the row
    lacks."""
    return _SLOT.sub(lambda slot: _value(slot[1].strip(), item), template)


def _value(path: str, item: ScoreItem) -> str:
    if path == "sample.output_text":
        return item.completion
    value: Any = item.row
    for key in path.split(".")[1:]:
        if not isinstance(value, dict) or key not in value:
            raise wrong_row(f"{{{{ {path} }}}}: the row has no such value")
        value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
