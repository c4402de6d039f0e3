"""GRPO in the order in which it happens. READ FIRST.

| stage        | type (shared/wire.py)  | shape          | done in                                    |
|--------------|------------------------|----------------|--------------------------------------------|
| job          | Job                    |                | deploy/jobs/*.toml                         |
| prompts      | Prompt                 | [P]            | prompts.py: a pure function of (seed, step)|
| rollouts     | RolloutGroup           | [P][G] x [T]   | services/rollout/engine.py                 |
| rewards      | Score                  | [P][G]         | services/reward/graders                    |
| advantages   | float or None          | [P][G]         | advantages.py                              |
| examples     | Example                | <= P*G         | examples.py                                |
| batch, loss  | tensors                | [B, T]         | services/trainer/batch.py, loss.py         |
| weights      | WeightsRef             | one version    | services/trainer/weights.py -> rollout     |

The synchronous loop and the overlapped one are the same code: while step k trains, the batches of steps k to
k + max_staleness are being sampled, so a batch is trained on by weights at most max_staleness steps newer than those that
sampled it. The next one starts only once the weights of step k serve: nothing sampled is ever thrown away.

Left out, and done around this file in run.py: telemetry, evaluation, checkpoints, resuming, cancelling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.orchestrator.advantages import Advantages, group_advantages
from services.orchestrator.clock import Stopwatch
from services.orchestrator.examples import to_examples
from services.orchestrator.folder import RunFolder
from services.orchestrator.peers import Peers
from services.orchestrator.prompts import Prompts
from services.orchestrator.tasks import stop
from shared.errors import Failed
from shared.job import Job
from shared.wire import Batch, Prompt, RolloutGroup, Score, ServingWeights, StepResult


@dataclass(frozen=True)
class Step:
    """A finished step: its weights serve. `seconds` says where the time went; `staleness` is in steps."""

    batch: Batch
    advantages_PG: Advantages
    result: StepResult
    staleness: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Pipeline:
    job_id: str
    job: Job
    prompts: Prompts
    peers: Peers
    folder: RunFolder

    async def steps(self, last_step: int) -> AsyncGenerator[Step]:
        """Yields each step after `last_step` once the weights it made serve. The next one waits until it is asked for."""
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
        """Returns the step's scored batch: the stored one if a crash came after it, else a new one. A group is graded as soon as
        it is sampled, while others still are."""
        watch = Stopwatch()
        if step in self.folder.batch_steps():
            return await asyncio.to_thread(self.folder.batch, step), {}
        prompts_P = self.prompts.for_step(step)
        min_version = max(step - 1 - self.job.max_staleness, 0)

        async def sample_group(prompt: Prompt, position: int) -> tuple[RolloutGroup, tuple[Score, ...]]:
            group = await self.peers.generate(prompt, min_version, key=f"{self.job_id}:{step}:{position}")
            watch.lap("generate")
            return group, await self.peers.score(prompt, group)

        tasks = [asyncio.create_task(sample_group(prompt, position)) for position, prompt in enumerate(prompts_P)]
        try:
            graded_P = await asyncio.gather(*tasks)
        finally:
            await stop(*tasks)
        watch.lap("reward")
        groups_P = tuple(group for group, _ in graded_P)
        versions = [version for group in groups_P for rollout in group.rollouts for version in rollout.versions]
        if not versions:
            raise Failed(f"step {step}: no rollout says which weights sampled it; all of them failed, or the sampler serves none")
        scores_PG = tuple(scores for _, scores in graded_P)
        return Batch(step=step, version=min(versions), prompts=prompts_P, groups=groups_P, scores=scores_PG), watch.seconds

    async def sync_weights(self, version: int) -> ServingWeights:
        """Makes the sampler serve the trainer's `version`; raises Failed unless it answers with that version and its digest."""
        published = await self.peers.publish_weights(self.job_id, version, self.job.weight_sync)
        serving = await self.peers.reload_weights(published)
        if (serving.version, serving.digest) != (version, published.digest):
            raise Failed(
                f"weight sync: the trainer published version {version} with digest {published.digest[:12]}, but the sampler "
                f"serves version {serving.version} with digest {str(serving.digest)[:12]}"
            )
        return serving

    async def _train(self, batch: Batch, watch: Stopwatch, seconds: dict[str, float]) -> Step:
        await asyncio.to_thread(self.folder.write_batch, batch)
        rewards_PG = [[score.value for score in scores] for scores in batch.scores]
        advantages_PG = group_advantages(rewards_PG, self.job.advantages.std)
        examples = to_examples(batch.groups, advantages_PG)
        watch.lap("store")
        result = await self.peers.train_step(self.job_id, batch.step, examples)
        watch.lap("train")
        await self.sync_weights(batch.step)
        watch.lap("sync")
        return Step(batch, advantages_PG, result, batch.step - 1 - batch.version, seconds | watch.seconds)
