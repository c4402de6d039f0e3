"""Models whose fields are documented by the text under each, as `hone explain` and OpenAPI show it;
and data of any shape in a body: a dataset's row, a grader's params, a program's inputs."""

from __future__ import annotations

import ast
import functools
import inspect
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    GetJsonSchemaHandler,
    JsonValue,
    TypeAdapter,
    ValidationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Documented(BaseModel):
    """The text under a field is its description in the JSON schema. It is read from the source when
    the schema is made. Pydantic's `use_attribute_docstrings` reads it at import, which is a tenth
    of the time of a command that only asks."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            fields[name]["description"] = text
        return schema


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Returns the texts under the model's fields, by field."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, Documented) and kind is not Documented:
            found |= _texts(kind)
    return {name: text for name, text in found.items() if name in model.model_fields}


@functools.cache
def _texts(kind: type[Documented]) -> dict[str, str]:
    """Returns the text under each annotated name of the class."""
    (definition,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef), kind
    found: dict[str, str] = {}
    for line, below in pairwise(definition.body):
        match line, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(str(text))):
                found[name] = inspect.cleandoc(text)
            case _:
                pass
    return found


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
