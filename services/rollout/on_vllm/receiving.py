"""What vLLM's processes are told before they receive weights from the trainer's device:
`inside/transfer.py` is the other side."""

from __future__ import annotations

import secrets
from typing import Any

from shared.wire import BroadcastWeights, SharedWeights


def sent_dtypes(ref: BroadcastWeights | SharedWeights) -> set[str]:
    """Returns the dtypes of what is sent, by torch's names."""
    if isinstance(ref, SharedWeights):
        return {tensor.dtype for tensor in ref.shared}
    return {tensor.dtype for chunk in ref.chunks for tensor in chunk}


def meeting(ref: BroadcastWeights | SharedWeights, host: str, num_ranks: int) -> dict[str, Any]:
    """Returns what each of vLLM's processes begins with: `transfer.Meeting` or `.Handles`."""
    if isinstance(ref, SharedWeights):
        tensors = [tensor.model_dump(mode="json") for tensor in ref.shared]
        return {"gpu": ref.gpu, "shared": tensors}
    return {
        "host": host,
        "port": ref.port,
        "key": ref.key,
        "name": secrets.token_hex(8),
        "num_ranks": num_ranks,
        "deadline_s": ref.deadline_s,
    }


def updates(ref: BroadcastWeights | SharedWeights) -> list[dict[str, Any]]:
    """Returns what it then loads, in order: `transfer.Chunk`s, or the `.Opened` of all."""
    if isinstance(ref, SharedWeights):
        return [{}]
    return [
        {
            "names": [tensor.name for tensor in chunk],
            "dtypes": [tensor.dtype for tensor in chunk],
            "shapes": [list(tensor.shape) for tensor in chunk],
        }
        for chunk in ref.chunks
    ]
