"""The interface of a training engine. The only real engine is in `zero/deepspeed_engine.py`.

This seam exists so that the trainer's own rules (order, repetition, faults) are tested without
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shared.job import Job
from shared.wire import Canary, Example, Logprobs, Optimization, StepTotals, TokenLoss


@dataclass(frozen=True)
class Update:
    """The result of one training step's optimizer steps. `grad_norm` is before clipping;
    `num_updates` counts the optimizer steps. `logprobs` and `entropies` are as in `StepResult`.

    `skipped`: some loss or gradient was not finite, and no weight changed.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    num_updates: int = 1
    skipped: bool = False
    logprobs: Logprobs = field(default_factory=Logprobs)
    entropies: Logprobs = field(default_factory=Logprobs)


class OutOfMemory(RuntimeError):
    """This rank ran out of memory and cannot continue automatically; the message says how to avoid
    that. `micro_batch_tokens`: a micro-batch of so many tokens might fit; None if fewer would not
    help."""

    def __init__(self, message: str, micro_batch_tokens: int | None = None) -> None:
        super().__init__(message)
        self.micro_batch_tokens = micro_batch_tokens


class Engine(Protocol):
    """The trained policy: `zero/deepspeed_engine.py`. Every method is called on all ranks, with the
    same arguments.

    The `save_` methods get an existing folder that all ranks see. `save_weights`, `save_adapter`
    (of a job with LoRA) and `save_checkpoint` gather tensors from the ranks and write on rank 0;
    `save_state` writes each rank's share, and `load_state` reads it into a new engine
    (`zero/state.py`). `without` says which saving of time the model cannot have, and why ("": it
    has all).
    """

    dtype: str
    device: str
    num_parameters: int
    num_trainable: int
    without: str
    weights_bytes: int

    def update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
        version: int | None = None,
        *,
        supervised: bool = False,
    ) -> Update:
        """Trains the weights of `version` on `examples` of a batch of `totals`: by the job's loss,
        or if `supervised` by the negative log-likelihood of their tokens."""
        ...

    def forward(self, examples: tuple[Example, ...]) -> tuple[Logprobs, Logprobs]:
        """Returns the log-probs of the examples' sampled tokens, and the reference's (empty without
        one), as in `ForwardResult`."""
        ...

    @property
    def num_calls(self) -> int:
        """How many calls of `forward_backward` the gradient so far is of."""
        ...

    def forward_backward(
        self, examples: tuple[Example, ...], loss: TokenLoss
    ) -> tuple[float, Logprobs]:
        """Adds the gradient of the examples' loss to the next `optim_step`'s. Returns the loss and
        the log-probs of the sampled tokens."""
        ...

    def optim_step(self, how: Optimization) -> float:
        """Changes the weights by the gradient so far, and returns its norm before clipping."""
        ...

    def swap_out(self) -> object:
        """Ends the turn of the job, and returns what is its own, in host memory: adapter,
        optimizer, random numbers, gradient. Only of a job that `shares_as` something."""
        ...

    def swap_in(self, job: Job, aside: Any) -> None:
        """Begins the turn of a job that shares the engine: continues from a result of `swap_out`,
        or at the job's start (None)."""
        ...

    def canary(self) -> Canary | None:
        """Returns what the weights give a fixed sequence, for samplers to compare with; None if
        that is not finite."""
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

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        """Continues from what `save_state` wrote, or without `optimizer` from its weights alone."""
        ...

    def offload(self) -> None:
        """Moves the states that only an update needs off the device, if possible."""
        ...

    def reload(self) -> None:
        """Moves the offloaded states back to the device."""
        ...

    def close(self) -> None: ...
