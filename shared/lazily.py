"""Packages whose names are imported at their first use: a command that needs three of two hundred
bodies builds only these three."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_DEFINED = re.compile(r"^(?:class |def )?([A-Za-z]\w*)(?=[(:]| = )", re.MULTILINE)


def export_lazily(
    file: str, names: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Returns `__getattr__` and `__dir__` for the package with the `__init__.py` `file` and the
    globals `names`. The package exports its imports under `if TYPE_CHECKING`. A `*` there stands
    for what that module of the package defines."""

    @functools.cache
    def homes() -> Mapping[str, str]:
        return dict(_homes(Path(file)))

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")
        names[name] = getattr(import_module(homes()[name]), name)
        return names[name]

    return get, lambda: sorted({*names, *homes()})


def _homes(init: Path) -> Iterator[tuple[str, str]]:
    """Yields each exported name, and its module."""
    for block in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom) and line.module, ast.unparse(line)
                for alias in line.names:
                    for name in _defined(init, line.module) if alias.name == "*" else [alias.name]:
                        yield name, line.module


def _defined(init: Path, module: str) -> list[str]:
    """Returns the public names that a module beside `init` defines."""
    path = init.with_name(f"{module.rpartition('.')[2]}.py")
    return _DEFINED.findall(path.read_text(encoding="utf-8"))
