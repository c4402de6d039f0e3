"""Reading the settings from the environment, as each process's entry point does, never at import.

A `HONE_*` variable that no setting has is an error that names the nearest one, so a misspelt
setting cannot be silently ignored.
"""

from __future__ import annotations

import os
import re

from pydantic import ValidationError

from shared.config import PREFIX, Settings
from shared.errors import BadRequest
from shared.explain import nearest, sentences
from shared.urls import is_loopback

_TOKEN = re.compile(r"[!-~]{8,}")
_NAME = re.compile(r"^'(\w+)")


def load_settings() -> Settings:
    """Returns the settings in the environment. Raises BadRequest for an unknown `HONE_*` variable
    or a bad value, for a token that is none, and for a host beyond loopback without a token."""
    valid = [PREFIX + name.upper() for name in Settings.model_fields]
    for name in os.environ:
        if name.startswith(PREFIX) and name not in valid:
            raise BadRequest(f"unknown setting {name!r} in the environment; {nearest(name, valid)}")
    try:
        settings = Settings()
    except ValidationError as error:
        faults = [
            fault | {"detail": _NAME.sub(_in_environment, fault["detail"])}
            for fault in sentences(error, Settings)
        ]
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error
    token = settings.bearer()
    if token is not None and not _TOKEN.fullmatch(token):
        raise BadRequest(
            f"HONE_TOKEN has {len(token)} characters and is too short, or has a blank or another "
            "that is not visible ASCII; expected at least 8, such as `openssl rand -hex 16` prints"
        )
    if token is None and not is_loopback(settings.host):
        raise BadRequest(
            f"HONE_HOST is {settings.host!r} and HONE_TOKEN is not set: without a token a service "
            "listens on this machine only; "
            "set HONE_TOKEN, or HONE_HOST=127.0.0.1"
        )
    return settings


def _in_environment(name: re.Match[str]) -> str:
    return f"'{PREFIX}{name[1].upper()}"
