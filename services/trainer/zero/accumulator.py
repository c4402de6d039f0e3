"""An optimizer step that a program takes: gradients of several calls, and then the step.

    forward_backward --adds--> gradient --optim_step--> weights

The gradient since the last step is a function of the calls since then, which are kept. A call that
breaks off, whose loss is not finite or that ran out of memory, leaves a gradient that is partly
its own; then the gradient is dropped and the kept calls are made again.

DeepSpeed reduces gradients at the boundary of an accumulation, and which call is the last is known
only at the step. So the step itself brings the boundary, by a micro-batch whose gradient is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.engine import OutOfMemory
from services.trainer.learning.batch import MicroBatch, dummy
from services.trainer.learning.correction import known_sampler_logprobs
from services.trainer.learning.examples import num_sampled
from services.trainer.learning.token_losses import token_loss
from services.trainer.zero import stages as zero_stages
from services.trainer.zero.internals import drop_gradients, random_state, restore_random_state
from services.trainer.zero.lora import set_dropout
from services.trainer.zero.memory import first_line, is_out_of_memory, usage
from services.trainer.zero.update import Updater, refusable
from shared.errors import Failed
from shared.wire import Example, Logprobs, Optimization, TokenLoss


@dataclass(frozen=True)
class _Call:
    """A call whose gradient is in the sum, and this rank's random numbers before it."""

    examples: tuple[Example, ...]
    loss: TokenLoss
    random: dict[str, Any]


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
        self._make_again()
        call = _Call(examples, loss, random_state())
        try:
            total, logprobs = self._add(call)
        except (MemoryError, RuntimeError) as error:
            refused = self._out_of_memory(error)
            self._again(call)
            raise refused from None
        if not math.isfinite(total):
            self._again(call)
            raise Failed(
                f"the loss {loss.name!r} of {len(examples)} examples is {total:g}, expected a "
                "finite number; the gradient is as it was",
                code="not_finite",
            )
        self._calls.append(call)
        return total, logprobs

    def optim_step(self, how: Optimization) -> float:
        """Takes an optimizer step by the gradient so far, and returns the gradient's norm before
        clipping; without a gradient it is 0 and Adam's means decay. Raises Failed if the gradient
        is not finite: then it is dropped, and weights and optimizer are as they were."""
        self._make_again()
        zero = self._updater.zero
        for group in zero.optimizer.param_groups:
            group["lr"], group["eps"] = how.learning_rate, how.eps
            group["betas"] = (how.beta1, how.beta2)
            if group[zero_stages.DECAYS]:
                group["weight_decay"] = how.weight_decay
        calls, self._calls = self._calls, []
        self._pass(dummy(self._updater.layout), None, last=True)
        norm = zero_stages.step(zero, how.max_grad_norm)
        if norm is None:
            drop_gradients(zero)
            raise Failed(
                f"the step was refused: the gradient of {len(calls)} calls is not finite; it is "
                "dropped, and the weights are as they were",
                code="not_finite",
            )
        return norm

    def set_aside(self) -> tuple[_Call, ...]:
        """Drops the gradient so far, and returns the calls of which it is made again once it is
        added to or stepped by."""
        if self._calls and self._is_made:
            drop_gradients(self._updater.zero)
        return tuple(self._calls)

    def _make_again(self) -> None:
        """Makes the gradient of the calls that were set aside."""
        if self._is_made:
            return
        before = random_state()
        try:
            self._add_all()
        except (MemoryError, RuntimeError) as error:
            refused = self._out_of_memory(error)
            drop_gradients(self._updater.zero)
            restore_random_state(before)
            raise refused from None
        restore_random_state(before)
        self._is_made = True

    def _out_of_memory(self, error: Exception) -> Failed:
        """Returns the error of a call for which this rank has no memory, which it can undo. Raises
        OutOfMemory if it cannot, beside other ranks, and any other error as it is."""
        if not is_out_of_memory(error):
            raise error
        sentence = f"out of memory ({first_line(error)}); {usage(self._updater.device)}"
        if dist.get_world_size() > 1:
            raise OutOfMemory(f"{sentence}; this rank cannot continue from here") from None
        return Failed(
            f"{sentence}; the gradient is as it was. Lower memory.micro_batch_tokens or send "
            "shorter examples",
            code="out_of_memory",
        )

    def _again(self, failed: _Call) -> None:
        """Makes the gradient again, of the calls before the failed one."""
        drop_gradients(self._updater.zero)
        self._add_all()
        restore_random_state(failed.random)

    def _add_all(self) -> None:
        for call in self._calls:
            restore_random_state(call.random)
            self._add(call)

    def _add(self, call: _Call) -> tuple[float, Logprobs]:
        updater = self._updater
        updater.policy.temperature = 1.0
        num_tokens = sum(map(num_sampled, call.examples))
        # The tokens' log-probs and, at the end, the loss: each is one rank's, and 0 elsewhere.
        found_N = torch.zeros(num_tokens + 1, dtype=torch.float64, device=updater.device)
        (minibatch,) = updater.planned_batches(call.examples, None, num_minibatches=1)
        try:
            set_dropout(updater.policy, updater.has_dropout)
            for batch in minibatch.micro_batches:
                on_device, logprobs_N, loss = self._pass(batch, call.loss, last=False)
                if batch.weight:
                    found_N[on_device.places_N] = logprobs_N.detach().double()
                    found_N[-1] += loss.detach().double()
        finally:
            set_dropout(updater.policy, False)
        dist.all_reduce(found_N)
        found = found_N.cpu().numpy()
        return float(found[-1]), Logprobs(found[:-1].astype("<f4").tobytes())

    def _pass(
        self, batch: MicroBatch, loss: TokenLoss | None, *, last: bool
    ) -> tuple[MicroBatch, Tensor, Tensor]:
        """One forward and one backward pass of a micro-batch; of loss 0 without a loss."""
        zero = self._updater.zero
        zero.set_gradient_accumulation_boundary(last)
        on_device = batch.to(self._updater.device)
        logprobs_N, _ = zero(on_device)
        value = logprobs_N.sum() * 0.0
        if loss is not None:
            old_N = known_sampler_logprobs(on_device, logprobs_N.detach())
            value = token_loss(loss, logprobs_N, old_N, on_device)
        scale = batch.weight * dist.get_world_size()
        zero.backward(refusable(value, logprobs_N) * scale)
        return on_device, logprobs_N, value
