"""Which files and folders of the orchestrator's host a job may name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.errors import BadRequest
from shared.http.gate import caller
from shared.http.urls import is_loopback
from shared.model.names import EXPECTED, HUB_ID, may_be_on_hub, model_folder
from shared.settings import Settings


def may_name(path: Path, folders: Sequence[Path] | None, settings: Settings) -> bool:
    """Returns whether the resolved path is below one of the `folders`. Without `folders`, any path
    may be named if the service listens on this machine only and no API key asks, and none
    otherwise."""
    if folders is None and is_loopback(settings.host) and caller.get() is None:
        return True
    return any(path.is_relative_to(folder.resolve()) for folder in folders or ())


def named_model_folder(model: str, settings: Settings) -> Path | None:
    """Returns the folder that a job's model names, None for a Hugging Face id. Raises BadRequest as
    `model_folder` does, and for a folder that jobs may not name, whether it exists or not."""
    if "\0" not in model and not HUB_ID.fullmatch(model):
        _check_model(model, Path(model).resolve(), settings)
    folder = model_folder(model)
    if folder is None and not may_be_on_hub(model):
        raise BadRequest(
            f"'model': there is no folder {model!r} here, and ids of the Hugging Face hub have an "
            f"owner; {EXPECTED}"
        )
    if folder:  # a folder in the working directory looks like a Hugging Face id
        _check_model(model, folder, settings)
    return folder


def _check_model(model: str, path: Path, settings: Settings) -> None:
    folders = settings.model_dirs
    if path.is_relative_to(settings.runs_dir.resolve()) or may_name(path, folders, settings):
        return
    allowed = ", ".join(map(str, (settings.runs_dir, *(folders or ()))))
    unset = ", as HONE_MODEL_DIRS is not set" if folders is None else ""
    raise BadRequest(
        f"'model': got {model!r:.80}, and jobs may name model folders below these only: {allowed}"
        f"{unset}; a Hugging Face id may always be named"
    )
