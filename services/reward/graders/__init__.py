"""The graders that come with Hone, one file each. Every module of this folder is imported, and so
registered, by `load`."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
