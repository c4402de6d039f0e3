"""The reference model of the KL term: the model that the job began with. It gives log-probs and is
never trained.

With LoRA it is the policy with its adapters off, which costs no memory. Without LoRA it is a second
copy, partitioned over the ranks if the policy is (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.policy import Policy

Reference = Callable[[MicroBatch], Tensor]
"""Returns the log-probs `[N]` of the micro-batch's completion tokens, in nats, without gradient."""


def adapters_off(wrapped: Any, policy: Policy) -> Reference:
    """Returns the reference of a policy with adapters. `wrapped` is PEFT's wrapper of its model."""

    @torch.no_grad()
    def logprobs(batch: MicroBatch) -> Tensor:
        with wrapped.disable_adapter():
            return policy(batch)[0]

    return logprobs


def frozen_copy(policy: Policy) -> Reference:
    """Freezes `policy`, and returns it as the reference."""
    policy.requires_grad_(False)

    @torch.no_grad()
    def logprobs(batch: MicroBatch) -> Tensor:
        return policy(batch)[0]

    return logprobs
