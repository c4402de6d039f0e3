"""Turns a step's graded groups into a batch. Groups without signal are replaced, and a batch with
too many missing rewards is refused. For `[difficulty]`, says which problems were all right or all
wrong.

A rollout that ended in an error (too long a prompt, a template that breaks, a log-prob that is not
finite), or that was not done in time, is data: it is counted and not graded, so it has no reward
and no advantage. The job stops only if a batch has no other rollouts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from services.orchestrator.data.order import Verdict
from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.grpo.advantages import (
    full_mark,
    has_signal,
    is_masked,
    outcome,
    reaches,
)
from shared.errors import Failed
from shared.job import Job
from shared.wire import Batch, Prompt, RolloutGroup, Sampling, Score, ScoredGroup

if TYPE_CHECKING:
    from services.orchestrator.samplers.services import Services

NUM_REASONS = 3

MAX_MISSING = 0.5
"""Share of rewards that may be missing. Beyond it the job pauses rather than learn from the few
that are left, and an evaluation decides nothing."""

DROP_ROUNDS = 10
"""Most rounds in which overlong prompts are replaced, if the job drops them."""


ENVIRONMENT_FAILED = "environment_failed"
"""Marks, in a rollout's `info`, that its environment failed. Its group is sampled again after a
crash."""


async def sample_group(
    services: Services,
    job: Job,
    prompt: Prompt,
    min_version: int,
    *,
    key: str,
    seed: int | None = None,
    sampling: Sampling | None = None,
) -> RolloutGroup:
    """Returns the prompt's group `[G]` by weights of at least `min_version`: completions of one
    turn, or with `[environment]` conversations. `sampling` is by default the job's, with `seed`.
    Requests under the same `key` happen once."""
    if job.environment is None or job.is_pushed:
        return await services.samplers.sample(
            prompt, min_version, key=key, seed=seed, sampling=sampling
        )
    chosen = sampling or services.samplers.sampling(seed)
    return await services.extensions.play_group(services, job, prompt, min_version, key, chosen)


def environment_failed(group: RolloutGroup) -> bool:
    """Returns whether a rollout of the group has no reward because its environment failed."""
    return any(ENVIRONMENT_FAILED in rollout.info for rollout in group.rollouts)


def teaches(graded: ScoredGroup, job: Job) -> bool:
    """Returns whether any completion of the group is trained on: the group has signal or a teacher,
    or the completion came with advantages; and with `mask_truncated` it was not cut off."""
    signal = job.teacher is not None or has_signal(graded.scores, job, graded.group)
    return any(
        not is_masked(rollout, job)
        and (bool(rollout.advantages) or (signal and score.value is not None))
        for rollout, score in zip(graded.group.rollouts, graded.scores, strict=True)
    )


async def refill(
    groups_P: Sequence[ScoredGroup],
    job: Job,
    sample_fresh: Callable[[int, int], Awaitable[list[ScoredGroup]]],
) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """Returns the groups `[P]`, with fresh groups in place of groups that teach nothing, and the
    replaced groups.

    `sample_fresh(round, count)` returns up to `count` groups of prompts that are new in this step,
    in at most `refills` rounds (the dynamic sampling of DAPO, arXiv 2503.14476). Groups that still
    teach nothing stay, and are not trained on. Overlong prompts that the job drops are replaced
    too, in at most DROP_ROUNDS. Nothing is replaced while more than MAX_MISSING of the rewards
    are missing, because missing rewards say nothing about the prompts.
    """
    kept, dropped = list(groups_P), list[ScoredGroup]()
    refills, drops = job.sampling.refills, job.sampling.overlong_prompts == "drop"
    for round in range(1, num_rounds(job) + 1):
        flat = [
            position
            for position, graded in enumerate(kept)
            if (round <= refills and not teaches(graded, job)) or (drops and graded.group.overlong)
        ]
        if not flat or missing_share([graded.scores for graded in kept]) > MAX_MISSING:
            break
        fresh = await sample_fresh(round, len(flat))
        if not fresh:  # a small data set has no other prompts left
            break
        for position, graded in zip(flat, fresh, strict=False):
            dropped.append(kept[position])
            kept[position] = graded
    return kept, dropped


def num_rounds(job: Job) -> int:
    """Returns how many rounds of fresh prompts a step may have at most."""
    drops = job.sampling.overlong_prompts == "drop"
    return max(job.sampling.refills, DROP_ROUNDS if drops else 0)


def to_batch(
    step: int,
    groups_P: Sequence[ScoredGroup],
    dropped: Sequence[ScoredGroup] = (),
    *,
    dated: bool = True,
) -> Batch:
    """Returns the step's batch. Raises OperatorActionNeeded, with the first few errors, if every
    rollout ended in an error, and Failed if the batch must be `dated` and no rollout says which
    weights sampled it."""
    rollouts = [rollout for graded in groups_P for rollout in graded.group.rollouts]
    versions = [version for rollout in rollouts for version in rollout.versions]
    if all(rollout.went_wrong for rollout in rollouts):
        errors = dict.fromkeys(rollout.error or "no reason given" for rollout in rollouts)
        raise OperatorActionNeeded(
            f"step {step}: all {len(rollouts)} rollouts ended in an error; "
            f"{'; '.join(list(errors)[:NUM_REASONS])}; look into the logs of the samplers, or "
            "correct the job's prompts or environment"
        )
    if dated and not versions:
        raise Failed(f"step {step}: no rollout says which weights sampled it")
    return Batch(
        step=step,
        version=min(versions, default=None),
        prompts=tuple(graded.prompt for graded in groups_P),
        groups=tuple(graded.group for graded in groups_P),
        scores=tuple(graded.scores for graded in groups_P),
        dropped=tuple(graded.scores for graded in dropped),
        dropped_prompts=tuple(graded.prompt.index for graded in dropped),
        dropped_tokens=sum(num_sampled(graded.group) for graded in dropped),
    )


def num_sampled(group: RolloutGroup) -> int:
    """Returns how many tokens of the group the policy sampled."""
    return sum(rollout.num_sampled for rollout in group.rollouts)


def is_graded(score: Score) -> bool:
    """Returns whether the rollout was graded. A rollout that ended in an error is not."""
    return bool(score.parts)


def missing_share(scores_PG: Sequence[Sequence[Score]]) -> float:
    """Returns the share of graded rollouts without a reward, 0 to 1."""
    missing = [
        score.value is None for scores_G in scores_PG for score in scores_G if is_graded(score)
    ]
    return sum(missing) / len(missing) if missing else 0.0


def too_many_missing(batch: Batch) -> str | None:
    """Returns why the batch must not be trained on, with graders' first few reasons; None if it may
    be."""
    share = missing_share(batch.scores)
    if share <= MAX_MISSING:
        return None
    parts = [
        part for scores_G in batch.scores for score in scores_G for part in score.parts.items()
    ]
    failures = [
        f"{name}: {part.detail or part.verdict}"
        for name, part in parts
        if part.value is None and part.verdict != "skipped"
    ]
    reasons = list(dict.fromkeys(failures))[:NUM_REASONS] or ["no reward applies"]
    return (
        f"step {batch.step}: {share:.0%} of the rewards are missing; expected at most "
        f"{MAX_MISSING:.0%}; {'; '.join(reasons)}; look into the log of the reward service"
    )


def verdicts_of(batch: Batch, job: Job) -> dict[int, Verdict]:
    """Returns the verdict on each problem of the batch, replaced groups included, by row number. If
    a problem has several groups, their completions count together. A problem with fewer than two
    rewards has no verdict. A group in which the returns of turns differ is "mixed" even where the
    rewards are equal, because it gives a gradient."""
    numbers = [*batch.dropped_prompts, *(prompt.index for prompt in batch.prompts)]
    scores_of: dict[int, list[Score]] = {}
    for number, scores_G in zip(numbers, (*batch.dropped, *batch.scores), strict=True):
        scores_of.setdefault(number, []).extend(scores_G)
    taught = {
        prompt.index
        for prompt, group, scores_G in zip(batch.prompts, batch.groups, batch.scores, strict=True)
        if has_signal(scores_G, job, group)
    }
    verdicts: dict[int, Verdict] = {}
    for number, scores in scores_of.items():
        if verdict := _verdict(scores, job):
            verdicts[number] = "mixed" if number in taught else verdict
    return verdicts


def _verdict(scores: Sequence[Score], job: Job) -> Verdict | None:
    present = [
        (value, full_mark(score, job))
        for score in scores
        if (value := outcome(score, job)) is not None
    ]
    if len(present) < 2:
        return None
    if has_signal(scores, job):
        return "mixed"
    return "right" if all(reaches(value, mark) for value, mark in present) else "wrong"
