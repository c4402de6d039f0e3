"""Reading the settings from the environment, as each process's entry point does, never at import.

An unknown `HONE_*` variable is an error that names the nearest setting, so a misspelt setting is
not silently ignored. A secret may be in a file instead, as in containers: `HONE_TOKEN_FILE` names
the file that holds `HONE_TOKEN`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, get_args

from pydantic import SecretStr, ValidationError

from shared.errors import BadRequest
from shared.explain import closest, sentences
from shared.http.urls import is_loopback
from shared.settings import PREFIX, Settings

_TOKEN = re.compile(r"[!-~]{8,}")
_NAME = re.compile(r"^'(\w+)")

FILE = "_FILE"
"""Suffix of a secret's variable: the variable with the suffix names the file that holds the
secret."""


ROW, REWARD_FILE = "HONE_ROW", "HONE_REWARD_FILE"
"""Variables that `hone work` gives a command: its row as JSON, and the file for its reward. They
are no settings."""


def load_settings() -> Settings:
    """Returns the settings in the environment. Raises BadRequest for an unknown `HONE_*` variable
    or a bad value, for a secret's file that cannot be read, for an invalid token, and for a host
    beyond loopback without a token."""
    secrets = secret_variables()
    _check_names(secrets)
    try:
        settings = Settings(**_from_files(secrets))
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


def _check_names(secrets: dict[str, str]) -> None:
    """Raises BadRequest for all variables with the prefix that are no settings."""
    valid = _names(secrets)
    after = [name.removeprefix(PREFIX) for name in valid]  # the prefix makes all names alike
    told: list[str] = []
    for name in os.environ:
        if name.startswith(PREFIX) and name not in valid:
            near = closest(name.removeprefix(PREFIX), after)
            meant = f"; did you mean {PREFIX + near!r}?" if near else ";"
            told.append(f"unknown setting {name!r} in the environment{meant}")
    if told:
        raise BadRequest(f"{' '.join(told)} `hone explain settings` lists all")


def _names(secrets: dict[str, str]) -> list[str]:
    names = [PREFIX + name.upper() for name in Settings.model_fields]
    return [*names, *(variable + FILE for variable in secrets.values()), ROW, REWARD_FILE]


def secret_variables() -> dict[str, str]:
    """Returns the variable of each setting that is a secret."""
    return {
        name: PREFIX + name.upper()
        for name, field in Settings.model_fields.items()
        if SecretStr in get_args(field.annotation)
    }


def _from_files(secrets: dict[str, str]) -> dict[str, Any]:
    """Returns the secrets whose files the environment names."""
    return {
        name: _read(variable, file)
        for name, variable in secrets.items()
        if (file := os.environ.get(variable + FILE)) is not None
    }


def _read(variable: str, file: str) -> SecretStr:
    if variable in os.environ:
        raise BadRequest(f"{variable} and {variable}{FILE} are both set; expected one of the two")
    try:
        text = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadRequest(f"{variable}{FILE} names {file!r}, which cannot be read: {why}") from error
    if not text:
        raise BadRequest(f"{variable}{FILE} names {file!r}, which is empty; expected the secret")
    return SecretStr(text)


def _in_environment(name: re.Match[str]) -> str:
    return f"'{PREFIX}{name[1].upper()}"
