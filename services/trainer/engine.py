"""What the trainer needs of a training engine. The one real engine is in
`zero/deepspeed_engine.py`.

This seam exists so that the trainer's own rules (order, repetition, faults) are tested without
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.wire import Canary, Example, StepTotals


@dataclass(frozen=True)
class Update:
    """What the optimizer steps of one training step did. `grad_norm` is before clipping;
    `num_updates` counts them.

    `skipped`: some loss or gradient was not finite, and no weight changed.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    num_updates: int = 1
    skipped: bool = False


class OutOfMemory(RuntimeError):
    """This rank ran out of memory where it cannot go on by itself: the message says how to avoid
    it. `micro_batch_tokens`: with so many tokens in a micro-batch it might fit; None if fewer would
    not help."""

    def __init__(self, message: str, micro_batch_tokens: int | None = None) -> None:
        super().__init__(message)
        self.micro_batch_tokens = micro_batch_tokens


class Engine(Protocol):
    """The trained policy: `zero/deepspeed_engine.py`. Every method is called on all ranks, with the
    same arguments.

    The `save_` methods get a folder that all ranks see and that is there. `save_weights`,
    `save_adapter` (of a job with LoRA) and `save_checkpoint` gather what is spread over the ranks
    and write from rank 0; `save_state` writes a share of each rank, and `load_state`, on an engine
    that was just made, reads it (`zero/state.py`).
    """

    dtype: str
    device: str
    num_parameters: int
    num_trainable: int
    weights_bytes: int

    def update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
        version: int | None = None,
    ) -> Update:
        """Trains the weights of `version` on `examples` of a batch of `totals`."""
        ...

    def canary(self) -> Canary:
        """Returns what the weights give a fixed sequence, for samplers to compare with."""
        ...

    def save_weights(self, folder: Path) -> dict[str, str]:
        """Returns the digest of each tensor on rank 0, {} elsewhere."""
        ...

    def save_adapter(self, folder: Path) -> None: ...

    def live_weights(self) -> Mapping[str, Any]:
        """Returns the tensors that `save_weights` writes, whole, where they are trained: until the
        next update. Raises BadRequest where there are no such."""
        ...

    def save_checkpoint(self, folder: Path) -> None: ...

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...

    def rest(self) -> None:
        """Moves what only an update needs off the device, if it can."""
        ...

    def rise(self) -> None:
        """Moves it back."""
        ...

    def close(self) -> None: ...
