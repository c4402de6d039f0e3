"""The graders that come with Hone, one file for each kind. `load` imports every module of this
folder, which registers its graders."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
