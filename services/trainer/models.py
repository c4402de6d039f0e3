"""Finding and loading a job's model: a folder, or a Hugging Face id. Says quickly and in words when it is neither."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx2
import torch
from huggingface_hub import model_info, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoModelForCausalLM

from shared.errors import BadRequest
from shared.job import Job

HUB_TIMEOUT_S = 10.0
WEIGHT_FILES = ("*.safetensors", "*.bin")
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)
EXPECTED = "expected a folder with config.json and weights (*.safetensors), or a Hugging Face model id"


def check_model(job: Job) -> None:
    """Raises BadRequest if `job.model` is neither a model folder here nor a model on the Hugging Face hub.

    transformers would retry an unreachable hub for half a minute, on every rank; this asks once.
    """
    folder = Path(job.model)
    if folder.is_dir():
        if not (folder / "config.json").is_file() or not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
            raise BadRequest(f"the folder {job.model!r} holds no model; {EXPECTED}")
        return
    if folder.is_absolute() or job.model.startswith((".", "~")):
        raise BadRequest(f"there is no folder {job.model!r}; {EXPECTED}")
    try:
        if isinstance(try_to_load_from_cache(job.model, "config.json", revision=job.model_revision), str):
            return
        model_info(job.model, revision=job.model_revision, timeout=HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise BadRequest(f"{job.model!r} is no model: {error}; {EXPECTED}") from error
    except HfHubHTTPError as error:
        revision = f" at revision {job.model_revision!r}" if job.model_revision else ""
        why = str(error).splitlines()[0]
        raise BadRequest(f"the Hugging Face hub has no model {job.model!r}{revision} for this token: {why}; {EXPECTED}") from error
    except (OSError, httpx2.HTTPError) as error:
        raise BadRequest(
            f"{job.model!r} is neither a folder on this host nor in its Hugging Face cache, and the hub cannot be reached "
            f"({type(error).__name__}: {error}); {EXPECTED}"
        ) from error


def load_model(job: Job, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the causal LM, its dropout off: the policy that is trained has to be the one that was sampled."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(job.model, revision=job.model_revision, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadRequest(f"cannot load the model {job.model!r}: {why}; {EXPECTED}") from error
    return model.to(device).eval()


def copy_tokenizer(job: Job, folder: Path) -> None:
    """Copies the model's tokenizer into `folder`, byte for byte.

    Loading and saving it would not do: AutoTokenizer picks a class by the model's architecture, which may rewrite the file.
    """
    source = Path(job.model)
    if not source.is_dir():
        source = Path(snapshot_download(job.model, revision=job.model_revision, allow_patterns=list(TOKENIZER_FILES)))
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def choose_dtype(asked: str) -> torch.dtype:
    """Returns the dtype of weights and products. "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if multiplies else torch.float32
