"""What all settings are: read from the environment, frozen, and documented where they stand."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "HONE_"


class FromEnvironment(BaseSettings):
    """In the environment a setting is `HONE_` and its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def split(text: str) -> tuple[str, ...]:
    """Returns the parts of a text between its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _listed(value: Any) -> Any:
    return split(value) if isinstance(value, str) else value


Listed = BeforeValidator(_listed)
"""Of a setting with several values, which in the environment are one text: "numpy,sympy"."""
