"""What all settings are: read from the environment, frozen, and documented where they stand."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BeforeValidator, ConfigDict, model_validator

from shared.documented import Documented

PREFIX = "HONE_"


class FromEnvironment(Documented):
    """In the environment a setting is `HONE_` and its name in capitals. A value given by keyword
    takes precedence."""

    # pydantic-settings is not used because its import takes a fifth of the time of `hone ls`
    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _with_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        named = ((name, os.environ.get(PREFIX + name.upper())) for name in cls.model_fields)
        return {name: text for name, text in named if text is not None} | given


def split(text: str) -> tuple[str, ...]:
    """Returns the parts of a text between its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _listed(value: Any) -> Any:
    return split(value) if isinstance(value, str) else value


Listed = BeforeValidator(_listed)
"""Validator for a setting with several values, which are one text in the environment:
"numpy,sympy"."""
