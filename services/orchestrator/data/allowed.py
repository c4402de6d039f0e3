"""Which model folders of the orchestrator's host a job may name."""

from __future__ import annotations

from pathlib import Path

from shared.errors import BadRequest
from shared.http.gate import other_folders
from shared.settings import Settings
from shared.weights.model_folder import EXPECTED, HUB_ID, may_be_on_hub, model_folder


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
    if allowed := other_folders(path, settings):
        raise BadRequest(
            f"'model': got {model!r:.80}, and jobs may name model folders below these only: "
            f"{allowed}; a Hugging Face id may always be named"
        )
