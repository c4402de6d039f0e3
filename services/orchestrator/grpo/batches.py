"""A step's scored batch: sampled and graded group by group, or read from disk after a crash.

Each group is on disk as soon as it is finished, and is not sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.grpo.examples import with_teacher_of
from services.orchestrator.grpo.groups import (
    environment_failed,
    missing_share,
    refill,
    sample_group,
    to_batch,
    too_many_missing,
    verdicts_of,
)
from services.orchestrator.grpo.pipeline import SampledBatch
from services.orchestrator.grpo.prompts import Prompts, group_seed
from services.orchestrator.grpo.supervised import sampling_prompts, sft_groups
from services.orchestrator.samplers.services import Services
from services.orchestrator.seams import GroupSource, Round
from services.orchestrator.store.finished import FinishedGroup, Place, digest_of
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.tasks import finish_despite_cancel, gather_all, write_despite_cancel
from shared.host import tracing
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import Batch, Prompt, RolloutGroup, Score, ScoredGroup

MAX_RESAMPLED = 2
"""How often a group with versions out of bounds is sampled again."""


SampleRound = Callable[[int, int], Awaitable[list[ScoredGroup]]]
"""Returns graded groups of a round, up to so many."""


@dataclass
class _Count:
    """Counts of one step while it is sampled: extra samplings, and groups that were on disk."""

    stages: Stages
    num_resampled: int = 0
    num_found: int = 0


@dataclass(frozen=True)
class _OnDisk:
    """A step's groups on disk: the groups that were `found` when its sampling began, and a writer
    for new ones."""

    found: dict[Place, FinishedGroup]
    writer: GroupWriter


@dataclass(frozen=True)
class Batches:
    job_id: str
    job: Job
    prompts: Prompts
    services: Services
    folder: RunFolder
    warn: Callable[[str], Awaitable[None]]
    pushed: GroupSource | None = None  # of a job whose groups come from elsewhere

    @functools.cached_property
    def _settings_digest(self) -> str:
        """Computed once, because the job may contain its rows and be large."""
        return digest_of(self.job)

    async def get(self, step: int) -> SampledBatch:
        """Returns the step's stored batch, or a new one. Raises OperatorActionNeeded if too many
        rewards are missing; the rollouts are then stored, and the next call grades them again."""
        trace = tracing.begin("step", job=self.job_id, step=step)
        turn = self.pushed.turn if self.pushed else contextlib.nullcontext()
        with trace.within(), tracing.span("sample"):
            async with turn:
                return replace(await self._get(step), trace=trace)

    async def _get(self, step: int) -> SampledBatch:
        count = _Count(Stages("generate", "reward", "keep"))
        steps = await asyncio.to_thread(self.folder.batch_steps)
        stored = await asyncio.to_thread(self.folder.batch, step) if step in steps else None
        if stored and stored.graded:
            return SampledBatch(stored, {}, replayed=True)
        batch = await self._graded(stored, count) if stored else await self._sample(step, count)
        if count.num_found:
            get_logger().info(
                "groups found on disk", job=self.job_id, step=step, groups=count.num_found
            )
        if reason := too_many_missing(batch):
            ungraded = batch.model_copy(update={"graded": False})
            await write_despite_cancel(self.folder.write_batch, ungraded)
            raise OperatorActionNeeded(reason)
        return SampledBatch(
            batch,
            count.stages.seconds,
            num_resampled=count.num_resampled,
            span=count.stages.span,
        )

    async def note(self, batch: Batch) -> None:
        """Records the verdicts on the problems of a stored batch, if the job skips problems by
        them."""
        if not self.job.difficulty.skips:
            return
        verdicts = verdicts_of(batch, self.job)
        if self.prompts.history.note(batch.step, verdicts):
            await write_despite_cancel(self.folder.append_verdicts, batch.step, verdicts)

    async def _graded(self, stored: Batch, count: _Count) -> Batch:
        scores_PG = await gather_all(map(self._score, stored.prompts, stored.groups, stored.scores))
        count.stages.through("reward")
        return stored.model_copy(update={"scores": tuple(scores_PG), "graded": True})

    async def _sample(self, step: int, count: _Count) -> Batch:
        if self.job.is_supervised(step):
            groups_P = await sft_groups(self.services, self.job, self.prompts, step)
            count.stages.through("generate")
            return to_batch(step, groups_P, dated=False)
        if self.pushed:
            return await self._refilled(step, functools.partial(self._take_round, step, count))
        stored, damaged = await write_despite_cancel(self.folder.groups, step)
        for sentence in damaged:
            await self.warn(f"step {step}: {sentence}; its groups are sampled again")
        writer = GroupWriter(functools.partial(self.folder.write_groups, step))
        on_disk = _OnDisk(stored, writer)
        return await self._refilled(
            step, functools.partial(self._sample_round, step, count, on_disk)
        )

    async def _refilled(self, step: int, sample_round: SampleRound) -> Batch:
        groups_P = await sample_round(0, self.job.sampling.prompts_per_step)
        kept, dropped = await refill(groups_P, self.job, sample_round)
        return to_batch(step, kept, dropped, dated=not self.pushed)

    async def _take_round(
        self, step: int, count: _Count, round: int, num_groups: int
    ) -> list[ScoredGroup]:
        """Returns the next groups that were sampled and scored elsewhere."""
        assert self.pushed is not None
        taken = await self.pushed.take(Round(step, round, num_groups, *self._bounds(step)))
        count.stages.through("generate")
        return taken

    async def _sample_round(
        self, step: int, count: _Count, on_disk: _OnDisk, round: int, num_prompts: int
    ) -> list[ScoredGroup]:
        """Returns graded groups of up to `num_prompts` prompts. Each group is graded as soon as it
        is sampled, while others are still being sampled."""

        async def graded_group(prompt: Prompt, position: int) -> ScoredGroup:
            place = (round, position)
            if stored := await self._reusable(on_disk.found.get(place), step, prompt):
                count.num_found += 1
                return stored
            group = await self._in_bounds(prompt, step, f"{round}:{position}", count)
            count.stages.through("generate")
            scores = await self._score(prompt, group)
            graded = ScoredGroup(prompt=prompt, group=group, scores=scores)
            count.stages.through("reward")
            await self._keep(on_disk.writer, place, graded)
            count.stages.through("keep")
            return graded

        step_prompts = await asyncio.to_thread(self.prompts.for_step, step, round)
        prompts = sampling_prompts(step_prompts, self.job)
        return await gather_all(
            graded_group(prompt, position) for position, prompt in enumerate(prompts[:num_prompts])
        )

    async def _reusable(
        self, stored: FinishedGroup | None, step: int, prompt: Prompt
    ) -> ScoredGroup | None:
        """Returns the `stored` group if it may be trained on: it has this prompt, this job's
        settings, and is within the staleness bound. A group with missing rewards is graded
        again."""
        if not stored or not stored.is_of(self._settings_digest, prompt):
            return None
        oldest, newest = self._bounds(step)
        if not all(oldest <= version <= newest for version in stored.versions):
            return None
        if not missing_share([stored.scores]):
            return stored
        scores = await self._score(prompt, stored.group, stored.scores)
        return stored.model_copy(update={"scores": scores})

    async def _keep(self, writer: GroupWriter, place: Place, graded: ScoredGroup) -> None:
        """Stores the group, unless all of its rollouts went wrong, or an environment failed: such
        a group is sampled again."""
        group = FinishedGroup(learned=self._settings_digest, **dict(graded))
        if group.versions and group.has_samples and not environment_failed(group.group):
            await writer.add(place, group)

    def _bounds(self, step: int) -> tuple[int, int]:
        """Returns the oldest and the newest version that may sample for the step: no version from
        inside the warm-up, whose steps are supervised."""
        oldest = max(step - 1 - self.job.max_staleness, self.job.warmup.steps)
        return oldest, step - 1

    async def _in_bounds(
        self, prompt: Prompt, step: int, position: str, count: _Count
    ) -> RolloutGroup:
        """Returns the prompt's group, sampled by the weights that the step updates or by weights at
        most `max_staleness` steps older. The key of the request contains the epoch, so it never
        joins a request of an older epoch. Raises OperatorActionNeeded if the sampler repeatedly
        answers with other versions."""
        oldest, newest = self._bounds(step)
        versions: set[int] = set()
        seed = group_seed(self.job, step, position, prompt.index)
        for again in range(MAX_RESAMPLED + 1):
            key = f"{self.services.caller.owner}:{step}:{position}:{again}"
            group = await sample_group(self.services, self.job, prompt, oldest, key=key, seed=seed)
            versions = {version for rollout in group.rollouts for version in rollout.versions}
            if all(oldest <= version <= newest for version in versions):
                return group
            count.num_resampled += 1
        raise OperatorActionNeeded(
            f"step {step}: the sampler was asked for versions {oldest} to {newest} and sampled "
            f"with {sorted(versions)}, {MAX_RESAMPLED + 1} times; make sure that nothing else "
            "loads weights into it, and start it again"
        )

    async def _score(
        self, prompt: Prompt, group: RolloutGroup, before: Sequence[Score] = ()
    ) -> tuple[Score, ...]:
        """Returns the group's scores. The teacher's log-probs in the scores `before` are reused."""
        scores = await self.services.reward.score(prompt, group, job_id=self.job_id)
        if (teacher := self.services.teacher) is None:
            return scores
        scores = with_teacher_of(before, scores)
        what = "asking the teacher"
        with self.services.status.on("teacher", what), tracing.span(what):
            return await teacher.score(group, scores, alone=not self.job.rewards)


class GroupWriter:
    """Writes the groups of one step. Groups that come during a write are gathered for the next.
    `write` runs in a thread, one call at a time."""

    def __init__(self, write: Callable[[Mapping[Place, FinishedGroup]], None]) -> None:
        self._write = write
        self._writing = asyncio.Lock()
        self._waiting: dict[Place, FinishedGroup] = {}

    async def add(self, place: Place, group: FinishedGroup) -> None:
        """Returns once the group is on disk, also if it is cancelled meanwhile, so that a worker
        that is asked to end loses no sampled group."""
        self._waiting[place] = group
        await finish_despite_cancel(self._written(place))

    async def _written(self, place: Place) -> None:
        async with self._writing:
            if place not in self._waiting:  # the group was written together with another one
                return
            groups, self._waiting = self._waiting, {}
            try:
                await asyncio.to_thread(self._write, groups)
            except BaseException:  # the callers that wait write these groups again
                self._waiting = groups | self._waiting
                raise


class Stages:
    """Times concurrent work that passes through stages. A stage lasts from the moment at which the
    last part left the previous stage until the last part leaves this one."""

    def __init__(self, *names: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began_at = clock()
        self._last_at: dict[str, float | None] = dict.fromkeys(names)

    def through(self, name: str) -> None:
        """Notes that a part of the work has left the stage."""
        self._last_at[name] = self._clock()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage; 0 for a stage that no part went through."""
        since, seconds = self.began_at, dict[str, float]()
        for name, at in self._last_at.items():
            seconds[name] = max((at or since) - since, 0.0)
            since += seconds[name]
        return seconds

    @property
    def span(self) -> tuple[float, float]:
        """When the work began, and when the last stage ended."""
        return self.began_at, self.began_at + sum(self.seconds.values())
