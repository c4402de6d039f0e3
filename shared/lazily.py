"""Packages whose names are imported at their first use: a command that needs three of two hundred
bodies builds only these three."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def exporting(file: str, names: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Returns `__getattr__` and `__dir__` for the package with the `__init__.py` `file` and the
    globals `names`. It exports its imports under `if TYPE_CHECKING`."""

    @functools.cache
    def homes() -> Mapping[str, str]:
        return _homes(Path(file).read_text(encoding="utf-8"))

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")
        names[name] = getattr(import_module(homes()[name]), name)
        return names[name]

    return get, lambda: sorted({*names, *homes()})


def _homes(source: str) -> dict[str, str]:
    """Returns the module of each name that is imported under `if TYPE_CHECKING`."""
    found: dict[str, str] = {}
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom) and line.module, ast.unparse(line)
                found |= {alias.name: line.module for alias in line.names}
    return found
