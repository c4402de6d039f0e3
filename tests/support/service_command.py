"""Services as processes with other constants: limits that a test cannot wait for or reach."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def service_command(module: str, constants: Mapping[str, object] | None = None) -> list[str]:
    """Returns the command of `python -m module`, with these values of constants by their full
    names, such as "services.reward.app.MAX_QUEUED_PROGRAMS"."""
    if not constants:
        return [sys.executable, "-m", module]
    lines = ["import importlib, runpy"]
    for name, value in constants.items():
        where, _, constant = name.rpartition(".")
        lines.append(f"importlib.import_module({where!r}).{constant} = {value!r}")
    lines.append(f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)")
    return [sys.executable, "-c", "\n".join(lines)]
