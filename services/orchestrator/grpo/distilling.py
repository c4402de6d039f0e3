"""On-policy distillation: a teacher's log-probs as a reward for each sampled token. Pure.

To the advantage of token t, which the policy sampled after the tokens before it, is added

    -weight clamp(log policy(t) - log teacher(t), -c, c)        c: `teacher.max_log_ratio`

the negative reverse KL divergence, estimated by the sampled token, in nats. `log policy` is the
sampler's. No later token's divergence counts for t (a discount of 0), so within c the gradient of
the loss is, in expectation over t, the gradient of weight KL(policy || teacher) at t, given the
tokens before. GKD, arXiv 2306.13649 (its reverse KL, all samples the policy's own);
https://thinkingmachines.ai/blog/on-policy-distillation/ has it in this form.

Without c a token to which the teacher gives next to no probability would outweigh all others of its
batch. The bound is verl's `loss_max_clamp`, which its recipes set to 10. It makes the
estimate biased; `teacher/clipped` is the share of tokens that it changes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeVar

from shared.job import Job, TeacherSpec
from shared.wire import Batch, Branch, Logprobs, Rollout, Score

V = TypeVar("V")

Terms = list[Logprobs] | None
"""Of each row of a rollout, its branches first, `[T]`; None: the teacher gave no log-probs."""


def teacher_terms(batch: Batch, job: Job) -> list[list[Terms]] | None:
    """Returns for each rollout `[P][G]` what the teacher adds to its tokens' advantages; None
    without a teacher."""
    if job.teacher is None:
        return None
    return [
        [
            _terms(rollout, score, job.teacher)
            for rollout, score in zip(group.rollouts, scores_G, strict=True)
        ]
        for group, scores_G in zip(batch.groups, batch.scores, strict=True)
    ]


def _terms(rollout: Rollout, score: Score, spec: TeacherSpec) -> Terms:
    if not score.teacher_logprobs:
        return None
    bound = spec.max_log_ratio
    ratios = iter(log_ratios(rollout, score.teacher_logprobs))
    found: list[Logprobs] = []
    for row in (*rollout.branches, rollout):
        terms_T = array("f", bytes(4 * len(row.token_ids)))
        for position, _ in sampled_of(row, row.token_ids):
            terms_T[position] = -spec.weight * min(max(next(ratios), -bound), bound)
        found.append(Logprobs(terms_T))
    return found


def with_teacher_of(before: Sequence[Score], scores: Sequence[Score]) -> tuple[Score, ...]:
    """Returns the new scores with the log-probs that the teacher gave before, if it did."""
    if not before:
        return tuple(scores)
    return tuple(
        score.model_copy(update={"teacher_logprobs": old.teacher_logprobs})
        for score, old in zip(scores, before, strict=True)
    )


def teacher_metrics(batch: Batch, bound: float) -> dict[str, float]:
    """Returns the mean log-ratio over all sampled tokens, the share of these whose log-ratio is
    beyond the bound, and the share of graded rollouts that the teacher gave no log-probs."""
    graded = [
        (rollout, score)
        for group, scores_G in zip(batch.groups, batch.scores, strict=True)
        for rollout, score in zip(group.rollouts, scores_G, strict=True)
        if not rollout.went_wrong
    ]
    taught = [(rollout, score) for rollout, score in graded if score.teacher_logprobs]
    num_tokens = sum(rollout.num_sampled for rollout, _ in taught)
    found = {"teacher/missing": 1 - len(taught) / len(graded)} if graded else {}
    if num_tokens:
        ratios = [log_ratios(rollout, score.teacher_logprobs) for rollout, score in taught]
        found["teacher/kl"] = math.fsum(map(math.fsum, ratios)) / num_tokens
        num_clipped = sum(abs(ratio) > bound for each in ratios for ratio in each)
        found["teacher/clipped"] = num_clipped / num_tokens
    return found


def sampled_of(row: Rollout | Branch, values: Sequence[V]) -> Iterator[tuple[int, V]]:
    """Yields the value of each sampled token of a row, with its position."""
    sampled = row.sampled or [1] * len(row.token_ids)
    for position, (value, is_sampled) in enumerate(zip(values, sampled, strict=True)):
        if is_sampled:
            yield position, value


def log_ratios(rollout: Rollout, teacher_logprobs: Logprobs) -> list[float]:
    """Returns `log policy - log teacher` of the tokens that the policy sampled, in nats: an
    estimate of the reverse KL divergence at each."""
    rows = (*rollout.branches, rollout)
    own = [value for row in rows for _, value in sampled_of(row, row.logprobs)]
    return [one - other for one, other in zip(own, teacher_logprobs, strict=True)]


def mean_log_ratio(rollout: Rollout, teacher_logprobs: Logprobs) -> float:
    """Returns the mean of the log-ratios."""
    return math.fsum(log_ratios(rollout, teacher_logprobs)) / rollout.num_sampled
