"""What `model` of a job or of an engine names: a folder, or a model on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from shared.digest import stored_tensors
from shared.errors import BadRequest, Failed

HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")
EXPECTED = (
    "expected a folder with config.json and *.safetensors files, or a Hugging Face id such as "
    "Qwen/Qwen2.5-0.5B-Instruct"
)


def model_folder(model: str) -> Path | None:
    """Returns the folder that `model` names, or None if it is a Hugging Face id (whether the hub
    has it is not asked).

    A folder has to hold a configuration and whole safetensors files, which the weights of later
    versions are compared with. Raises BadRequest if `model` is neither.
    """
    folder = Path(model)
    try:
        folder.exists()
    except OSError as error:  # too long, or in a folder that may not be read
        raise BadRequest(f"'model': {model!r:.80}: {error.strerror}; {EXPECTED}") from error
    if folder.is_dir():
        for pattern in ("config.json", "*.safetensors"):
            if not any(folder.glob(pattern)):
                raise BadRequest(f"'model': the folder {model!r} has no {pattern}; {EXPECTED}")
        try:
            stored_tensors(folder)
        except Failed as error:
            raise BadRequest(f"'model': {error.detail}") from error
        return folder.resolve()
    if folder.exists():
        raise BadRequest(f"'model': {model!r} is a file; {EXPECTED}")
    if not HUB_ID.fullmatch(model):
        raise BadRequest(f"'model': there is no folder {model!r} here; {EXPECTED}")
    return None
