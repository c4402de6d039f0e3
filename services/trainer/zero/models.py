"""Finding and loading a job's model: a folder, or a Hugging Face id. Says quickly and in words when
it is neither."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file, cached_files

from shared.errors import BadRequest
from shared.job import Job
from shared.models import EXPECTED, model_folder

HUB_TIMEOUT_S = 10.0
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "chat_template.jinja",
        "chat_template.json",
    ),
)


def check_model(job: Job) -> None:
    """Raises BadRequest if `job.model` is neither a model folder here nor a model on the Hugging
    Face hub.

    transformers would retry an unreachable hub for half a minute, on every rank; this asks once.
    """
    if model_folder(job.model):
        return
    with contextlib.suppress(OSError, ValueError):  # not in the cache: the hub is asked next
        cached_file(job.model, "config.json", revision=job.model_revision, local_files_only=True)
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx2.head(hub, timeout=HUB_TIMEOUT_S)
    except httpx2.HTTPError as error:
        raise BadRequest(
            f"{job.model!r} is neither a folder on this host nor in its Hugging Face cache, and "
            f"{hub} cannot be reached "
            f"({type(error).__name__}: {error}); {EXPECTED}"
        ) from error
    try:
        cached_file(job.model, "config.json", revision=job.model_revision)
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"{hub} has no model {job.model!r} for this token: {str(error).splitlines()[0]}; "
            f"{EXPECTED}"
        ) from error


def load_model(job: Job, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the causal LM, its dropout off: the policy that is trained has to be the one that was
    sampled."""
    attention = (
        {} if job.memory.attention == "auto" else {"attn_implementation": job.memory.attention}
    )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            job.model, revision=job.model_revision, dtype=dtype, **attention
        )
    except ImportError as error:
        raise BadRequest(
            f"memory.attention is {job.memory.attention!r}, which is not there: "
            f"{_first_line(error)}"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise BadRequest(
            f"cannot load the model {job.model!r}: {_first_line(error)}; {EXPECTED}"
        ) from error
    return model.to(device).eval()


def copy_tokenizer(job: Job, folder: Path) -> None:
    """Copies the model's tokenizer into `folder`, byte for byte; a model without one makes a
    checkpoint without one.

    Loading and saving it would not do: AutoTokenizer picks a class by the model's architecture,
    which may rewrite the file.
    """
    names = list(TOKENIZER_FILES)
    files = cached_files(
        job.model, names, revision=job.model_revision, _raise_exceptions_for_missing_entries=False
    )
    for file in files or ():
        shutil.copyfile(file, folder / Path(file).name)


def choose_dtype(asked: str) -> torch.dtype:
    """Returns the dtype of weights and products. "auto" is bfloat16 where the hardware multiplies
    it, else float32."""
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if multiplies else torch.float32


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
