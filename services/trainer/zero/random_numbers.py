"""A rank's random number generators, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Returns the state of this rank's random number generators, as plain numbers and tensors."""
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
    """Sets this rank's random number generators to a result of `random_state`. CUDA's generators
    stay if either side has none."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
