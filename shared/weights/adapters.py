"""A LoRA adapter's folder, as PEFT writes it. Trainer and sampler agree on this format.

adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [rank, in]
                            base_model.model.<layer>.lora_B.weight [out, rank]
adapter_config.json         rank, alpha and the names of the layers, among others
"""

from __future__ import annotations

from pathlib import Path

from shared.errors import Failed
from shared.weights.digest import digest_of_bytes, stored_tensors, tensor_digests

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FILES = (CONFIG, WEIGHTS)

PREFIX = "base_model.model."
"""Prefix of a base model layer's name in the adapter's tensors."""


def adapter_digests(folder: Path) -> dict[str, str]:
    """Returns the digest of each tensor and, under its file's name, of the configuration: without
    its alpha the tensors say nothing. Raises Failed for files that cannot be read."""
    try:
        config = (folder / CONFIG).read_bytes()
        digests = tensor_digests(stored_tensors(folder))
    except OSError as error:
        raise Failed(f"no adapter can be read from {str(folder)!r}: {error}") from error
    return {**digests, CONFIG: digest_of_bytes("json", (len(config),), config)}
