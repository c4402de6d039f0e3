"""Data of any shape in a body: a dataset's row, a grader's params, a program's inputs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, JsonValue, TypeAdapter, ValidationInfo

BINARY = "binary"
"""Key of the validation context for a body in msgpack, which has more kinds of values than JSON."""

_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


def _as_in_json(value: Any, info: ValidationInfo) -> Any:
    if info.context and info.context.get(BINARY) and not _JSON.validator.isinstance_python(value):
        raise ValueError(
            "expected plain data: text, numbers, lists and tables whose keys are text, nested no "
            "deeper than JSON may be"
        )
    return value


Plain = Annotated[Any, BeforeValidator(_as_in_json)]
"""Any value that JSON can hold. In a msgpack body this is checked: no bytes, no timestamps, only
text keys."""
