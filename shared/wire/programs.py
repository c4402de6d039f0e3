"""Operations of a program on its model, as stored in the run folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.wire.base import Logprobs, TokenIds, Wire
from shared.wire.rollouts import MAX_TOP, RolloutGroup, Sampling
from shared.wire.training import Example, Optimization, TokenLoss
from shared.wire.weights import AdapterWeights

SavedKind = Literal["checkpoint", "snapshot", "export"]
"""What a program saves: a checkpoint, weights for samplers, or a checkpoint to be downloaded."""


class ProgramOperation(Wire):
    """One operation: what it does, and the digest of the request's body; a "refused" one does
    nothing, because its request could not be read. `name` is the name of what it saves; "" names
    none. `num_targets` says of each datum how many targets each of its tokens has: as many of the
    examples, one after the other, are of the datum; 0: one target, without an axis; empty: all
    have 0. `ttl_s` is for how many seconds what it saves is kept; None: for ever."""

    kind: Literal[
        "forward",
        "forward_backward",
        "optim_step",
        "checkpoint",
        "snapshot",
        "export",
        "unload",
        "refused",
    ]
    digest: str
    examples: tuple[Example, ...] = ()
    num_targets: tuple[int, ...] = ()
    loss: TokenLoss | None = None
    optimization: Optimization | None = None
    name: str = ""
    ttl_s: float | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether the trainer counts it: it changes the gradient or the weights."""
        return self.kind in ("forward_backward", "optim_step")

    @property
    def saves(self) -> SavedKind | None:
        """What it saves; None: nothing."""
        return self.kind if self.kind in ("checkpoint", "snapshot", "export") else None


class OperationOutcome(Wire):
    """What an operation did. `error` says why it failed, as the program can fix it. `step` is the
    trainer's last operation at its end, and so the weights' version. `path` and `size_bytes` are of
    a checkpoint. `adapter` is a snapshot's, in the run folder; None: the model has no adapter that
    samplers take, and its newest snapshot alone is sampled."""

    step: int = 0
    error: str | None = None
    loss: float = 0.0
    logprobs: Logprobs = Logprobs()
    grad_norm: float = 0.0
    path: str = ""
    size_bytes: int = 0
    adapter: AdapterWeights | None = None


class LogStart(Wire):
    """Where a log of operations begins: those before `number` were done, the trainer counted `done`
    of them, and every checkpoint that it may resume from has them."""

    number: int = 1
    done: int = 0


class SavedWeights(Wire):
    """What operation `number` saved: weights of version `step`, in the folder `path` or, of a
    snapshot, as an `adapter` if there is one. Times are Unix seconds."""

    number: int
    kind: SavedKind
    name: str
    step: int
    made_at: float
    expires_at: float | None = None
    size_bytes: int = 0
    path: str = ""
    adapter: AdapterWeights | None = None


class SamplingSession(Wire):
    """The weights that a session samples by: the snapshot of version `step`, by its `adapter` if it
    has one; or the base model (`own_weights`). `of_path` is the path by which it was opened."""

    step: int = 0
    adapter: AdapterWeights | None = None
    own_weights: bool = False
    of_path: str | None = None


class SampleOrder(Wire):
    """Samples that a program asked for in a session. `prompt_logprobs` says for how many of the
    prompt's last tokens log-probs are wanted; 0: for all; None: for none. `top_prompt_logprobs` and
    `top_logprobs` are as in `GenerateRequest`."""

    session: SamplingSession
    prompt_token_ids: TokenIds
    sampling: Sampling
    prompt_logprobs: int | None = None
    top_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)


class DeliveredSamples(Wire):
    """The samples, or why there are none."""

    group: RolloutGroup | None = None
    error: str | None = None
