"""GRPO in the order in which it happens. READ FIRST.

| stage         | type                  | shape        | done in                              |
|---------------|-----------------------|--------------|--------------------------------------|
| job           | Job                   |              | deploy/jobs/*.toml                   |
| prompts       | Prompt                | [P]          | prompts.py: a function of seed, step |
| rollouts      | RolloutGroup          | [P][G] x [T] | batches.py; services/rollout         |
| rewards       | Score; all: Batch     | [P][G]       | batches.py; services/reward/graders  |
| advantages    | Advantage             | [P][G]       | advantages.py; of turns: [P][G][K]   |
| examples      | Example, StepTotals   | <= P*G       | examples.py                          |
| micro-batches | tensors; loss         | [B, T]       | services/trainer/learning            |
| weights       | WeightsRef            | one version  | samplers/syncing.py                  |

Job is in shared/job, Advantage in advantages.py, the other types in shared/wire.

The synchronous loop and the overlapped one are the same code. While step k trains, the batches of
the next max_staleness steps are being sampled. So a batch trains weights that are at most
max_staleness steps newer than the weights that sampled it. A batch's sampling starts only once
weights new enough for it serve, so the overlap discards nothing. These completions are sampled but
not trained on: groups without signal that other groups replace, groups whose sampler had other
weights than requested, and the later of two answers where a slow group was requested from two
samplers.

The pipeline imports none of what it drives: a source of batches (`Batches` in batches.py), a
trainer (`TrainerClient` in samplers/clients.py), weight sync (samplers/syncing.py) and a run log
(`RunFolder` in store/folder.py). `Attempt._pipeline` in jobs/attempt.py composes them.

Around this: jobs/recovery.py loads the job, also after failures (jobs/decisions.py), and
jobs/after_step.py writes checkpoints, evaluates and records. groups.py replaces groups without
signal. samplers/pool.py decides which sampler each group waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.examples import (
    PlacedExample,
    placed_examples,
    step_totals,
    teacher_terms,
    trained_tokens,
)
from services.orchestrator.tasks import stop, write_despite_cancel
from shared.errors import HoneError
from shared.host import tracing
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import Batch, Example, StepResult, StepTotals, TrainedTokens


@dataclass(frozen=True)
class SampledBatch:
    """A scored batch, and the seconds of each stage that it went through. A `replayed` batch was on
    disk, graded. `num_resampled` counts extra samplings: of a group whose
    versions were outside the staleness bound. `span` is when sampling began and ended, and `trace`
    is the step's."""

    batch: Batch
    seconds: dict[str, float]
    replayed: bool = False
    num_resampled: int = 0
    span: tuple[float, float] | None = None
    trace: tracing.Trace = tracing.NONE


class BatchSource(Protocol):
    async def get(self, step: int) -> SampledBatch:
        """Returns the step's scored batch: a stored one, or one sampled now."""
        ...

    async def note(self, batch: Batch) -> None:
        """Remembers which problems of a stored batch taught nothing."""
        ...


class Trainer(Protocol):
    def train_step(
        self, step: int, examples: tuple[Example, ...], totals: StepTotals
    ) -> Awaitable[StepResult]: ...


class RunLog(Protocol):
    def write_batch(self, batch: Batch) -> None: ...

    def write_trained(self, tokens: TrainedTokens) -> None: ...


Sync = Callable[[int], Awaitable[float | None]]
"""Makes the samplers serve the weights of a step. Returns the mean absolute change of the canary's
log-probs per step since the last sync, in nats; None if it is not known."""


@dataclass(frozen=True)
class Step:
    """A finished step. `seconds` has the time of each stage. `staleness` is in steps, None if it is
    not known. `replayed` and `num_resampled` are as in `SampledBatch`. `serves`: the samplers serve
    its weights, as after every `sync_every` steps. `canary_change` is what `Sync` returned. `trace`
    has not ended."""

    batch: Batch
    result: StepResult
    staleness: int | None
    seconds: dict[str, float]
    replayed: bool
    num_resampled: int = 0
    serves: bool = True
    canary_change: float | None = None
    trace: tracing.Trace = tracing.NONE


@dataclass(frozen=True)
class Pipeline:
    job: Job
    batches: BatchSource
    trainer: Trainer
    sync: Sync
    log: RunLog

    async def steps(self, last_step: int) -> AsyncGenerator[Step]:
        """Yields each step after `last_step` once it is trained and, if its weights are synced,
        once the samplers serve them. The next step begins when the caller asks for it."""
        sampling: deque[asyncio.Task[SampledBatch]] = deque()
        next_step, served = last_step + 1, last_step
        sampled_before: tuple[float, float] | None = None
        try:
            for step in range(last_step + 1, self.job.steps + 1):
                watch = Stopwatch()
                while next_step <= self.job.steps and self._may_begin(next_step, step, served):
                    sampling.append(asyncio.create_task(self.batches.get(next_step)))
                    next_step += 1
                sampled = await sampling.popleft()
                watch.lap("wait_for_batch")
                watch.seconds["wait_for_trainer"] = gap_s(sampled_before, sampled.span)
                sampled_before = sampled.span
                with sampled.trace.within():
                    finished = await self._train(sampled, watch)
                served = step if finished.serves else served
                yield finished
        finally:
            await stop(*sampling)
            for ahead in sampling:
                if not ahead.cancelled() and not ahead.exception():
                    ahead.result().trace.end()

    def _may_begin(self, step: int, current: int, served: int) -> bool:
        """Whether sampling for `step` may begin together with step `current`. Nothing is sampled by
        weights from inside a warm-up."""
        if self.job.is_supervised(step):
            return step <= current
        return served >= self.job.warmup.steps and step <= served + 1 + self.job.max_staleness

    async def _train(self, sampled: SampledBatch, watch: Stopwatch) -> Step:
        batch = sampled.batch
        await write_despite_cancel(self.log.write_batch, batch)
        await self.batches.note(batch)
        advantages_PG = batch_advantages(batch, self.job)
        is_supervised = self.job.is_supervised(batch.step)
        terms = None if is_supervised else teacher_terms(batch, self.job)
        placed = placed_examples(batch.groups, advantages_PG, terms)
        examples = tuple(example for _, example in placed)
        totals = step_totals(batch, self.job)
        watch.lap("store")
        result = await self.trainer.train_step(batch.step, examples, totals)
        watch.lap("train")
        canary_change = None
        if serves := syncs_after(self.job, batch.step):
            canary_change = await self.sync(batch.step)
        watch.lap("sync")
        if result.logprobs:
            await asyncio.to_thread(self._store_trained_tokens, batch, placed, result)
        return Step(
            batch,
            result,
            staleness=None if batch.version is None else batch.step - 1 - batch.version,
            seconds=sampled.seconds | watch.seconds,
            replayed=sampled.replayed,
            num_resampled=sampled.num_resampled,
            serves=serves,
            canary_change=canary_change,
            trace=sampled.trace,
        )

    def _store_trained_tokens(
        self, batch: Batch, placed: Sequence[PlacedExample], result: StepResult
    ) -> None:
        """Stores the trainer's log-probs and entropies of the tokens. No run depends on them, so a
        failure is only logged: if the disk is at fault, the writes that a run needs fail too."""
        try:
            self.log.write_trained(trained_tokens(batch, placed, result))
        except (OSError, HoneError) as error:
            get_logger().warning(
                "the trainer's log-probs of a step were not stored",
                step=batch.step,
                reason=str(error),
            )


def syncs_after(job: Job, step: int) -> bool:
    """Returns whether the step's weights are synced to the samplers."""
    evaluates = job.evaluates and step % job.evaluation.every == 0
    samples_next = step % job.sync_every == 0 and not job.is_supervised(step + 1)
    return evaluates or samples_next or step in (job.steps, job.warmup.steps)


class Stopwatch:
    """`lap(name)` adds the seconds since the last lap, or the start, to `seconds[name]`."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def gap_s(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float:
    """Returns the seconds between the end of one span and the beginning of another, 0 if they
    overlap or one is missing."""
    return max(after[0] - before[1], 0.0) if before and after else 0.0
