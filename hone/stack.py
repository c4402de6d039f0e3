"""Where the services are: at the environment's URLs, else where `hone up` started them in this
folder, else at the default ports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.settings import Settings

FOLDER = Path(".hone")


def orchestrator(folder: Path = FOLDER) -> tuple[str, str | None]:
    """Returns the orchestrator's URL and the token to send, or None."""
    from shared.settings.environment import load_settings  # `hone --help` reads no settings

    settings = located(load_settings(), folder)
    return settings.orchestrator_url, settings.bearer()


def located(settings: Settings, folder: Path = FOLDER) -> Settings:
    """Returns the settings. Services whose URL is not in the environment get the URL of the stack
    that was started in `folder`."""
    state = _state(folder)
    urls = {f"{service}_url": url for service, url in read(folder).items()}
    urls = {name: url for name, url in urls.items() if name in type(settings).model_fields}
    urls |= state.get("settings", {})
    return settings.model_copy(
        update={name: url for name, url in urls.items() if name not in settings.model_fields_set}
    )


def read(folder: Path = FOLDER) -> dict[str, str]:
    """Returns the services' URLs of the stack started in `folder`; empty if none was."""
    return dict(_state(folder).get("urls", {}))


def _state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "stack.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
