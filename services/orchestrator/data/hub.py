"""Fetches a model's configuration and tokenizer from the Hugging Face Hub, to check them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shared.errors import BadRequest, first_line
from shared.model.check import TOKENIZERS
from shared.model.names import may_be_on_hub

FETCHED = ("config.json", *TOKENIZERS, "tokenizer_config.json", "chat_template.jinja")


def is_cached(model: str, revision: str | None) -> bool:
    """Whether the model can be checked without fetching anything."""
    try:
        if Path(model).exists() or not may_be_on_hub(model):
            return True
    except (OSError, ValueError):
        return True  # it is no model's name, so there is nothing to fetch
    folder = cached_model(model, revision)
    return folder is not None and _is_whole(folder)


def cached_model(model: str, revision: str | None) -> Path | None:
    """Returns the folder with the model's files in this machine's Hugging Face cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(model, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(found)


def fetch_model(model: str, revision: str | None) -> str | None:
    """Puts configuration and tokenizer of a model into this machine's Hugging Face cache. Returns
    why the Hub could not be asked; None if it could. Raises BadRequest for a model that the Hub
    does not have. May hang as long as the Hub does."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    try:
        snapshot_download(model, revision=revision, allow_patterns=[*FETCHED])
    except (HFValidationError, HfHubHTTPError) as error:
        status = 404 if isinstance(error, HFValidationError) else error.response.status_code
        if status in (401, 404) and not isinstance(error, GatedRepoError):
            raise BadRequest(
                f"'model': the Hub has no model {model!r} at revision {revision or 'main'!r} that "
                "may be read with this HF_TOKEN; expected one that it has, or a folder"
            ) from error
        return f"{hub_url()} answers {status} for it"
    except Exception as error:  # the Hub's library may raise any class
        return f"{hub_url()} cannot be reached ({first_line(error.__cause__ or error)})"
    return None


def hub_url() -> str:
    """Returns the Hub's URL for messages: without user and password."""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return re.sub(r"//[^/]*@", "//", url)


def _is_whole(folder: Path) -> bool:
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    return has_tokenizer and (folder / "config.json").is_file()
