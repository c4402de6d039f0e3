"""Whether a step's groups were all right, all wrong, or neither, for `[difficulty]`."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.data.difficulty import Verdict
from services.orchestrator.loop.advantages import full_mark, has_signal, outcome, reaches
from shared.job import Job
from shared.wire import Batch, Score


def verdicts_of(batch: Batch, job: Job) -> dict[int, Verdict]:
    """Returns the verdict on each problem of the batch, replaced groups included, by row number. If
    a problem has several groups, their completions count together. A problem with fewer than two
    rewards has no verdict."""
    numbers = [*batch.dropped_prompts, *(prompt.index for prompt in batch.prompts)]
    scores_of: dict[int, list[Score]] = {}
    for number, scores_G in zip(numbers, (*batch.dropped, *batch.scores), strict=True):
        scores_of.setdefault(number, []).extend(scores_G)
    verdicts: dict[int, Verdict] = {}
    for number, scores in scores_of.items():
        if verdict := _verdict(scores, job):
            verdicts[number] = verdict
    return verdicts


def _verdict(scores: Sequence[Score], job: Job) -> Verdict | None:
    present = [
        (found, full_mark(score, job))
        for score in scores
        if (found := outcome(score, job)) is not None
    ]
    if len(present) < 2:
        return None
    if has_signal(scores, job):
        return "mixed"
    return "right" if all(reaches(found, mark) for found, mark in present) else "wrong"
