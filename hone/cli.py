"""The `hone` command. Exit codes: 0 done, 1 the job failed, 2 bad input or no service, 130 Ctrl-C
(which only detaches)."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

from hone import commands
from hone.shell import app
from shared import logs

for module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
    importlib.import_module(module.name)
app.registered_commands.sort(key=lambda command: command.name or "")


def main() -> None:
    logs.to_stderr()
    stdout: Any = sys.stdout
    stdout.reconfigure(
        line_buffering=True
    )  # so that `hone logs -f | grep step` shows a line as it happens
    app()


if __name__ == "__main__":
    main()
