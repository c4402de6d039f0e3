"""A step's scored batch: prompts, sampled and graded group by group, or what a crash left of it."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass

from services.orchestrator.loop.clock import Stopwatch
from services.orchestrator.loop.decisions import MustPause
from services.orchestrator.loop.groups import (
    GradedGroup,
    refill,
    to_batch,
    too_many_missing,
)
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.prompts import Prompts
from services.orchestrator.loop.seeds import group_seed
from services.orchestrator.loop.tasks import all_of
from services.orchestrator.record.folder import RunFolder
from shared.job import Job
from shared.wire import Batch, Prompt, RolloutGroup, Score

MAX_RESAMPLED = 2
"""How often a group is sampled again whose versions are out of bounds."""


@dataclass(frozen=True)
class Sampled:
    """A scored batch, and the seconds it took: none if it was stored. `num_resampled` groups were
    sampled more than once, for the staleness bound."""

    batch: Batch
    seconds: dict[str, float]
    num_resampled: int = 0


@dataclass
class _Round:
    """What is counted while a step is sampled."""

    watch: Stopwatch
    num_resampled: int = 0


@dataclass(frozen=True)
class Batches:
    job_id: str
    job: Job
    prompts: Prompts
    peers: Peers
    folder: RunFolder
    max_missing: float  # share of rewards, beyond which a batch is not trained on

    async def get(self, step: int) -> Sampled:
        """Returns the stored batch of the step if there is one, else a new one. Raises MustPause if
        too many rewards are missing; the rollouts are stored then, and graded again next time."""
        count = _Round(Stopwatch())
        stored = await asyncio.to_thread(self._stored, step)
        if stored and stored.graded:
            return Sampled(stored, {})
        batch = await self._graded(stored) if stored else await self._sample(step, count)
        count.watch.lap("reward")
        if reason := too_many_missing(batch, self.max_missing):
            ungraded = batch.model_copy(update={"graded": False})
            await asyncio.to_thread(self.folder.write_batch, ungraded)
            raise MustPause(reason)
        return Sampled(batch, count.watch.seconds, count.num_resampled)

    def _stored(self, step: int) -> Batch | None:
        return self.folder.batch(step) if step in self.folder.batch_steps() else None

    async def _graded(self, stored: Batch) -> Batch:
        scores_PG = await all_of(map(self._score, stored.prompts, stored.groups))
        return stored.model_copy(update={"scores": tuple(scores_PG), "graded": True})

    async def _sample(self, step: int, count: _Round) -> Batch:
        sample_round = functools.partial(self._sample_round, step, count)
        groups_P = await sample_round(0, self.job.sampling.prompts_per_step)
        kept, dropped = await refill(groups_P, self.job, self.max_missing, sample_round)
        return to_batch(step, kept, dropped)

    async def _sample_round(
        self, step: int, count: _Round, round: int, num_prompts: int
    ) -> list[GradedGroup]:
        """Returns graded groups of up to `num_prompts` prompts; each is graded as soon as it is
        sampled, while others still are."""

        async def sample_group(prompt: Prompt, position: int) -> GradedGroup:
            group = await self._in_bounds(prompt, step, f"{round}:{position}", count)
            count.watch.lap("generate")
            return GradedGroup(prompt, group, await self._score(prompt, group))

        prompts = self.prompts.for_step(step, round)[:num_prompts]
        return await all_of(
            sample_group(prompt, position) for position, prompt in enumerate(prompts)
        )

    async def _in_bounds(
        self, prompt: Prompt, step: int, position: str, count: _Round
    ) -> RolloutGroup:
        """Returns the prompt's group, sampled by weights at most `max_staleness` steps older than
        those that the step is taken from, and by none that come after. Keys carry the epoch: what
        was under way in an older one is never joined. Raises MustPause if the sampler answers with
        other versions again and again."""
        oldest, newest = max(step - 1 - self.job.max_staleness, 0), step - 1
        versions: set[int] = set()
        seed = group_seed(self.job, step, position, prompt.index)
        for again in range(MAX_RESAMPLED + 1):
            key = f"{self.peers.owner}:{step}:{position}:{again}"
            group = await self.peers.generate(prompt, oldest, key=key, seed=seed)
            versions = {version for rollout in group.rollouts for version in rollout.versions}
            if all(oldest <= version <= newest for version in versions):
                return group
            count.num_resampled += 1
        raise MustPause(
            f"step {step}: the sampler was asked for versions {oldest} to {newest} and sampled "
            f"with {sorted(versions)}, {MAX_RESAMPLED + 1} times"
        )

    async def _score(self, prompt: Prompt, group: RolloutGroup) -> tuple[Score, ...]:
        return await self.peers.score(prompt, group, job_id=self.job_id)
