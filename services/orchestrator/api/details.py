"""What is stored of a rollout beside its text and its rewards: messages, tokens, log-probs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from services.orchestrator.data.choosing import reader_of
from shared.job import Job
from shared.templates import CannotCount, PromptReader
from shared.wire import (
    Batch,
    GradedRollout,
    Logprobs,
    Mask,
    Rollout,
    RolloutDetail,
    Score,
    TokenColumns,
    TrainedTokens,
)

NO_LOGPROBS = Logprobs()

MAX_DETAILED = 100
"""Rollouts with detail in one answer."""

MAX_TOKENS = 8192
"""Tokens of a completion that are decoded one by one."""


def detailed(
    rollouts: Sequence[GradedRollout],
    batch: Batch,
    first: int,
    job: Job,
    trained: TrainedTokens | None = None,
) -> list[GradedRollout]:
    """Returns the `rollouts`, which stand in the batch from position `first` on, with detail."""
    reader, why_not = _reader(job)
    stored = [
        (prompt.row, rollout, score)
        for prompt, group, scores in zip(batch.prompts, batch.groups, batch.scores, strict=True)
        for rollout, score in zip(group.rollouts, scores, strict=True)
    ]
    untold = [NO_LOGPROBS] * len(stored)
    columns_2S = [untold, untold]
    if trained:
        columns_2S = [
            list(itertools.chain(*each)) for each in (trained.logprobs, trained.entropies)
        ]
    told = list(zip(*columns_2S, strict=True))[first : first + len(rollouts)]
    return [
        each.model_copy(
            update={
                "detail": RolloutDetail(
                    messages=rollout.messages,
                    error=rollout.error,
                    info=rollout.info,
                    row=row,
                    num_tokens=rollout.num_sampled,
                    tokens=token_columns(rollout, score, reader, *of_trainer) if reader else None,
                    no_tokens=why_not,
                )
            }
        )
        for each, (row, rollout, score), of_trainer in zip(
            rollouts, stored[first : first + len(rollouts)], told, strict=True
        )
    ]


def token_columns(
    rollout: Rollout,
    score: Score,
    reader: PromptReader,
    trainer_logprobs: Logprobs = NO_LOGPROBS,
    entropies: Logprobs = NO_LOGPROBS,
) -> TokenColumns:
    """Returns the tokens of the rollout's own row, and the teacher's log-probs of the sampled
    tokens among them. The score has the log-probs of the branches first. `trainer_logprobs` and
    `entropies` `[T]` are NaN for a token that was not trained on."""
    sampled = list(rollout.sampled) or [1] * len(rollout.token_ids)
    num_own = sum(sampled)
    own = list(score.teacher_logprobs)[-num_own:] if num_own else []
    teacher = iter(own)
    has_teacher = len(own) == num_own > 0
    columns = [next(teacher) if is_own else None for is_own in sampled] if has_teacher else []
    return TokenColumns(
        texts=tuple(reader.texts_of_tokens(rollout.token_ids[:MAX_TOKENS])),
        logprobs=Logprobs(rollout.logprobs[:MAX_TOKENS]),
        sampled=Mask(rollout.sampled[:MAX_TOKENS]),
        teacher_logprobs=tuple(columns[:MAX_TOKENS]),
        trainer_logprobs=_without_nan(trainer_logprobs[:MAX_TOKENS]),
        entropies=_without_nan(entropies[:MAX_TOKENS]),
        num_left_out=max(0, len(rollout.token_ids) - MAX_TOKENS),
    )


def _without_nan(column: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in column)


def _reader(job: Job) -> tuple[PromptReader | None, str]:
    try:
        return _cached(job.model, job.model_revision, job.model_dump_json()), ""
    except CannotCount as error:
        return None, str(error)


@functools.lru_cache(maxsize=4)
def _cached(_model: str, _revision: str | None, job: str) -> PromptReader:
    """A large vocabulary takes a second to read."""
    return reader_of(Job.model_validate_json(job))
