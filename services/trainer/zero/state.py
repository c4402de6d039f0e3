"""What an engine needs to go on to the bit: DeepSpeed's own checkpoint (weights, optimizer) and
each rank's random numbers.

    <folder>/deepspeed/*.pt       DeepSpeed's: the module, and a shard of the optimizer for each rank
    <folder>/random-rank-<r>.pt   torch, CUDA, numpy and Python generators of rank r

Both functions are called on every rank. Loading needs an engine that was just made: of the same
model, the same number of ranks and the same ZeRO stage; `checkpoints.py` sees to that, and that the
folder is whole.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shared.errors import Failed

TAG = "deepspeed"


def save(zero_engine: Any, folder: Path) -> None:
    """Writes the state of DeepSpeed's `zero_engine` and of this rank's random numbers into
    `folder`, which is there."""
    zero_engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    torch.save(random_state(), _random_file(folder))


def load(zero_engine: Any, folder: Path) -> None:
    """Makes `zero_engine`, just made, and this rank's random numbers what they were. Raises Failed
    if DeepSpeed finds nothing."""
    path, _ = zero_engine.load_checkpoint(str(folder), tag=TAG)
    if path is None:
        raise Failed(f"DeepSpeed found no state in {str(folder / TAG)!r}")
    restore_random_state(torch.load(_random_file(folder), weights_only=True))


def random_state() -> dict[str, Any]:
    """Returns this rank's random number generators, in plain numbers and tensors."""
    numpy_name, numpy_keys, *numpy_rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (
            str(numpy_name),
            torch.from_numpy(np.asarray(numpy_keys).astype(np.int64)),
            *numpy_rest,
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets this rank's random number generators to what `random_state` returned. CUDA's stay if
    either side has none."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _random_file(folder: Path) -> Path:
    return folder / f"random-rank-{dist.get_rank()}.pt"
