"""Training, one path for steps and for programs: batches add their gradients up, and an optimizer
step uses them.

    forward_backward    [examples] --plan--> micro-batches --forward, loss, backward--> gradient
    optim_step          gradient --clip, AdamW--> weights

`train_step` is `epochs` passes over a batch, `minibatches` times a forward_backward and an
optim_step in each, or nothing at all. A program (`POST /forward_backward`, `/optim_step`) requests
them one by one.

Every micro-batch goes forward once and backward at once, so only one micro-batch's activations
exist at a time. DeepSpeed averages gradients over ranks, so each loss is multiplied by their
number; it divides by its own count of accumulation steps, which is set to 1, and
`set_gradient_accumulation_boundary` says which micro-batch is the last. A program's last call is
known only at its step: the step itself brings the boundary, by a micro-batch whose gradient is 0.
The loss's denominators are the whole optimizer step's. So any split into ranks and micro-batches
gives the gradient of one big batch.

Frozen passes of a train step, before its first optimizer step and without dropout, compute the
trainer's log-probs before the first of several steps, or without dropout; and the reference's
log-probs. They have the same micro-batches as the passes that train, so that their bits are the
same: a reference that equals the policy has a KL of exactly 0. With one step and no dropout, the
pass that trains gives the trainer's log-probs too. The ratio of the first step is taken to the pass
that trains, dropout included, and is exactly 1.

All or nothing: where a loss or gradient is not finite, or memory runs out, weights, optimizer and
random numbers become what they were, and the gradient is dropped. It is a function of the program's
calls since its last optimizer step, which are kept: the next call or step computes them again.
After running out of memory in a micro-batch the step or call is repeated with gradient
checkpointing if that was off under "auto", else with half as many tokens in each, and so are all
that follow. If one rank of several runs out of memory, the others wait in a collective, so the rank
cannot repeat the step: it reports the failure and ends, and the new ranks start with these
settings.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.engine import OutOfMemory, PassBudget, Update
from services.trainer.learning.batch import Layout, MicroBatch, Minibatch, dummy, plan
from services.trainer.learning.correction import OF_CALLS, Preferences, loss_inputs, resolve
from services.trainer.learning.examples import num_sampled
from services.trainer.learning.loss import Spec, kl_weight, total_loss
from services.trainer.learning.metrics import StepMetrics
from services.trainer.learning.model_checks import set_recomputing
from services.trainer.learning.policy import Policy, Reference
from services.trainer.zero import host_memory
from services.trainer.zero import stages as zero_stages
from services.trainer.zero.host_memory import HostCopies
from services.trainer.zero.internals import (
    Snapshot,
    drop_gradients,
    random_state,
    restore_random_state,
)
from services.trainer.zero.lora import set_dropout
from services.trainer.zero.memory import (
    MemoryPlan,
    first_line,
    half_budget,
    is_out_of_memory,
    is_worth_giving_back,
    knobs,
    room_bytes,
    usage,
)
from shared.errors import Failed
from shared.host.logs import get_logger
from shared.job import Job, TrainingSpec
from shared.plan.gpus import host_memory_bytes
from shared.wire import Example, Logprobs, Optimization, StepTotals, TokenLoss


@dataclass(frozen=True)
class FrozenLogprobs:
    """Log-probs of a micro-batch before the first optimizer step, `[N]`; None where they are not
    needed."""

    before_N: Tensor | None = None
    reference_N: Tensor | None = None


@dataclass
class Progress:
    """The progress of a train step, a call or an optimizer step, for its errors, and the state to
    restore if it fails: `random`, this rank's random numbers, and `snapshot`, its weights and
    optimizer if several optimizer steps are taken. A single optimizer step that failed has changed
    neither weights nor optimizer. `stepping`: the optimizer is at work, and weights may be half
    changed. `shape`: sequences and tokens, padding included, of the present micro-batch."""

    random: dict[str, Any] = field(default_factory=random_state)
    snapshot: Snapshot | None = None
    num_updates: int = 0
    update: int = 0
    passing: str = "the copy of weights and optimizer that several optimizer steps need"
    shape: tuple[int, int] | None = None
    stepping: bool = False

    def enter(self, passing: str, batch: MicroBatch) -> None:
        self.passing, self.shape = passing, (batch.num_sequences, batch.input_ids_BT.numel())

    def half(self, budget_tokens: int) -> int | None:
        """Half the tokens of the present micro-batch; None if fewer would not help."""
        return None if self.stepping else half_budget(self.shape, budget_tokens)

    def __str__(self) -> str:
        step = (
            f"optimizer step {self.update} of {self.num_updates}"
            if self.update
            else "no optimizer step yet"
        )
        if self.shape is None:
            return self.passing
        sequences, tokens = self.shape
        return f"{self.passing} of {sequences} sequence(s) in {tokens} tokens, {step}"


R = TypeVar("R")


class BatchOutOfMemory(Exception):
    """A micro-batch did not fit into memory; nothing has changed. One within `budget` may fit."""

    def __init__(self, error: Failed, budget: PassBudget) -> None:
        super().__init__(error)
        self.error = error
        self.budget = budget


class NonFiniteLoss(Exception):
    """A loss or gradient is NaN or infinite, and the call or optimizer step was refused, on all
    ranks."""


@dataclass(frozen=True)
class Call:
    """A call whose gradient the next optimizer step uses, and this rank's random numbers before
    it."""

    examples: tuple[Example, ...]
    loss: TokenLoss
    random: dict[str, Any]


@dataclass
class Updater:
    """Trains the policy of a job in DeepSpeed's engine `zero`. Every method is called on all ranks
    together. `calls` are the calls since the last optimizer step; the gradient of the initial ones
    is not in `zero`."""

    job: Job
    zero: Any
    policy: Policy
    reference: Reference | None
    copies: HostCopies
    layout: Layout
    device: torch.device
    planned: MemoryPlan | None = None
    can_recompute: bool = False
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._correction = resolve(self.job.correction, self.job.max_staleness)
        self._is_dropped = True  # the gradient of `calls` is not in `zero`
        self._set_recomputing(self.can_recompute)

    @property
    def has_dropout(self) -> bool:
        return self.job.lora is not None and self.job.lora.dropout > 0

    def train_step(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
        version: int | None = None,
        *,
        supervised: bool = False,
    ) -> Update:
        """Trains the weights of `version` on `examples` of a batch that was sampled with `totals`
        (None: these examples are the whole batch), and returns the result. If `supervised`, the
        loss is the negative log-likelihood, at temperature 1 and without a KL term. Raises Failed
        if a loss or gradient is not finite or memory ran out, with everything unchanged;
        OutOfMemory if memory ran out and this rank cannot continue."""
        return self._fitting(
            lambda: self._train_step(examples, learning_rate, totals, version, supervised)
        )

    def forward_backward(
        self, examples: tuple[Example, ...], loss: TokenLoss
    ) -> tuple[float, Logprobs]:
        """Adds the gradient of the examples' loss, and returns the loss and the tokens' log-probs,
        at temperature 1. Raises as `train_step`, with the gradient unchanged."""
        return self._fitting(lambda: self._add_call(examples, loss))

    def optim_step(self, how: Optimization) -> float:
        """Takes an optimizer step by the gradient of the calls so far, and returns the gradient's
        norm before clipping; without a call it is 0 and Adam's means decay. Raises Failed if the
        gradient is not finite: then it is dropped, and weights and optimizer are unchanged."""
        self._fitting(self._restore_gradient)
        num_calls, progress = len(self.calls), Progress(passing="the optimizer step")
        try:
            with self._undone_on_failure(progress):
                self._close_accumulation()
                norm = self._step(how, progress)
        except NonFiniteLoss:
            self.calls = []
            raise Failed(
                f"the step was refused: the gradient of {num_calls} calls is not finite; it is "
                "dropped, and the weights are as they were",
                code="not_finite",
            ) from None
        self.calls = []
        return norm

    def swap_out(self) -> list[Call]:
        """Drops the gradient so far, and returns its calls, from which another Updater computes it
        again when it is needed."""
        if self.calls and not self._is_dropped:
            drop_gradients(self.zero)
        return self.calls

    def _fitting(self, act: Callable[[], R]) -> R:
        """Returns the result of `act`. After running out of memory it is called again, with
        gradient checkpointing if that was off under "auto", else with half as many tokens in a
        micro-batch."""
        while True:
            try:
                return act()
            except BatchOutOfMemory as too_large:
                get_logger().warning(
                    "out of memory: repeating with settings that need less",
                    before=self.job.memory.micro_batch_tokens,
                    micro_batch_tokens=too_large.budget.tokens,
                    gradient_checkpointing=too_large.budget.recomputes,
                    reason=too_large.error.detail,
                )
                self.job = too_large.budget.applied(self.job)
                self._set_recomputing(self.can_recompute)
                if self.device.type == "cpu":
                    host_memory.run_out()

    @torch.no_grad()
    def forward(self, examples: tuple[Example, ...]) -> tuple[Logprobs, Logprobs]:
        """Returns the log-probs of the examples' sampled tokens, on all ranks, by the policy and by
        the reference (empty without one)."""
        self.policy.temperature = self.job.temperature
        passes_of = {"policy": lambda batch: self.policy(batch)[0], "reference": self.reference}
        passes = [ask for ask in passes_of.values() if ask is not None]
        num_tokens = sum(map(num_sampled, examples))
        tokens_PN = torch.zeros((len(passes), num_tokens), device=self.device)
        for batch in self._planned_batches(examples, None, num_minibatches=1)[0].micro_batches:
            on_device = batch.to(self.device)
            for row, ask in enumerate(passes):
                logprobs_N = ask(on_device)
                if batch.weight:
                    tokens_PN[row, on_device.places_N] = logprobs_N.float()
        dist.all_reduce(tokens_PN)  # each token has its value on one rank, and 0 on the others
        rows = [Logprobs(row.tobytes()) for row in tokens_PN.cpu().numpy().astype("<f4")]
        return rows[0], rows[1] if len(rows) > 1 else Logprobs()

    def _planned_batches(
        self, examples: tuple[Example, ...], totals: StepTotals | None, num_minibatches: int
    ) -> list[Minibatch]:
        """Returns this rank's minibatches of a batch."""
        training = self.job.training.model_copy(update={"minibatches": num_minibatches})
        return plan(
            examples,
            totals,
            self.job.model_copy(update={"training": training}),
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            layout=self.layout,
        )

    def _set_recomputing(self, is_on: bool) -> None:
        """Turns gradient checkpointing on or off for the passes that follow. `_used` is the job
        with that decision."""
        if self.can_recompute:
            set_recomputing(self.policy.model, is_on)
        memory = self.job.memory.recomputing(is_on)
        self._used = self.job.model_copy(update={"memory": memory})

    def _fit(self, minibatches: list[Minibatch]) -> None:
        """Chooses how these minibatches use memory. If the job's gradient checkpointing is "auto",
        it is on only if the plan without it exceeds the memory of a rank. On a CPU, freed blocks
        are kept for the next pass unless memory might be short."""
        batches = (batch for minibatch in minibatches for batch in minibatch.micro_batches)
        tokens = max(batch.input_ids_BT.numel() for batch in batches)
        num_ranks = dist.get_world_size()
        if self.can_recompute and self.job.memory.gradient_checkpointing == "auto":
            self._set_recomputing(False)
            room = room_bytes(self.device, num_ranks, self._used)
            fits = self.planned and self.planned.peak_bytes(self._used, tokens) <= room
            # At ZeRO-3 all ranks gather the weights of the same layers together.
            least = torch.tensor(float(bool(fits)), device=self.device)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            self._set_recomputing(not least.item())
        if self.device.type != "cpu" or self.planned is None:
            return
        if is_worth_giving_back(
            self.planned.pass_bytes(self._used, tokens),
            self.planned.peak_bytes(self._used, tokens) * num_ranks,
            host_memory_bytes(),
            self._used,
        ):
            host_memory.give_back_large_blocks()
        else:
            host_memory.keep_freed_blocks()

    def _train_step(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None,
        version: int | None,
        supervised: bool,
    ) -> Update:
        training = self.job.training.supervised if supervised else self.job.training
        self.policy.temperature = 1.0 if supervised else self.job.temperature
        minibatches = self._planned_batches(examples, totals, training.minibatches)
        self._fit(minibatches)
        progress = Progress(num_updates=training.epochs * len(minibatches))
        num_tokens = sum(map(num_sampled, examples))
        metrics = StepMetrics(self.device, training, self._correction, version, num_tokens)
        how = zero_stages.optimization(self.job.training, learning_rate)
        norms: list[float] = []
        try:
            with self._undone_on_failure(progress):
                if progress.num_updates > 1:
                    progress.snapshot = Snapshot.take(self.zero, self.copies)
                minibatches, frozen = self._frozen_passes(
                    examples, minibatches, training, metrics, progress
                )
                for epoch in range(training.epochs):
                    for minibatch, known in zip(minibatches, frozen, strict=True):
                        progress.update += 1
                        self._add(
                            minibatch, training, metrics, progress, known, last=True, epoch=epoch
                        )
                        norms.append(self._step(how, progress))
        except NonFiniteLoss:
            loss, values = metrics.reduce(progress.update)
            if training.on_nonfinite == "skip":
                return Update(
                    loss if math.isfinite(loss) else 0.0, 0.0, values, num_updates=0, skipped=True
                )
            raise Failed(
                f"the step was refused: its gradient is not finite (loss {loss:g}, optimizer step "
                f"{progress.update} of {progress.num_updates}); the weights are as they were",
                code="not_finite",
            ) from None
        loss, values = metrics.reduce(training.epochs * training.minibatches)
        values["memory/micro_batch_tokens"] = float(self.job.memory.micro_batch_tokens)
        logprobs, entropies = metrics.of_tokens()
        return Update(
            loss,
            sum(norms) / len(norms),
            values,
            num_updates=len(norms),
            logprobs=logprobs,
            entropies=entropies,
        )

    def _add_call(self, examples: tuple[Example, ...], loss: TokenLoss) -> tuple[float, Logprobs]:
        self._restore_gradient()
        progress = Progress()
        call = Call(examples, loss, progress.random)
        try:
            with self._undone_on_failure(progress):
                metrics = self._add_gradient_of(call, progress)
                total, _ = metrics.reduce()
                if not math.isfinite(total):
                    raise NonFiniteLoss
        except NonFiniteLoss:
            raise Failed(
                f"the loss {loss.name!r} of {len(examples)} examples is {total:g}, expected a "
                "finite number; the gradient is as it was",
                code="not_finite",
            ) from None
        self.calls.append(call)
        return total, metrics.of_tokens()[0]

    def _restore_gradient(self) -> None:
        """Computes the gradient of the calls so far again, if it was dropped."""
        if not self._is_dropped:
            return
        progress = Progress()
        with self._undone_on_failure(progress):
            for call in self.calls:
                restore_random_state(call.random)
                self._add_gradient_of(call, progress)
        restore_random_state(progress.random)
        self._is_dropped = False

    def _add_gradient_of(self, call: Call, progress: Progress) -> StepMetrics:
        """Adds the gradient of a call, and returns the metrics of its tokens."""
        self.policy.temperature = 1.0
        num_tokens = sum(map(num_sampled, call.examples))
        metrics = StepMetrics(self.device, call.loss, OF_CALLS, num_tokens=num_tokens)
        (minibatch,) = self._planned_batches(call.examples, None, num_minibatches=1)
        self._fit([minibatch])
        self._add(minibatch, call.loss, metrics, progress, last=False)
        return metrics

    def _frozen_passes(
        self,
        examples: tuple[Example, ...],
        minibatches: list[Minibatch],
        training: TrainingSpec,
        metrics: StepMetrics,
        progress: Progress,
    ) -> tuple[list[Minibatch], list[list[FrozenLogprobs]]]:
        """Returns the minibatches, with "dpo" with the advantages that their pairs' margins give,
        and the results of frozen passes over each micro-batch."""
        reference = self.reference if training.has_reference else None
        prefers = training.objective == "dpo"
        has_ratio = training.objective == "rl"  # of the policy to the policy before the updates
        ask_policy = prefers or (has_ratio and (progress.num_updates > 1 or self.has_dropout))

        @torch.no_grad()
        def ask(batch: MicroBatch) -> FrozenLogprobs:
            if not ask_policy and reference is None:
                return FrozenLogprobs()
            progress.enter("the frozen pass over a micro-batch", batch)
            on_device = batch.to(self.device)
            before_N = self.policy(on_device)[0] if ask_policy else None
            if before_N is not None:
                metrics.add_mismatch(on_device, before_N)
            return FrozenLogprobs(before_N, reference(on_device) if reference else None)

        frozen = [[ask(batch) for batch in minibatch.micro_batches] for minibatch in minibatches]
        if prefers:
            (minibatch,), (known,) = minibatches, frozen
            of_batches = [
                (batch, of_batch.before_N, of_batch.reference_N)
                for batch, of_batch in zip(minibatch.micro_batches, known, strict=True)
            ]
            preferences = Preferences.of(examples, of_batches, training.dpo_beta, self.device)
            metrics.preferences = preferences
            micro_batches = tuple(map(preferences.applied, minibatch.micro_batches))
            minibatches = [dataclasses.replace(minibatch, micro_batches=micro_batches)]
        return minibatches, frozen

    def _add(
        self,
        minibatch: Minibatch,
        spec: Spec,
        metrics: StepMetrics,
        progress: Progress,
        frozen: list[FrozenLogprobs] | None = None,
        *,
        last: bool,
        epoch: int = 0,
    ) -> None:
        """Adds the gradient of a minibatch's loss: one forward and one backward pass for each
        micro-batch. `last`: an optimizer step is next. Without a frozen pass, the metrics of tokens
        come from epoch 0."""
        num = len(minibatch.micro_batches)
        try:
            set_dropout(self.policy, self.has_dropout)
            for position, (batch, known) in enumerate(
                zip(minibatch.micro_batches, frozen or [FrozenLogprobs()] * num, strict=True), 1
            ):
                which = f"micro-batch {position} of {num}" if last else "a micro-batch"
                progress.enter(which, batch)
                self.zero.set_gradient_accumulation_boundary(last and position == num)
                on_device = batch.to(self.device)
                logprobs_N, entropy_N = self.zero(on_device)
                x = loss_inputs(
                    on_device,
                    logprobs_N,
                    before_N=known.before_N,
                    first=progress.update == 1,
                    reference_N=known.reference_N if kl_weight(spec) else None,
                    correction=metrics.correction,
                    denominators=minibatch.denominators,
                    spec=spec,
                )
                loss = total_loss(x)
                share = batch.weight * dist.get_world_size()
                self.zero.backward(refusable(loss, logprobs_N) * share)
                metrics.add(on_device, x, entropy_N, loss.detach())
                if known.before_N is None and epoch == 0:
                    metrics.add_mismatch(on_device, logprobs_N.detach())
        finally:
            set_dropout(self.policy, False)

    def _close_accumulation(self) -> None:
        """Adds a gradient of 0, after which an optimizer step may follow."""
        self.zero.set_gradient_accumulation_boundary(True)
        logprobs_N, _ = self.zero(dummy(self.layout).to(self.device))
        self.zero.backward(0.0 * logprobs_N.sum())

    def _step(self, how: Optimization, progress: Progress) -> float:
        """Takes an optimizer step, and returns the gradient's norm before clipping. Raises
        NonFiniteLoss."""
        progress.stepping = True
        norm = zero_stages.step(self.zero, how)
        progress.stepping = False
        if norm is None:
            raise NonFiniteLoss
        return norm

    @contextmanager
    def _undone_on_failure(self, progress: Progress) -> Iterator[None]:
        """Restores the state before the block if the block raises NonFiniteLoss or runs out of
        memory, and drops the gradient of the calls. After running out of memory raises
        BatchOutOfMemory if half the tokens may fit, else Failed, or OutOfMemory if this rank cannot
        continue."""
        try:
            yield
        except NonFiniteLoss:
            self._undo(progress)
            raise
        except (MemoryError, RuntimeError) as error:
            raise self._out_of_memory(error, progress) from None

    def _undo(self, progress: Progress) -> None:
        """Restores the state before the update: with several ranks and a snapshot, a collective."""
        drop_gradients(self.zero)
        if progress.snapshot is not None:
            progress.snapshot.restore(self.zero)
        restore_random_state(progress.random)
        self._is_dropped = True

    def _out_of_memory(self, error: Exception, progress: Progress) -> Exception:
        """Returns an error that says what to do, after restoring the state if this rank can. Raises
        any error that is not an out-of-memory error unchanged."""
        if not is_out_of_memory(error):
            raise error
        there_is = usage(self.device)
        reason = first_line(error)
        traceback.clear_frames(error.__traceback__)  # the frames hold the activations
        num_ranks = dist.get_world_size()
        kept = num_ranks == 1 and (progress.snapshot is not None or not progress.stepping)
        if kept:
            self._undo(progress)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        job = self._used
        turn = knobs(
            job,
            num_ranks,
            progress.shape,
            self.planned,
            device=self.device.type,
            may_recompute=self.job.memory.gradient_checkpointing is False,
        )
        planned = f"{self.planned.sentence(job)}; " if self.planned else ""
        state = (
            "the weights and the optimizer are as they were"
            if kept
            else "this rank cannot continue from here"
        )
        sentence = (
            f"out of memory in {progress} ({reason}); {there_is}; {planned}{state}. Turn one "
            f"of: {turn}"
        )
        tokens = job.memory.micro_batch_tokens
        half, in_pass = progress.half(tokens), progress.shape and not progress.stepping
        budget = PassBudget(half, self.can_recompute) if half else None
        if in_pass and self.can_recompute and not job.memory.gradient_checkpointing:
            budget = PassBudget(tokens, recomputes=True)
        if not kept:
            return OutOfMemory(sentence, budget)
        failed = Failed(sentence, code="out_of_memory")
        return BatchOutOfMemory(failed, budget) if budget else failed


def refusable(loss: Tensor, logprobs_N: Tensor) -> Tensor:
    """Returns the loss, with a gradient that is NaN for all log-probs where the loss is not finite:
    clamping can hide a NaN from the gradient, and a step is refused by its gradient, on all ranks
    together. The value of the loss is not read here, because that would wait for the GPU."""
    return loss + logprobs_N.sum() * torch.where(loss.detach().isfinite(), 0.0, math.nan)
