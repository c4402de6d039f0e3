"""One batch, trained on: `epochs` passes over it in `minibatches` optimizer steps each, or nothing
at all.

    [examples] --deal--> minibatches --frozen passes--> old and reference log-probs
                                     --forward, loss, backward, step--> weights

Every micro-batch goes forward once and backward at once, so only one micro-batch's activations
exist at a time. DeepSpeed averages gradients over ranks, so each loss is multiplied by their
number; it divides by its own count of accumulation steps, which is set to 1, and
`set_gradient_accumulation_boundary` says which micro-batch is the last. The loss's denominators are
the whole optimizer step's. So any split into ranks and micro-batches gives the gradient of one big
batch.

Frozen passes, before the first optimizer step and without dropout, are made for what they alone can
tell: the trainer's log-probs before the first of several steps, or apart from dropout; and the
reference's. They have the same micro-batches as the passes that train, so that their bits are the
same: a reference that equals the policy has a KL of exactly 0. With one step and no dropout, the
pass that trains tells the former itself. The ratio of the first step is taken to the pass that
trains, dropout included, and is exactly 1.

All or nothing: where a loss or gradient is not finite, or memory runs out, weights, optimizer and
random numbers become what they were. After running out of memory in a micro-batch of several
sequences the update is made again with half as many tokens in each, and so from then on. One rank
of several that runs out of memory leaves the others waiting in a collective and cannot do so; it
says so and ends, and the ranks that come after it begin with half as many.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.engine import OutOfMemory, Update
from services.trainer.learning.batch import Layout, MicroBatch, Minibatch, plan
from services.trainer.learning.correction import loss_inputs, resolve
from services.trainer.learning.examples import num_sampled
from services.trainer.learning.loss import LossInputs, total_loss
from services.trainer.learning.metrics import StepMetrics
from services.trainer.learning.policy import Policy, Reference
from services.trainer.learning.preference import Preferences
from services.trainer.zero import host_memory
from services.trainer.zero import stages as zero_stages
from services.trainer.zero.host_memory import HostCopies
from services.trainer.zero.internals import Snapshot, Undo, random_state
from services.trainer.zero.lora import set_dropout
from services.trainer.zero.memory import (
    MemoryPlan,
    first_line,
    half_budget,
    is_out_of_memory,
    knobs,
    usage,
)
from shared.errors import Failed
from shared.host.logs import get_logger
from shared.job import Job, TrainingSpec
from shared.plan.gpus import host_memory_bytes
from shared.plan.memory import is_worth_giving_back
from shared.wire import Example, Logprobs, Optimization, StepTotals


@dataclass(frozen=True)
class FrozenLogprobs:
    """What is known of a micro-batch before the first optimizer step, `[N]`; None where nothing
    needs it."""

    before_N: Tensor | None = None
    reference_N: Tensor | None = None


@dataclass
class Progress:
    """Where an update is, for its errors. `stepping`: the optimizer is at work, and weights may be
    half changed. `shape`: sequences and tokens, padding included, of the present micro-batch."""

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
    """A micro-batch did not fit into memory, all is as it was, and half its tokens might fit."""

    def __init__(self, error: Failed, budget: int) -> None:
        super().__init__(error)
        self.error = error
        self.budget = budget


class NonFiniteLoss(Exception):
    """A loss or gradient is NaN or infinite, and the optimizer step was refused, on all ranks."""


@dataclass
class Updater:
    """Trains a job's policy that DeepSpeed's engine `zero` holds. Every method is called on all
    ranks together."""

    job: Job
    zero: Any
    policy: Policy
    reference: Reference | None
    copies: HostCopies
    layout: Layout
    device: torch.device
    planned: MemoryPlan | None = None

    def __post_init__(self) -> None:
        self._correction = resolve(self.job.correction, self.job.max_staleness)

    @property
    def has_dropout(self) -> bool:
        return self.job.lora is not None and self.job.lora.dropout > 0

    def update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None = None,
        version: int | None = None,
        *,
        supervised: bool = False,
    ) -> Update:
        """Returns what training the weights of `version` on `examples` did, of a batch that was
        sampled with `totals` (None: these examples are all of it). If `supervised`, the loss is the
        negative log-likelihood, at temperature 1 and without a KL term. Raises Failed if a loss or
        gradient is not finite or memory ran out, with all as it was; OutOfMemory if memory ran out
        and this rank cannot continue."""
        return self.fitting(
            lambda: self._update(examples, learning_rate, totals, version, supervised)
        )

    def fitting(self, act: Callable[[], R]) -> R:
        """Returns what `act` does, in micro-batches of half as many tokens where it did not fit."""
        while True:
            try:
                return act()
            except BatchOutOfMemory as too_large:
                get_logger().warning(
                    "out of memory: it is made again in smaller micro-batches",
                    before=self.job.memory.micro_batch_tokens,
                    micro_batch_tokens=too_large.budget,
                    reason=too_large.error.detail,
                )
                memory = {"micro_batch_tokens": too_large.budget}
                self.job = self.job.model_copy(
                    update={"memory": self.job.memory.model_copy(update=memory)}
                )

    @torch.no_grad()
    def forward(self, examples: tuple[Example, ...]) -> tuple[Logprobs, Logprobs]:
        """Returns the log-probs of the examples' sampled tokens, on all ranks, by the policy and by
        the reference (empty without one)."""
        self.policy.temperature = self.job.temperature
        asked = {"policy": lambda batch: self.policy(batch)[0], "reference": self.reference}
        passes = [ask for ask in asked.values() if ask is not None]
        num_tokens = sum(map(num_sampled, examples))
        tokens_PN = torch.zeros((len(passes), num_tokens), device=self.device)
        for batch in self.planned_batches(examples, None, num_minibatches=1)[0].micro_batches:
            on_device = batch.to(self.device)
            for row, ask in enumerate(passes):
                logprobs_N = ask(on_device)
                if batch.weight:
                    tokens_PN[row, on_device.places_N] = logprobs_N.float()
        dist.all_reduce(tokens_PN)  # each token is one rank's, and 0 elsewhere
        rows = [Logprobs(row.tobytes()) for row in tokens_PN.cpu().numpy().astype("<f4")]
        return rows[0], rows[1] if len(rows) > 1 else Logprobs()

    def planned_batches(
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

    def _update(
        self,
        examples: tuple[Example, ...],
        learning_rate: float,
        totals: StepTotals | None,
        version: int | None,
        supervised: bool,
    ) -> Update:
        training = self.job.training.supervised if supervised else self.job.training
        self.policy.temperature = 1.0 if supervised else self.job.temperature
        minibatches = self.planned_batches(examples, totals, training.minibatches)
        self._spare_host_memory(minibatches)
        progress = Progress(training.epochs * len(minibatches))
        num_tokens = sum(map(num_sampled, examples))
        metrics = StepMetrics(self.device, training, self._correction, version, num_tokens)
        how = zero_stages.optimization(self.job.training, learning_rate)
        undo = Undo(random_state())
        try:
            if progress.num_updates > 1:
                undo = dataclasses.replace(undo, snapshot=Snapshot.take(self.zero, self.copies))
            norms = self._train(examples, minibatches, metrics, progress, training, how)
        except NonFiniteLoss:
            undo.apply(self.zero)
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
        except (MemoryError, RuntimeError) as error:
            raise self.out_of_memory(error, undo, progress) from None
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

    def _spare_host_memory(self, minibatches: list[Minibatch]) -> None:
        """Has activations given back as soon as they are freed, where that is worth its time."""
        if self.device.type != "cpu" or self.planned is None:
            return
        batches = (batch for minibatch in minibatches for batch in minibatch.micro_batches)
        tokens = max(batch.input_ids_BT.numel() for batch in batches)
        if is_worth_giving_back(
            self.planned.pass_bytes(self.job, tokens),
            self.planned.peak_bytes(self.job, tokens) * dist.get_world_size(),
            host_memory_bytes(),
        ):
            host_memory.give_back_large_blocks()

    def _train(
        self,
        examples: tuple[Example, ...],
        minibatches: list[Minibatch],
        metrics: StepMetrics,
        progress: Progress,
        training: TrainingSpec,
        how: Optimization,
    ) -> list[float]:
        """Returns the gradient's norm of each optimizer step, before clipping. Raises
        NonFiniteLoss."""
        reference = self.reference if training.has_reference else None
        prefers = training.objective == "dpo"
        ask_policy = progress.num_updates > 1 or self.has_dropout or prefers
        frozen = [
            self._ask(minibatch, metrics, progress, ask_policy, reference)
            for minibatch in minibatches
        ]
        if prefers:
            minibatches = self._preferred(examples, minibatches, frozen, metrics)
        norms: list[float] = []
        try:
            set_dropout(self.policy, self.has_dropout)
            for _ in range(training.epochs):
                for minibatch, known in zip(minibatches, frozen, strict=True):
                    progress.update += 1
                    self._accumulate(minibatch, known, metrics, progress, training)
                    progress.stepping = True
                    norm = zero_stages.step(self.zero, how)
                    progress.stepping = False
                    if norm is None:
                        raise NonFiniteLoss
                    norms.append(norm)
        finally:
            set_dropout(self.policy, False)
        return norms

    def _preferred(
        self,
        examples: tuple[Example, ...],
        minibatches: list[Minibatch],
        frozen: list[list[FrozenLogprobs]],
        metrics: StepMetrics,
    ) -> list[Minibatch]:
        """Returns the minibatch with the advantages that its pairs' margins give."""
        (minibatch,), (known,) = minibatches, frozen
        of_batches = [
            (batch, of_batch.before_N, of_batch.reference_N)
            for batch, of_batch in zip(minibatch.micro_batches, known, strict=True)
        ]
        found = Preferences.of(examples, of_batches, self.job.training.dpo_beta, self.device)
        metrics.preferences = found
        micro_batches = tuple(found.applied(batch) for batch in minibatch.micro_batches)
        return [dataclasses.replace(minibatch, micro_batches=micro_batches)]

    def _ask(
        self,
        minibatch: Minibatch,
        metrics: StepMetrics,
        progress: Progress,
        ask_policy: bool,
        reference: Reference | None,
    ) -> list[FrozenLogprobs]:
        """Returns what frozen passes tell of each micro-batch."""
        known: list[FrozenLogprobs] = []
        for batch in minibatch.micro_batches:
            if not ask_policy and reference is None:
                known.append(FrozenLogprobs())
                continue
            progress.enter("the frozen pass over a micro-batch", batch)
            on_device = batch.to(self.device)
            with torch.no_grad():
                before_N = self.policy(on_device)[0] if ask_policy else None
            if before_N is not None:
                metrics.add_mismatch(on_device, before_N)
            known.append(FrozenLogprobs(before_N, reference(on_device) if reference else None))
        return known

    def _accumulate(
        self,
        minibatch: Minibatch,
        known: list[FrozenLogprobs],
        metrics: StepMetrics,
        progress: Progress,
        training: TrainingSpec,
    ) -> None:
        """Adds up the gradient of an optimizer step: one forward and one backward pass for each
        micro-batch."""
        num = len(minibatch.micro_batches)
        for position, (batch, frozen) in enumerate(
            zip(minibatch.micro_batches, known, strict=True), start=1
        ):
            progress.enter(f"micro-batch {position} of {num}", batch)
            inputs = partial(
                loss_inputs,
                before_N=frozen.before_N,
                first=progress.update == 1,
                reference_N=frozen.reference_N if training.beta else None,
                correction=self._correction,
                denominators=minibatch.denominators,
                spec=training,
            )
            on_device, x, entropy_N, loss = self.backward(batch, inputs, last=position == num)
            metrics.add(on_device, x, entropy_N, loss)
            if frozen.before_N is None:
                metrics.add_mismatch(on_device, x.logprobs_N.detach())

    def backward(
        self,
        batch: MicroBatch,
        inputs: Callable[[MicroBatch, Tensor], LossInputs],
        *,
        last: bool,
    ) -> tuple[MicroBatch, LossInputs, Tensor, Tensor]:
        """Adds the gradient of a micro-batch, whose loss is of `inputs` of its log-probs; `last`:
        an optimizer step is next. Returns the micro-batch on the device, its inputs, its tokens'
        entropies `[N]` and its loss."""
        self.zero.set_gradient_accumulation_boundary(last)
        on_device = batch.to(self.device)
        logprobs_N, entropy_N = self.zero(on_device)
        x = inputs(on_device, logprobs_N)
        loss = total_loss(x)
        self.zero.backward(refusable(loss, logprobs_N) * (batch.weight * dist.get_world_size()))
        return on_device, x, entropy_N, loss.detach()

    def out_of_memory(self, error: Exception, undo: Undo, progress: Progress) -> Exception:
        """Returns the error that says what to do, after making all as it was if this rank can.
        Raises another error than one of memory as it is."""
        if not is_out_of_memory(error):
            raise error
        there_is = usage(self.device)
        said = first_line(error)
        traceback.clear_frames(error.__traceback__)  # they hold the activations
        num_ranks = dist.get_world_size()
        kept = num_ranks == 1 and (undo.snapshot is not None or not progress.stepping)
        if kept:
            undo.apply(self.zero)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        turn = knobs(self.job, num_ranks, progress.shape, self.planned, device=self.device.type)
        planned = f"{self.planned.sentence(self.job)}; " if self.planned else ""
        state = (
            "the weights and the optimizer are as they were"
            if kept
            else "this rank cannot continue from here"
        )
        sentence = (
            f"out of memory in {progress} ({said}); {there_is}; {planned}{state}. Turn one "
            f"of: {turn}"
        )
        half = progress.half(self.job.memory.micro_batch_tokens)
        if not kept:
            return OutOfMemory(sentence, half)
        failed = Failed(sentence, code="out_of_memory")
        return BatchOutOfMemory(failed, half) if half else failed


def refusable(loss: Tensor, logprobs_N: Tensor) -> Tensor:
    """Returns the loss, with a gradient that is NaN for all log-probs where the loss is not finite:
    clamping can hide a NaN from the gradient, and a step is refused by its gradient, on all ranks
    together. No one asks for the loss's value here: that would wait for the GPU."""
    return loss + logprobs_N.sum() * torch.where(loss.detach().isfinite(), 0.0, math.nan)
