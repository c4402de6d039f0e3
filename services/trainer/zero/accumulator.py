"""An optimizer step that a program takes: gradients of several calls, and then the step.

    forward_backward --adds--> gradient --optim_step--> weights

The gradient since the last step is a function of the calls since then, which are kept. A call that
breaks off, whose loss is not finite or that ran out of memory, leaves a gradient that is partly
its own; then the gradient is dropped, and the next call or step makes the kept calls again.

DeepSpeed reduces gradients at the boundary of an accumulation, and which call is the last is known
only at the step. So the step itself brings the boundary, by a micro-batch whose gradient is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.learning.batch import MicroBatch, dummy
from services.trainer.learning.correction import OF_CALLS, loss_inputs
from services.trainer.learning.examples import num_sampled
from services.trainer.learning.loss import LossInputs
from services.trainer.zero import stages as zero_stages
from services.trainer.zero.internals import (
    Undo,
    drop_gradients,
    random_state,
    restore_random_state,
)
from services.trainer.zero.lora import set_dropout
from services.trainer.zero.update import Progress, Updater
from shared.errors import Failed
from shared.wire import Example, Logprobs, Optimization, TokenLoss


@dataclass(frozen=True)
class _Call:
    """A call whose gradient is in the sum, and this rank's random numbers before it."""

    examples: tuple[Example, ...]
    loss: TokenLoss
    random: dict[str, Any]


NO_LOSS = TokenLoss(name="cross_entropy")
"""Of a dummy: its only token has the advantage 0."""


def inputs_of(loss: TokenLoss) -> Callable[[MicroBatch, Tensor], LossInputs]:
    """Returns how the inputs of a call's loss are made of a micro-batch and its log-probs."""
    return partial(loss_inputs, correction=OF_CALLS, spec=loss)


class Accumulator:
    """Adds up gradients for the policy of `updater`. Every method is called on all ranks
    together."""

    def __init__(self, updater: Updater, calls: Sequence[_Call] = ()) -> None:
        self._updater = updater
        self._calls = list(calls)
        self._is_made = not calls

    @property
    def num_calls(self) -> int:
        """How many calls the next optimizer step has so far."""
        return len(self._calls)

    def forward_backward(
        self, examples: tuple[Example, ...], loss: TokenLoss
    ) -> tuple[float, Logprobs]:
        """Adds the gradient of the examples' loss, and returns the loss and the tokens' log-probs,
        at temperature 1. Raises Failed if the loss is not finite or memory ran out, with the
        gradient as it was; OutOfMemory if memory ran out and this rank cannot continue."""
        return self._updater.fitting(lambda: self._forward_backward(examples, loss))

    def optim_step(self, how: Optimization) -> float:
        """Takes an optimizer step by the gradient so far, and returns the gradient's norm before
        clipping; without a gradient it is 0 and Adam's means decay. Raises Failed if the gradient
        is not finite: then it is dropped, and weights and optimizer are as they were."""
        updater = self._updater
        updater.fitting(self._make_again)
        calls, self._calls = self._calls, []
        updater.backward(dummy(updater.layout), inputs_of(NO_LOSS), last=True)
        norm = zero_stages.step(updater.zero, how)
        if norm is None:
            drop_gradients(updater.zero)
            raise Failed(
                f"the step was refused: the gradient of {len(calls)} calls is not finite; it is "
                "dropped, and the weights are as they were",
                code="not_finite",
            )
        return norm

    def swap_out(self) -> tuple[_Call, ...]:
        """Drops the gradient so far, and returns the calls of which it is made again once it is
        added to or stepped by."""
        if self._calls and self._is_made:
            drop_gradients(self._updater.zero)
        return tuple(self._calls)

    def _forward_backward(
        self, examples: tuple[Example, ...], loss: TokenLoss
    ) -> tuple[float, Logprobs]:
        self._make_again()
        undo = Undo(random_state())
        call = _Call(examples, loss, undo.random)
        total, logprobs = self._add(call, undo)
        if not math.isfinite(total):
            self._drop(undo)
            raise Failed(
                f"the loss {loss.name!r} of {len(examples)} examples is {total:g}, expected a "
                "finite number; the gradient is as it was",
                code="not_finite",
            )
        self._calls.append(call)
        return total, logprobs

    def _make_again(self) -> None:
        """Makes the gradient of the calls so far, if it was dropped."""
        if self._is_made:
            return
        undo = Undo(random_state())
        for call in self._calls:
            restore_random_state(call.random)
            self._add(call, undo)
        restore_random_state(undo.random)
        self._is_made = True

    def _drop(self, undo: Undo) -> None:
        """Drops the gradient, of which a part is a failed call's, until it is made again."""
        undo.apply(self._updater.zero)
        self._is_made = not self._calls

    def _add(self, call: _Call, undo: Undo) -> tuple[float, Logprobs]:
        """Adds the gradient of a call. Raises `Updater.out_of_memory`, with the gradient
        dropped."""
        updater, progress = self._updater, Progress()
        updater.policy.temperature = 1.0
        num_tokens = sum(map(num_sampled, call.examples))
        # The tokens' log-probs and, at the end, the loss: each is one rank's, and 0 elsewhere.
        found_N = torch.zeros(num_tokens + 1, dtype=torch.float64, device=updater.device)
        (minibatch,) = updater.planned_batches(call.examples, None, num_minibatches=1)
        try:
            set_dropout(updater.policy, updater.has_dropout)
            for batch in minibatch.micro_batches:
                progress.enter("a micro-batch", batch)
                on_device, x, _, loss = updater.backward(batch, inputs_of(call.loss), last=False)
                if batch.weight:
                    found_N[on_device.places_N] = x.logprobs_N.detach().double()
                    found_N[-1] += loss.double()
        except (MemoryError, RuntimeError) as error:
            self._is_made = not self._calls
            raise updater.out_of_memory(error, undo, progress) from None
        finally:
            set_dropout(updater.policy, False)
        dist.all_reduce(found_N)
        found = found_N.cpu().numpy()
        return float(found[-1]), Logprobs(found[:-1].astype("<f4").tobytes())
