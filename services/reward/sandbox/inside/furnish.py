"""What programs expect of Python, and a slot's lacks: it starts without `site`, and in there is no
/proc. Standard library only."""

from __future__ import annotations

import _thread
import builtins
import io
import os
import sys
import threading
from typing import Any, NoReturn

FILE = "program.py"
"""What a program's `__file__` is. There is no such file."""

_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_open = builtins.open


def furnish(memory_mib: int) -> None:
    """Gives a program `exit` and `quit`, /dev/stdin and its like, and whole numbers of any length
    as text, which its CPU time bounds. The stack of a thread is at most half of its memory:
    Python's own calls take none of it."""
    builtins.exit = builtins.quit = _exit  # pyright: ignore[reportAttributeAccessIssue]
    builtins.open = io.open = _opened
    sys.set_int_max_str_digits(0)
    most = memory_mib << 19
    threading.stack_size = lambda size=0: _thread.stack_size(min(size, most))


def _exit(code: Any = None) -> NoReturn:
    raise SystemExit(code)


def _opened(file: Any, *arguments: Any, **keywords: Any) -> Any:
    if isinstance(file, str | os.PathLike) and os.fspath(file) in _STREAMS:
        file = os.dup(_STREAMS[os.fspath(file)])
    return _open(file, *arguments, **keywords)
