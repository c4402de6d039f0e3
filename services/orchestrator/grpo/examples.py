"""From scored rollouts to the trainer's input: examples, and the totals of their batch. And back:
what the trainer says of tokens, to the rollouts that they are of."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence

from services.orchestrator.grpo.advantages import Advantage, Advantages, is_masked, returns_of
from services.orchestrator.grpo.distilling import Terms
from services.orchestrator.grpo.turns import Row, lengths, num_turns, of_rows, rows
from shared.job import Job
from shared.wire import (
    Batch,
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

Placed = tuple[tuple[int, int] | None, Example]
"""An example with its prompt and rollout; without them if it is a branch."""


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
) -> tuple[Placed, ...]:
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


def trained_tokens(batch: Batch, placed: Sequence[Placed], result: StepResult) -> TrainedTokens:
    """Returns what the trainer says of the tokens of the batch's rollouts."""
    found: dict[str, tuple[tuple[Logprobs, ...], ...]] = {}
    for name in ("logprobs", "entropies"):
        values, start = getattr(result, name), 0
        columns = [[Logprobs()] * len(group.rollouts) for group in batch.groups]
        for place, example in placed:
            num = sum(example.sampled) if example.sampled else len(example.token_ids)
            own = values[start : start + num]
            start += num
            if place:
                columns[place[0]][place[1]] = _spread(own, example.sampled)
        found[name] = tuple(map(tuple, columns))
    return TrainedTokens(step=result.step, **found)


def _spread(values: Sequence[float], sampled: Mask) -> Logprobs:
    """Returns the values at the sampled tokens `[T]`, NaN at the others."""
    if not sampled:
        return Logprobs(values)
    each = iter(values)
    return Logprobs([next(each, math.nan) if one else math.nan for one in sampled])


def _rows(
    group: RolloutGroup, rollout: Rollout, advantage: Advantage
) -> Iterator[tuple[TokenIds, Row, Advantage]]:
    """Yields each row with its prompt and its part of the advantages."""
    found = rows(rollout)
    parts: Sequence[Advantage] = [advantage] * len(found)
    if isinstance(advantage, tuple):
        parts = [tuple(part) for part in of_rows(rollout, advantage)]
    for row, part in zip(found, parts, strict=True):
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
    """Returns a rollout's advantage as one number: the mean of its turns'."""
    if not isinstance(advantage, tuple):
        return advantage
    present = [one for one in advantage if one is not None]
    return math.fsum(present) / len(present) if present else None


def only_turns(row: Row, kept_K: Sequence[bool]) -> Mask:
    """Returns `sampled` `[T]` of the tokens of these turns alone."""
    before, *spans = lengths(row)
    sampled = row.sampled.data or bytes([1]) * len(row.token_ids)
    found, start = bytearray(before), before
    for kept, length in zip(kept_K, spans, strict=True):
        found += sampled[start : start + length] if kept else bytes(length)
        start += length
    return Mask(bytes(found))


def _per_token(row: Row, advantages_K: Sequence[float | None]) -> Logprobs:
    before, *spans = lengths(row)
    found = array("f", [0.0]) * before
    for advantage, length in zip(advantages_K, spans, strict=True):
        found += array("f", [advantage or 0.0]) * length
    return Logprobs(found)


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
    """Returns how many tokens are credited of each row of which any are."""
    credited = [True] * num_turns(rollout)
    if job.advantages.credit != "episode":
        credited = [one is not None for one in returns_of(rollout, score, job)]
    return [
        only_turns(row, kept_K).data.count(1)
        for row, kept_K in zip(rows(rollout), of_rows(rollout, credited), strict=True)
        if any(kept_K)
    ]
