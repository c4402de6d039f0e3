"""How each of the four services begins: `python -m services.<name>`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from shared.errors import HoneError
from shared.host import logs, tracing
from shared.settings import Settings
from shared.settings.environment import load_settings


def run_main(name: str, main: Callable[[Settings], int | None]) -> None:
    """Loads the settings, sets up logs, runs `main` and ends the process with its exit code, 130
    after Ctrl-C. If it cannot start, it prints one sentence to stderr and exits with code 2."""
    try:
        settings = load_settings()
        logs.configure(name, settings)
        tracing.configure(name, settings)
        sys.exit(main(settings))
    except HoneError as error:
        sys.stderr.write(f"{error.detail}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # the server raises it again after an orderly end
        sys.exit(130)
