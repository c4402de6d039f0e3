"""A request's items and rewards -> scores, each reported as soon as all its parts are there.
READ FIRST.

What can be known to be wrong before grading (names, params, columns) is a BadRequest and costs
nothing. What goes wrong in grading is a part without a value.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from services.reward.grading import trying
from services.reward.grading.admission import Admission
from services.reward.grading.calling import Caller, Callers
from services.reward.grading.registry import Grader, GraderTools, GradingFailed
from shared.errors import BadRequest, Failed
from shared.job import RewardSpec
from shared.wire import (
    MAX_PARTS,
    Part,
    Prompt,
    Score,
    ScoredItem,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TriedReward,
)

SAMPLER_FAILED = Part(
    value=None,
    verdict="error",
    detail="the sampler failed on this completion, so it was not graded",
)


class Scorer:
    """Grades by the graders that requests name, and takes only so many completions at a time."""

    def __init__(self, tools: GraderTools) -> None:
        self._callers = Callers(tools)
        self._admission = Admission(
            "completions", tools.settings.max_queued_completions, "HONE_MAX_QUEUED_COMPLETIONS"
        )

    async def close(self) -> None:
        await self._callers.close()

    async def check(
        self,
        rewards: Sequence[RewardSpec],
        columns: Sequence[str] | None,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        """Raises BadRequest for whatever could not work on rows with these `columns` (None: on any
        rows), or on one of these `prompts`."""
        there = _AnyColumn() if columns is None else columns
        async with self._checked(rewards, there, None) as callers:
            for caller in callers:
                await _check_rows(caller.grader, prompts)

    async def tried(
        self, rewards: Sequence[RewardSpec], prompts: Sequence[Prompt]
    ) -> tuple[TriedReward, ...]:
        """Returns what each reward gives an empty completion, and the rows' reference answers. No
        job's own graders are asked: one that remembers is to remember nothing of it."""
        columns = sorted(set.intersection(*(set(prompt.row) for prompt in prompts)))
        with self._admission.of(2 * len(prompts)):
            async with self._checked(rewards, columns, None) as callers:
                return await trying.tried(callers, prompts)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns one score per item, in order."""
        async with contextlib.aclosing(self.stream(request)) as lines:
            by_index = {line.index: line.score async for line in lines}
        return ScoreResult(scores=tuple(by_index[index] for index in range(len(request.items))))

    async def stream(self, request: ScoreRequest) -> AsyncGenerator[ScoredItem]:
        """Yields each item's score as soon as it is known. A completion that the sampler marked as
        failed has no reward, whatever its text. Raises BadRequest, Busy, or Failed where nothing
        can be graded, before the first item."""
        specs = {spec.label: spec for spec in request.rewards}
        if len(request.items) * len(request.rewards) > MAX_PARTS:
            raise BadRequest(
                f"{len(request.items)} completions by {len(request.rewards)} rewards; at most "
                f"{MAX_PARTS} verdicts are given in one request"
            )
        gradable: list[int] = []
        with self._admission.of(len(request.items)):
            async with self._checked(
                request.rewards, _columns(request.items), request.job_id
            ) as callers:
                for index, item in enumerate(request.items):
                    if item.finish_reason == "error":
                        yield ScoredItem(
                            index=index, score=total(dict.fromkeys(specs, SAMPLER_FAILED), specs)
                        )
                    else:
                        gradable.append(index)
                async with contextlib.aclosing(
                    _graded([request.items[index] for index in gradable], callers)
                ) as graded:
                    async for position, parts in graded:
                        yield ScoredItem(index=gradable[position], score=total(parts, specs))

    @contextlib.asynccontextmanager
    async def _checked(
        self, rewards: Sequence[RewardSpec], columns: Sequence[str], job_id: str | None
    ) -> AsyncGenerator[list[Caller]]:
        labels = [spec.label for spec in rewards]
        for label in labels:
            if labels.count(label) > 1:
                raise BadRequest(
                    f'two rewards are called {label!r}; give one of them another name = "..."'
                )
        async with self._callers.of(rewards, job_id) as callers:
            for caller in callers:
                await caller.grader.check(columns)
            yield callers


async def _check_rows(grader: Grader[Any], prompts: Sequence[Prompt]) -> None:
    """Raises BadRequest for the first row that nobody can pass, and says how many there are."""
    faults = await asyncio.gather(*(_fault(grader, prompt) for prompt in prompts))
    found = [
        (prompt, fault) for prompt, fault in zip(prompts, faults, strict=True) if fault is not None
    ]
    if not found:
        return
    prompt, fault = found[0]
    share = f" ({len(found)} of the {len(prompts)} rows tried are refused)"
    raise BadRequest(
        f"reward {grader.spec.label!r}, row {prompt.index} of the data: {fault.detail}"
        + (share if len(prompts) > 1 else "")
    ) from fault


async def _fault(grader: Grader[Any], prompt: Prompt) -> GradingFailed | None:
    try:
        await grader.check_row(prompt.row)
    except GradingFailed as error:
        if error.by_sandbox:
            raise Failed(error.detail) from error
        return error
    return None


async def _graded(
    items: Sequence[ScoreItem], callers: Sequence[Caller]
) -> AsyncGenerator[tuple[int, dict[str, Part]]]:
    """Yields each item's position and its parts by label, once all are there. Closed early, it ends
    the grading."""
    told: asyncio.Queue[tuple[int, str, Part] | BaseException] = asyncio.Queue()

    async def run(caller: Caller) -> None:
        label = caller.grader.spec.label
        try:
            await caller.grade(
                items, lambda position, part: told.put_nowait((position, label, part))
            )
        except Exception as error:  # raised again, where the request is answered
            told.put_nowait(error)

    tasks = [asyncio.create_task(run(caller)) for caller in callers]
    parts: list[dict[str, Part]] = [{} for _ in items]
    try:
        for _ in range(len(items) * len(callers)):
            news = await told.get()
            if isinstance(news, BaseException):
                raise news
            position, label, part = news
            parts[position][label] = part
            if len(parts[position]) == len(callers):
                yield (
                    position,
                    {
                        caller.grader.spec.label: parts[position][caller.grader.spec.label]
                        for caller in callers
                    },
                )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def total(parts: dict[str, Part], specs: dict[str, RewardSpec]) -> Score:
    """Returns the weighted sum of the parts that apply; None if one is missing or none applies."""
    applicable = {label: part for label, part in parts.items() if part.verdict != "skipped"}
    values = {label: part.value for label, part in applicable.items() if part.value is not None}
    if not applicable or len(values) < len(applicable):
        return Score(value=None, parts=parts)
    return Score(
        value=sum(specs[label].weight * value for label, value in values.items()), parts=parts
    )


class _AnyColumn(tuple[str, ...]):
    """Columns that nobody knows yet: each counts as there."""

    def __contains__(self, name: object) -> bool:
        return True


def _columns(items: Sequence[ScoreItem]) -> list[str]:
    """Returns the columns that every row has."""
    rows = [set(item.row) for item in items]
    return sorted(set.intersection(*rows)) if rows else []
