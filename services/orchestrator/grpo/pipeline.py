"""GRPO in the order in which it happens. READ FIRST.

| stage        | type (shared/wire/)   | shape        | done in                              |
|--------------|-----------------------|--------------|--------------------------------------|
| job          | Job                   |              | deploy/jobs/*.toml                   |
| prompts      | Prompt                | [P]          | prompts.py: a function of seed, step |
| rollouts     | RolloutGroup          | [P][G] x [T] | batches.py; services/rollout         |
| rewards      | Score                 | [P][G]       | batches.py; services/reward/graders  |
| advantages   | Advantage             | [P][G]       | advantages.py; of turns: [P][G][K]   |
| examples     | Example, StepTotals   | <= P*G       | examples.py                          |
| batch, loss  | tensors               | [B, T]       | services/trainer/learning            |
| weights      | WeightsRef            | one version  | samplers/syncing.py; trainer/disk        |

The synchronous loop and the overlapped one are the same code. While step k trains, the batches of
the next max_staleness steps are being sampled. So a batch trains weights that are at most
max_staleness steps newer than the weights that sampled it. A batch's sampling starts only once
weights new enough for it serve, so the overlap discards nothing. Sampled and not trained on are
groups without signal, groups whose sampler had other weights than asked for, and the later of two
answers where a slow group was asked of two samplers.

The pipeline imports none of what it drives: a source of batches (`Batches` in batches.py), a
trainer (`TrainerClient` in samplers/clients.py), weight sync (samplers/syncing.py) and a run log
(`RunFolder` in store/folder.py). `Attempt._pipeline` in jobs/attempt.py composes them.

Around this: jobs/recovery.py loads the job, also after failures (jobs/decisions.py), and
jobs/after_step.py records, evaluates and writes checkpoints. groups.py replaces groups without
signal. samplers/pool.py decides which sampler each group waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.orchestrator.grpo.advantages import Advantages, batch_advantages
from services.orchestrator.grpo.examples import (
    Placed,
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
    """A scored batch, and its seconds by stage: none if it was stored. `num_resampled` groups were
    sampled more than once, for the staleness bound. `span` is when sampling began and ended, and
    `trace` is the step's."""

    batch: Batch
    seconds: dict[str, float]
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
"""Makes the samplers serve the weights of a step. Returns how far the step moved the canary, in
nats, if known."""


@dataclass(frozen=True)
class Step:
    """A finished step. `seconds` has the time of each stage; `staleness` is in steps, None if
    unknown; a `replayed` batch was stored and not sampled; `num_resampled` groups were sampled more
    than once; `serves`: its weights serve, as after every `sync_every` steps; `moved` is how far a
    step moved the canary, in nats, if known; `trace` has not ended."""

    batch: Batch
    advantages_PG: Advantages
    result: StepResult
    staleness: int | None
    seconds: dict[str, float]
    replayed: bool
    num_resampled: int = 0
    serves: bool = True
    moved: float | None = None
    trace: tracing.Trace = tracing.NONE


@dataclass(frozen=True)
class Pipeline:
    job: Job
    batches: BatchSource
    trainer: Trainer
    sync: Sync
    log: RunLog

    async def steps(self, last_step: int) -> AsyncGenerator[Step]:
        """Yields each step after `last_step` once its weights serve, if they are synced. The next
        step begins when it is asked for."""
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
        """Whether the batch of `step` may be got while step `current` begins. Weights of a warm-up
        sample nothing before it is over."""
        if self.job.is_supervised(step):
            return step <= current
        return served >= self.job.warmup.steps and step <= served + 1 + self.job.max_staleness

    async def _train(self, sampled: SampledBatch, watch: Stopwatch) -> Step:
        batch = sampled.batch
        await write_despite_cancel(self.log.write_batch, batch)
        await self.batches.note(batch)
        advantages_PG = batch_advantages(batch, self.job)
        given = self.job.is_supervised(batch.step)
        terms = None if given else teacher_terms(batch, self.job)
        placed = placed_examples(batch.groups, advantages_PG, terms)
        examples = tuple(example for _, example in placed)
        totals = step_totals(batch, self.job)
        watch.lap("store")
        result = await self.trainer.train_step(batch.step, examples, totals)
        watch.lap("train")
        moved = None
        if serves := syncs_after(self.job, batch.step):
            moved = await self.sync(batch.step)
        watch.lap("sync")
        if result.logprobs:
            await asyncio.to_thread(self._keep_tokens, batch, placed, result)
        return Step(
            batch,
            advantages_PG,
            result,
            staleness=None if batch.version is None else batch.step - 1 - batch.version,
            seconds=sampled.seconds | watch.seconds,
            replayed=not sampled.seconds,
            num_resampled=sampled.num_resampled,
            serves=serves,
            moved=moved,
            trace=sampled.trace,
        )

    def _keep_tokens(self, batch: Batch, placed: Sequence[Placed], result: StepResult) -> None:
        """Stores what the trainer said of the tokens. No run depends on it: where the disk refuses,
        the writes that a run needs say so."""
        try:
            self.log.write_trained(trained_tokens(batch, placed, result))
        except (OSError, HoneError) as error:
            get_logger().warning("no tokens were kept", step=batch.step, reason=str(error))


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
