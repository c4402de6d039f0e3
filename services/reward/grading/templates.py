"""OpenAI's templates: `{{ item.column }}` is the row's column, `{{ sample.output_text }}` the
completion. Nothing else is in them.

A value goes in as it is, text that is no text as JSON; what it contains is not read as a template
again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from services.reward.grading.registry import GradingFailed, no_column
from shared.errors import BadRequest
from shared.wire import ScoreItem

_SLOT = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_PATH = re.compile(r"item(\.[\w-]+)+|sample\.output_text")


def check(template: str, columns: Sequence[str], label: str) -> None:
    """Raises BadRequest for a slot that names nothing, or a column that the dataset lacks."""
    for path in _SLOT.findall(template):
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
    return {path.split(".")[1] for path in _SLOT.findall(template) if path.startswith("item.")}


def render(template: str, item: ScoreItem) -> str:
    """Returns the template with this item's values. Raises GradingFailed for a value that is not
    there."""
    return _SLOT.sub(lambda slot: _value(slot[1], item), template)


def _value(path: str, item: ScoreItem) -> str:
    if path == "sample.output_text":
        return item.completion
    value: Any = item.row
    for key in path.split(".")[1:]:
        if not isinstance(value, dict) or key not in value:
            raise GradingFailed(
                f"{{{{ {path} }}}}: the row has no such value", "invalid_variable_error"
            )
        value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
