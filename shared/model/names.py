"""What `model` of a job or of an engine names: a folder, or a model on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx2

from shared.errors import BadRequest, Failed, Unavailable
from shared.weights.digest import stored_tensors

HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")
MODELS_WITHOUT_OWNER = frozenset(
    {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "ctrl", "openai-gpt"}
)
"""Hub models from before ids had an owner. Any other name without an owner, such as OpenAI's names,
is no model there."""

EXPECTED = (
    "expected a folder with config.json and *.safetensors files, or a Hugging Face id such as "
    "Qwen/Qwen2.5-0.5B-Instruct"
)


def may_be_on_hub(model: str) -> bool:
    """Whether the Hugging Face hub can have a model of this name."""
    has_owner = "/" in model or model in MODELS_WITHOUT_OWNER
    return has_owner and HUB_ID.fullmatch(model) is not None


def hub_is_offline() -> bool:
    """Whether the Hugging Face hub must not be asked (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


HUB_TIMEOUT_S = 10.0


def check_hub(model: str) -> None:
    """Raises Unavailable if the Hugging Face hub is unreachable; call it for a model that is not
    cached here. Tries nothing if the hub must not be asked (HF_HUB_OFFLINE)."""
    if hub_is_offline():
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx2.head(hub, timeout=HUB_TIMEOUT_S)
    except httpx2.HTTPError as error:
        raise Unavailable(
            f"{model!r} is neither a folder on this host nor in its Hugging Face cache, and {hub} "
            f"cannot be reached ({type(error).__name__}: {error}); {EXPECTED}",
            code="hub_away",
        ) from error


def model_folder(model: str) -> Path | None:
    """Returns the folder that `model` names, or None if it is a Hugging Face id. The hub is not
    asked.

    A folder must hold a configuration and complete safetensors files: later versions' weights are
    compared with these. Raises BadRequest if `model` is neither.
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
        raise BadRequest(
            f"'model': there is no folder {model!r} here; {EXPECTED}", code="not_there"
        )
    return None
