"""Where the orchestrator is: the setting, else the stack that `hone up` started in this folder,
else the default port."""

from __future__ import annotations

import json
import os
from pathlib import Path

from shared.config import load_settings

FOLDER = Path(".hone")


def orchestrator(folder: Path = FOLDER) -> tuple[str, str | None]:
    """Returns the orchestrator's URL and the token to send, or None."""
    settings = load_settings()
    url = settings.orchestrator_url
    if "HONE_ORCHESTRATOR_URL" not in os.environ:
        url = str(read(folder).get("orchestrator", url))
    return url, settings.bearer()


def read(folder: Path = FOLDER) -> dict[str, str]:
    """Returns the services' URLs of the stack started in `folder`; empty if none was."""
    try:
        state = json.loads((folder / "stack.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return dict(state["urls"])
