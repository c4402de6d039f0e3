"""A request's items and rewards -> scores. Everything is checked before anything is graded, so a mistake costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.reward import registry
from services.reward.registry import Grader, Tools
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, Score, ScoreItem, ScoreRequest, ScoreResult

SAMPLER_FAILED = Part(value=None, verdict="error", detail="the sampler failed on this completion, so it was not graded")


async def checked(rewards: Sequence[RewardSpec], columns: Sequence[str], tools: Tools) -> list[Grader[Any]]:
    """Returns the graders of `rewards`. Raises BadRequest for whatever could not work on rows with these `columns`."""
    labels = [spec.label for spec in rewards]
    for label in labels:
        if labels.count(label) > 1:
            raise BadRequest(f'two rewards are called {label!r}; give one of them another name = "..."')
    graders = [registry.bind(spec, tools) for spec in rewards]
    for grader in graders:
        await grader.check(columns)
    return graders


async def score(request: ScoreRequest, tools: Tools) -> ScoreResult:
    """Returns one score an item. A completion that the sampler marked as failed has no reward, whatever its text."""
    graders = await checked(request.rewards, _columns(request.items), tools)
    gradable = [item for item in request.items if item.finish_reason != "error"]
    graded = await asyncio.gather(*(_grade(grader, gradable) for grader in graders))
    weights = {spec.label: spec.weight for spec in request.rewards}
    rows = iter(zip(*graded, strict=True))
    scores = [
        _total(
            dict(zip(weights, next(rows) if item.finish_reason != "error" else [SAMPLER_FAILED] * len(weights), strict=True)),
            weights,
        )
        for item in request.items
    ]
    return ScoreResult(scores=tuple(scores))


async def _grade(grader: Grader[Any], items: list[ScoreItem]) -> Sequence[Part]:
    parts = await grader.grade(items) if items else []
    if len(parts) != len(items):
        raise BadRequest(f"grader {grader.name!r} returned {len(parts)} parts for {len(items)} completions")
    return parts


def _total(parts: dict[str, Part], weights: dict[str, float]) -> Score:
    """Returns the weighted sum of the parts that apply; None if one is missing or none applies."""
    applicable = {label: part for label, part in parts.items() if part.verdict != "skipped"}
    values = {label: part.value for label, part in applicable.items() if part.value is not None}
    if not applicable or len(values) < len(applicable):
        return Score(value=None, parts=parts)
    return Score(value=sum(weights[label] * value for label, value in values.items()), parts=parts)


def _columns(items: Sequence[ScoreItem]) -> list[str]:
    """Returns the columns that every row has."""
    rows = [set(item.row) for item in items]
    return sorted(set.intersection(*rows)) if rows else []
