"""GRPO in the order in which it happens. READ FIRST.

| stage        | type (shared/wire.py)  | shape          | done in                                    |
|--------------|------------------------|----------------|--------------------------------------------|
| job          | Job                    |                | deploy/jobs/*.toml                         |
| prompts      | Prompt                 | [P]            | prompts.py: a pure function of (seed, step)|
| rollouts     | RolloutGroup           | [P][G] x [T]   | services/rollout/engine.py                 |
| rewards      | Score                  | [P][G]         | services/reward/graders                    |
| advantages   | float or None          | [P][G]         | advantages.py                              |
| examples     | Example                | <= P*G         | examples.py                                |
| batch, loss  | tensors                | [B, T]         | services/trainer/learning/batch.py, loss.py         |
| weights      | WeightsRef             | one version    | services/trainer/disk/weights.py -> rollout     |

The synchronous loop and the overlapped one are the same code: while step k trains, the batches of
steps k to k + max_staleness are being sampled, so a batch is trained on by weights at most
max_staleness steps newer than those that sampled it. The next one starts only once the weights of
step k serve: nothing sampled is ever thrown away.

Left out: replacing groups without signal (groups.py); and done around this file, in run.py:
telemetry, evaluation, checkpoints, resuming, pausing, cancelling.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.orchestrator.loop.advantages import Advantages, batch_advantages
from services.orchestrator.loop.clock import Stopwatch
from services.orchestrator.loop.examples import step_totals, to_examples
from services.orchestrator.loop.groups import (
    GradedGroup,
    MustPause,
    refill,
    to_batch,
    too_many_missing,
)
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.prompts import Prompts
from services.orchestrator.loop.tasks import all_of, stop
from services.orchestrator.record.folder import RunFolder
from shared.errors import Failed
from shared.job import Job
from shared.wire import Batch, Prompt, RolloutGroup, Score, ServingWeights, StepResult


@dataclass(frozen=True)
class Step:
    """A finished step: its weights serve. `seconds` says where the time went; `staleness` is in
    steps; a `replayed` batch was stored and not sampled."""

    batch: Batch
    advantages_PG: Advantages
    result: StepResult
    staleness: int
    seconds: dict[str, float]
    replayed: bool


@dataclass(frozen=True)
class Pipeline:
    job_id: str
    job: Job
    prompts: Prompts
    peers: Peers
    folder: RunFolder
    max_missing: float  # share of rewards, beyond which a batch is not trained on

    async def steps(self, last_step: int) -> AsyncGenerator[Step]:
        """Yields each step after `last_step` once the weights it made serve. The next one waits
        until it is asked for."""
        sampling: deque[asyncio.Task[tuple[Batch, dict[str, float]]]] = deque()
        next_step = last_step + 1
        try:
            for step in range(last_step + 1, self.job.steps + 1):
                watch = Stopwatch()
                while next_step <= min(step + self.job.max_staleness, self.job.steps):
                    sampling.append(asyncio.create_task(self.sample(next_step)))
                    next_step += 1
                batch, seconds = await sampling.popleft()
                watch.lap("wait_for_batch")
                yield await self._train(batch, watch, seconds)
        finally:
            await stop(*sampling)

    async def sample(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Returns the step's scored batch and the seconds that took: the stored one (no seconds) if
        a crash came after it, else a new one. Raises MustPause if too many rewards are missing; the
        rollouts are stored, and graded again next time."""
        watch = Stopwatch()
        stored = (
            await asyncio.to_thread(self.folder.batch, step)
            if step in self.folder.batch_steps()
            else None
        )
        if stored and stored.graded:
            return stored, {}
        if stored:
            scores_PG = await all_of(map(self._score, stored.prompts, stored.groups))
            batch = stored.model_copy(update={"scores": tuple(scores_PG), "graded": True})
        else:
            sample_round = functools.partial(self._sample_round, step, watch)
            groups_P = await sample_round(0, self.job.sampling.prompts_per_step)
            batch = to_batch(
                step, *await refill(groups_P, self.job, self.max_missing, sample_round)
            )
        watch.lap("reward")
        if reason := too_many_missing(batch, self.max_missing):
            await asyncio.to_thread(
                self.folder.write_batch, batch.model_copy(update={"graded": False})
            )
            raise MustPause(reason)
        return batch, watch.seconds

    async def _sample_round(
        self, step: int, watch: Stopwatch, round: int, count: int
    ) -> list[GradedGroup]:
        """Returns graded groups of up to `count` prompts; each is graded as soon as it is sampled,
        while others still are."""
        min_version = max(step - 1 - self.job.max_staleness, 0)

        async def sample_group(prompt: Prompt, position: int) -> GradedGroup:
            group = await self.peers.generate(
                prompt, min_version, key=f"{self.peers.life}:{step}:{round}:{position}"
            )
            watch.lap("generate")
            return GradedGroup(prompt, group, await self._score(prompt, group))

        prompts = self.prompts.for_step(step, round)[:count]
        return await all_of(
            sample_group(prompt, position) for position, prompt in enumerate(prompts)
        )

    async def _score(self, prompt: Prompt, group: RolloutGroup) -> tuple[Score, ...]:
        return await self.peers.score(prompt, group, job_id=self.job_id)

    async def _train(self, batch: Batch, watch: Stopwatch, seconds: dict[str, float]) -> Step:
        await asyncio.to_thread(self.folder.write_batch, batch)
        advantages_PG = batch_advantages(batch, self.job)
        examples = to_examples(batch.groups, advantages_PG)
        watch.lap("store")
        totals = step_totals(batch, self.job)
        result = await self.peers.train_step(batch.step, examples, totals)
        watch.lap("train")
        await sync_weights(self.peers, self.job, batch.step)
        watch.lap("sync")
        return Step(
            batch,
            advantages_PG,
            result,
            batch.step - 1 - batch.version,
            seconds | watch.seconds,
            not seconds,
        )


async def sync_weights(peers: Peers, job: Job, version: int) -> ServingWeights:
    """Makes the sampler serve the trainer's `version`; raises Failed unless it answers with that
    version and its digest."""
    published = await peers.publish_weights(version, job.weight_sync)
    serving = await peers.reload_weights(published)
    digest = published.root.digest
    if (serving.version, serving.digest) != (version, digest):
        raise Failed(
            f"weight sync: the trainer published version {version} with digest {digest[:12]}, but "
            f"the sampler serves version {serving.version} with digest {str(serving.digest)[:12]}"
        )
    return serving
