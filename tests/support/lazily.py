"""Packages that are imported when a test first needs them: every worker of pytest imports every
file of tests, and runs a quarter of them."""

from __future__ import annotations

import importlib
from typing import Any


class Package:
    """The package `name`, which is imported when an attribute of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_") or attribute == "pytestmark":  # asked for by pytest
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
