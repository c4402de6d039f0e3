"""Safetensors files made by hand, without the library that reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.weights.folders import stored_tensors, tensor_digests


def hashing(save: Callable[[Path], Any]) -> Callable[[Path], dict[str, str]]:
    """Returns what writes as `save` does, and returns the digest of each tensor as a publisher
    needs it."""

    def save_and_hash(folder: Path) -> dict[str, str]:
        save(folder)
        return tensor_digests(stored_tensors(folder))

    return save_and_hash


def safetensors(**tensors: bytes) -> bytes:
    """Returns a file of one-dimensional uint8 tensors."""
    header, end = {}, 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    plain = json.dumps(header).encode()
    return struct.pack("<Q", len(plain)) + plain + b"".join(tensors.values())
