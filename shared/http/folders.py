"""Which files and folders of a service's host its callers may name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.http.gate import caller
from shared.http.urls import is_loopback
from shared.settings import Settings


def may_name(path: Path, folders: Sequence[Path] | None, settings: Settings) -> bool:
    """Returns whether the resolved path is below one of the `folders`. Without `folders`, any path
    may be named if the service listens on this machine only and no API key asks, and none
    otherwise."""
    if folders is None and is_loopback(settings.host) and caller.get() is None:
        return True
    return any(path.is_relative_to(folder.resolve()) for folder in folders or ())


def other_folders(path: Path, settings: Settings) -> str | None:
    """Returns the folders below which models may be named, for people, if the resolved path is
    below none of them; else None."""
    folders = settings.model_dirs
    if path.is_relative_to(settings.runs_dir.resolve()) or may_name(path, folders, settings):
        return None
    unset = ", as HONE_MODEL_DIRS is not set" if folders is None else ""
    return ", ".join(map(str, (settings.runs_dir, *(folders or ())))) + unset
