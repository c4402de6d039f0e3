"""A section of the job: frozen, with no unknown keys."""

from __future__ import annotations

import re
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from shared.documented import Documented
from shared.explain import JOB_NAME

ENDLESS = 10**9
"""`steps` of a job that its program ends."""

JOB_ID = JOB_NAME
"""The pattern of jobs' ids and names."""

MAX_NAME = 40
"""Most characters of a job's name."""


MAX_TEXT = 4096
"""Most characters of a path, and of any text without a limit of its own."""

Text = Annotated[str, Field(max_length=MAX_TEXT)]

MAX_ENTRIES = 256
"""Most entries of any list or table without a limit of its own."""


def name_of(text: str, otherwise: str) -> str:
    """Returns a job's name made of `text`; `otherwise` if no character of it may be in a name."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")[:MAX_NAME] or otherwise


class Section(Documented):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses a truth value where a number is expected: pydantic would convert true to 1."""
        if isinstance(value, bool):
            taken = _members(cls.model_fields[info.field_name or ""].annotation)
            if bool not in taken and taken & {int, float}:
                raise ValueError("expected a number")
        return value


def _members(annotation: Any) -> set[Any]:
    """Returns the types of an annotation's union, and the types of its literals' values."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (Union, UnionType):
        return {member for part in get_args(annotation) for member in _members(part)}
    return {annotation}
