"""Converts scored rollouts to the trainer's input: examples, and the totals of their batch. And
converts the trainer's log-probs and entropies of tokens back to rollouts. With a teacher, its
log-probs add to the advantages of tokens (`teacher_terms`). Pure."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeVar

from services.orchestrator.grpo.advantages import (
    Advantage,
    Advantages,
    Row,
    is_masked,
    lengths,
    num_turns,
    of_rows,
    returns_of,
    rows,
)
from shared.job import Job, TeacherSpec
from shared.wire import (
    Batch,
    Branch,
    Example,
    Logprobs,
    Mask,
    Rollout,
    RolloutGroup,
    Score,
    StepResult,
    StepTotals,
    TokenIds,
    TrainedTokens,
)

PlacedExample = tuple[tuple[int, int] | None, Example]
"""An example, with the positions of its prompt and rollout in the batch; None if it is a branch."""


def to_examples(
    groups_P: Sequence[RolloutGroup],
    advantages_PG: Advantages,
    terms_PG: Sequence[Sequence[Terms]] | None = None,
) -> tuple[Example, ...]:
    """Returns the examples of `placed_examples`."""
    return tuple(example for _, example in placed_examples(groups_P, advantages_PG, terms_PG))


def placed_examples(
    groups_P: Sequence[RolloutGroup],
    advantages_PG: Advantages,
    terms_PG: Sequence[Sequence[Terms]] | None = None,
) -> tuple[PlacedExample, ...]:
    """Returns an example for each row with sampled tokens of each rollout that has an advantage,
    with the sampler's token ids, log-probs and versions as they came. Branches are rows too. The
    tokens of a turn without an advantage are context. With a teacher, its `terms_PG` are added, and
    a rollout without them is not trained on."""
    untaught_PG = [[()] * len(group.rollouts) for group in groups_P]
    return tuple(
        ((prompt, number) if row is rollout else None, example)
        for prompt, (group, advantages_G, terms_G) in enumerate(
            zip(groups_P, advantages_PG, terms_PG or untaught_PG, strict=True)
        )
        for number, (rollout, advantage, terms) in enumerate(
            zip(group.rollouts, advantages_G, terms_G, strict=True)
        )
        if terms is not None
        for (prompt_token_ids, row, part), of_row in itertools.zip_longest(
            _rows(group, rollout, advantage), terms
        )
        if part is not None and (example := _example(prompt_token_ids, row, part, of_row))
    )


def trained_tokens(
    batch: Batch, placed: Sequence[PlacedExample], result: StepResult
) -> TrainedTokens:
    """Returns the trainer's log-probs and entropies of the tokens of the batch's rollouts."""
    columns_of: dict[str, tuple[tuple[Logprobs, ...], ...]] = {}
    for name in ("logprobs", "entropies"):
        values, start = getattr(result, name), 0
        columns = [[Logprobs()] * len(group.rollouts) for group in batch.groups]
        for place, example in placed:
            num = sum(example.sampled) if example.sampled else len(example.token_ids)
            own = values[start : start + num]
            start += num
            if place:
                columns[place[0]][place[1]] = _spread(own, example.sampled)
        columns_of[name] = tuple(map(tuple, columns))
    return TrainedTokens(step=result.step, **columns_of)


def _spread(values: Sequence[float], sampled: Mask) -> Logprobs:
    """Returns the values at the sampled tokens `[T]`, NaN at the others."""
    if not sampled:
        return Logprobs(values)
    each = iter(values)
    return Logprobs([next(each, math.nan) if one else math.nan for one in sampled])


def _rows(
    group: RolloutGroup, rollout: Rollout, advantage: Advantage
) -> Iterator[tuple[TokenIds, Row, Advantage]]:
    """Yields each row of the rollout with its prompt and its part of the advantage."""
    all_rows = rows(rollout)
    parts: Sequence[Advantage] = [advantage] * len(all_rows)
    if isinstance(advantage, tuple):
        parts = [tuple(part) for part in of_rows(rollout, advantage)]
    for row, part in zip(all_rows, parts, strict=True):
        ids = group.prompt_token_ids if isinstance(row, Rollout) else row.prompt_token_ids
        yield ids, row, part


def _example(
    prompt_token_ids: TokenIds, row: Row, advantage: Advantage, terms: Logprobs | None
) -> Example | None:
    sampled = row.sampled
    advantages = row.advantages if isinstance(row, Rollout) else Logprobs()
    if isinstance(advantage, tuple):
        sampled = only_turns(row, [one is not None for one in advantage])
        advantages = _per_token(row, advantage)
    if not (sampled.data.count(1) if sampled else len(row.token_ids)):
        return None
    if terms is not None:
        of_turns = advantages or itertools.repeat(of_all_tokens(advantage) or 0.0)
        advantages = Logprobs(array("f", map(float.__add__, of_turns, terms)))
    return Example(
        prompt_token_ids=prompt_token_ids,
        token_ids=row.token_ids,
        old_logprobs=row.logprobs,
        advantage=of_all_tokens(advantage) or 0.0,
        advantages=advantages,
        spans=row.spans,
        sampled=sampled,
        kept_ids=row.kept_ids,
        kept_counts=row.kept_counts,
    )


def of_all_tokens(advantage: Advantage) -> float | None:
    """Returns a rollout's advantage as one number: with credit by turns the mean over its turns."""
    if not isinstance(advantage, tuple):
        return advantage
    present = [one for one in advantage if one is not None]
    return math.fsum(present) / len(present) if present else None


def only_turns(row: Row, kept_K: Sequence[bool]) -> Mask:
    """Returns a mask `[T]` of the row's sampled tokens in the turns that are kept."""
    before, *spans = lengths(row)
    sampled = row.sampled.data or bytes([1]) * len(row.token_ids)
    mask, start = bytearray(before), before
    for kept, length in zip(kept_K, spans, strict=True):
        mask += sampled[start : start + length] if kept else bytes(length)
        start += length
    return Mask(bytes(mask))


def _per_token(row: Row, advantages_K: Sequence[float | None]) -> Logprobs:
    before, *spans = lengths(row)
    advantages_T = array("f", [0.0]) * before
    for advantage, length in zip(advantages_K, spans, strict=True):
        advantages_T += array("f", [advantage or 0.0]) * length
    return Logprobs(advantages_T)


def step_totals(batch: Batch, job: Job) -> StepTotals:
    """Returns the losses' denominators: counts of every graded rollout and its sampled tokens,
    whether its group has signal or not. Each row of a rollout, so each branch, is a sequence.

    With `advantages.mask_truncated` a completion that was cut off counts as a sequence of no
    tokens, as in TRL. A rollout without a reward, a turn without a return, and a row of such turns
    alone are not counted: counting them would mean an advantage of 0. Replaced groups are not part
    of the batch (arXiv 2503.14476).
    """
    graded = [
        (rollout, score)
        for group, scores_G in zip(batch.groups, batch.scores, strict=True)
        for rollout, score in zip(group.rollouts, scores_G, strict=True)
        if score.value is not None or rollout.advantages
    ]
    counted = [
        [0 if is_masked(rollout, job) else number for number in _num_credited(rollout, score, job)]
        for rollout, score in graded
    ]
    return StepTotals(num_sequences=sum(map(len, counted)), num_tokens=sum(map(sum, counted)))


def _num_credited(rollout: Rollout, score: Score, job: Job) -> list[int]:
    """Returns for each row with a credited turn how many of its tokens are in credited turns."""
    credited = [True] * num_turns(rollout)
    if job.advantages.credit != "episode":
        credited = [one is not None for one in returns_of(rollout, score, job)]
    return [
        only_turns(row, kept_K).data.count(1)
        for row, kept_K in zip(rows(rollout), of_rows(rollout, credited), strict=True)
        if any(kept_K)
    ]


# --- on-policy distillation -----------------------------------------------------------------------

# To the advantage of token t, which the policy sampled after the tokens before it, is added
#
#     -weight clamp(log policy(t) - log teacher(t), -c, c)        c: `teacher.max_log_ratio`
#
# the negative reverse KL divergence, estimated by the sampled token, in nats. `log policy` is the
# sampler's. No later token's divergence counts for t (a discount of 0), so within c the gradient of
# the loss is, in expectation over t, the gradient of weight KL(policy || teacher) at t, given the
# tokens before. GKD, arXiv 2306.13649 (its reverse KL, all samples the policy's own);
# https://thinkingmachines.ai/blog/on-policy-distillation/ has it in this form.
#
# Without c a token to which the teacher gives next to no probability would outweigh all others of
# its batch. The bound is verl's `loss_max_clamp`, which its recipes set to 10. It makes the
# estimate biased; `teacher/clipped` is the share of tokens that it changes.

V = TypeVar("V")

Terms = list[Logprobs] | None
"""The terms `[T]` of each row of a rollout, branches first; None: no log-probs of the teacher."""


def teacher_terms(batch: Batch, job: Job) -> list[list[Terms]] | None:
    """Returns for each rollout `[P][G]` the terms that the teacher adds to its tokens' advantages;
    None without a teacher."""
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
    terms: list[Logprobs] = []
    for row in (*rollout.branches, rollout):
        terms_T = array("f", bytes(4 * len(row.token_ids)))
        for position, _ in sampled_of(row, row.token_ids):
            terms_T[position] = -spec.weight * min(max(next(ratios), -bound), bound)
        terms.append(Logprobs(terms_T))
    return terms


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
    metrics = {"teacher/missing": 1 - len(taught) / len(graded)} if graded else {}
    if num_tokens:
        ratios = [log_ratios(rollout, score.teacher_logprobs) for rollout, score in taught]
        metrics["teacher/kl"] = math.fsum(map(math.fsum, ratios)) / num_tokens
        num_clipped = sum(abs(ratio) > bound for each in ratios for ratio in each)
        metrics["teacher/clipped"] = num_clipped / num_tokens
    return metrics


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
