"""What rewards say of completions that are known beforehand: an empty one, and the row's own
reference answer. A reward by which the two earn the same teaches nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.grading.calling import Caller
from services.reward.grading.registry import Grader, GradingFailed
from shared.wire import Part, Prompt, ScoreItem, TriedReward


async def tried(callers: Sequence[Caller], prompts: Sequence[Prompt]) -> tuple[TriedReward, ...]:
    """Returns what each reward gives, in order."""
    return tuple(await asyncio.gather(*(_tried(caller, prompts) for caller in callers)))


async def _tried(caller: Caller, prompts: Sequence[Prompt]) -> TriedReward:
    grader = caller.grader
    label, costs = grader.spec.label, grader.asks_models
    if costs:
        return TriedReward(reward=label, why="it asks a language model, which costs")
    references = {prompt.index: _reference(grader, prompt.row) for prompt in prompts}
    empty = [_item(prompt, "") for prompt in prompts]
    right = [
        _item(prompt, reference)
        for prompt in prompts
        if (reference := references[prompt.index]) is not None
    ]
    parts = await _graded(caller, [*empty, *right])
    of_empty, of_right = parts[: len(empty)], parts[len(empty) :]
    return TriedReward(
        reward=label,
        empty=_mean(of_empty),
        reference=_mean(of_right),
        num_references=len(right),
        full_mark=1.0 if grader.has_full_mark else None,
        why=_why(of_right) or _why(of_empty),
    )


def _reference(grader: Grader[Any], row: Mapping[str, Any]) -> str | None:
    try:
        return grader.reference(row)
    except (GradingFailed, KeyError):
        return None


def _item(prompt: Prompt, completion: str) -> ScoreItem:
    return ScoreItem(
        prompt=prompt.content,
        completion=completion,
        num_tokens=0 if not completion else None,
        row=prompt.row,
    )


async def _graded(caller: Caller, items: Sequence[ScoreItem]) -> list[Part]:
    found: dict[int, Part] = {}
    if items:
        await caller.grade(items, found.__setitem__)
    return [found[position] for position in range(len(items))]


def _mean(parts: Sequence[Part]) -> float | None:
    values = [part.value for part in parts if part.value is not None]
    return sum(values) / len(values) if values else None


def _why(parts: Sequence[Part]) -> str:
    """Returns why the first of the parts is not the full mark, as the grader says it."""
    return next((part.detail for part in parts if part.detail and part.value != 1.0), "")
