"""A request's items and rewards -> scores. READ FIRST.

Mistakes that are known before grading (names, params, columns) are a BadRequest and cost nothing. A
failure in grading is a part without a value.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

from services.reward.grading.calling import Caller, Callers, run_all
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import Grader, GraderTools
from shared.errors import BadRequest, Busy, Failed
from shared.job import RewardSpec
from shared.wire import (
    MAX_PARTS,
    GraderErrors,
    GraderRun,
    GraderRunMetadata,
    GraderRunRequest,
    Part,
    Prompt,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TriedReward,
)
from shared.wire.rewards import reward_of

MAX_QUEUED_COMPLETIONS = 32_768
"""Completions that may wait for grading or be graded: eight of the largest requests. Beyond it the
answer is 429, and callers ask again later."""

SAMPLER_FAILED = Part(
    value=None,
    verdict="error",
    detail="the sampler failed on this completion, so it was not graded",
)


class Scorer:
    """Grades by the graders that requests name, and takes a limited number of completions at a
    time."""

    def __init__(self, tools: GraderTools) -> None:
        self._callers = Callers(tools)
        self._admission = QueueLimit("completions", MAX_QUEUED_COMPLETIONS)

    async def close(self) -> None:
        await self._callers.close()

    async def check(
        self,
        rewards: Sequence[RewardSpec],
        columns: Sequence[str] | None,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        """Raises BadRequest for rewards that cannot work on rows with these `columns` (None: any
        columns), or on one of these `prompts`."""
        there = _AnyColumn() if columns is None else columns
        async with self._checked(rewards, there, None) as callers:
            for caller in callers:
                await _check_rows(caller.grader, prompts)

    async def tried(
        self, rewards: Sequence[RewardSpec], prompts: Sequence[Prompt]
    ) -> tuple[TriedReward, ...]:
        """Returns what each reward gives an empty completion, and the rows' reference answers. It
        uses no grader of a job, so that a grader that remembers keeps nothing of it."""
        columns = sorted(set.intersection(*(set(prompt.row) for prompt in prompts)))
        with self._admission.of(2 * len(prompts)):
            async with self._checked(rewards, columns, None) as callers:
                return tuple(await asyncio.gather(*(_tried(one, prompts) for one in callers)))

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns one score per item, in order. A completion that the sampler marked as failed has
        no reward, whatever its text. Raises BadRequest, Busy, or Failed if nothing can be
        graded."""
        specs, items = {spec.label: spec for spec in request.rewards}, request.items
        if len(items) * len(request.rewards) > MAX_PARTS:
            raise BadRequest(
                f"{len(items)} completions by {len(request.rewards)} rewards; at most "
                f"{MAX_PARTS} verdicts are given in one request"
            )
        with self._admission.of(len(items)):
            async with self._checked(request.rewards, _columns(items), request.job_id) as callers:
                gradable = [item for item in items if item.finish_reason != "error"]
                graded = iter(await _graded(gradable, callers))
        failed = dict.fromkeys(specs, SAMPLER_FAILED)
        parts = (failed if item.finish_reason == "error" else next(graded) for item in items)
        return ScoreResult(scores=tuple(total(each, specs) for each in parts))

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
    """Raises BadRequest for the first row that no completion can pass, and says how many such rows
    there are."""
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


async def _graded(items: Sequence[ScoreItem], callers: Sequence[Caller]) -> list[dict[str, Part]]:
    """Returns each item's parts by label. The first failure ends all grading, and is raised."""
    parts: list[dict[str, Part]] = [{} for _ in items]

    async def run(caller: Caller) -> None:
        found = await caller.grade(items)
        subjects = await caller.grader.subjects(items)
        for item, subject, part, of_item in zip(items, subjects, found, parts, strict=True):
            of_item[caller.grader.spec.label] = _with_thought(item, subject, part)

    await run_all(map(run, callers))
    labels = [caller.grader.spec.label for caller in callers]
    return [{label: of_item[label] for label in labels} for of_item in parts]


def _with_thought(item: ScoreItem, subject: ScoreItem, part: Part) -> Part:
    """Returns the part saying so, where all of the completion is a thought that never ends."""
    if part.value is None or subject.completion.strip() or not item.completion.strip():
        return part
    why = "; " if part.detail else ""
    why += "no answer follows the completion's reasoning"
    return part.model_copy(update={"detail": part.detail[: 1000 - len(why)] + why})


def total(parts: dict[str, Part], specs: dict[str, RewardSpec]) -> Score:
    """Returns the weighted sum of the parts that apply; None if one is missing or none applies."""
    applicable = {label: part for label, part in parts.items() if part.verdict != "skipped"}
    values = {label: part.value for label, part in applicable.items() if part.value is not None}
    if not applicable or len(values) < len(applicable):
        return Score(value=None, parts=parts)
    return Score(
        value=sum(specs[label].weight * value for label, value in values.items()), parts=parts
    )


class QueueLimit:
    """At most `limit` of `what` ("completions") wait or run at once."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._count = 0

    @contextlib.contextmanager
    def of(self, count: int) -> Generator[None]:
        """Raises Busy if `count` more would be too many. A single request is taken whatever its
        size."""
        if self._count and self._count + count > self._limit:
            raise Busy(
                f"{self._count} {self._what} wait or run and {count} more were sent; at most "
                f"{self._limit} may"
            )
        self._count += count
        try:
            yield
        finally:
            self._count -= count


class _AnyColumn(tuple[str, ...]):
    """Columns that are not known yet: any name counts as a column."""

    def __contains__(self, name: object) -> bool:
        return True


def _columns(items: Sequence[ScoreItem]) -> list[str]:
    """Returns the columns that every row has, and `environments` if conversations had some."""
    rows = [set(item.row) for item in items]
    given = {"environments"} if any("environment" in item.info for item in items) else set()
    return sorted(set.intersection(*rows) | given) if rows else []


async def _tried(caller: Caller, prompts: Sequence[Prompt]) -> TriedReward:
    grader = caller.grader
    label = grader.spec.label
    if grader.asks_models:
        return TriedReward(reward=label, why="it asks a language model, which costs")
    references = [(prompt, _reference(grader, prompt.row)) for prompt in prompts]
    empty = [_item(prompt, "") for prompt in prompts]
    right = [_item(prompt, text) for prompt, text in references if text is not None]
    parts = await caller.grade([*empty, *right])
    of_empty, of_right = parts[: len(empty)], parts[len(empty) :]
    return TriedReward(
        reward=label,
        empty=_mean(of_empty),
        reference=_mean(of_right),
        num_references=len(right),
        full_mark=1.0 if grader.has_full_mark else None,
        why=_why(of_right) or _why(of_empty),
        num_failed=len(failed := [part for part in parts if _has_failed(part)]),
        failure=next((part.detail or part.verdict for part in failed), ""),
    )


def _has_failed(part: Part) -> bool:
    return bool(part.errors) or (part.value is None and part.verdict != "skipped")


def _reference(grader: Grader[Any], row: Mapping[str, Any]) -> str | None:
    try:
        return grader.reference(row)
    except (GradingFailed, KeyError):
        return None


def _item(prompt: Prompt, completion: str) -> ScoreItem:
    return ScoreItem(
        prompt=prompt.content,
        completion=completion,
        prompt_end="",  # a thought that the prompt opens has no place in a reference answer
        num_tokens=0 if not completion else None,
        row=prompt.row,
    )


def _mean(parts: Sequence[Part]) -> float | None:
    values = [part.value for part in parts if part.value is not None]
    return sum(values) / len(values) if values else None


def _why(parts: Sequence[Part]) -> str:
    """Returns why the first of the parts is not the full mark, as the grader says it."""
    return next((part.detail for part in parts if part.detail and part.value != 1.0), "")


LABEL = "grader"


def run_request(run: GraderRunRequest) -> ScoreRequest:
    """Raises BadRequest if `run` names no grader. The reward is LABEL, whatever its name."""
    spec = reward_of(run.grader).model_copy(update={"name": LABEL})
    item = ScoreItem(prompt="", completion=run.model_sample, row=run.item)
    return ScoreRequest(items=(item,), rewards=(spec,))


def run_answer(run: GraderRunRequest, score: Score) -> GraderRun:
    """Returns the score in OpenAI's shape."""
    part = score.parts[LABEL]
    flags: dict[str, Any] = dict.fromkeys(part.errors, True)
    for name in ("model_grader_server_error", "python_grader_runtime_error"):
        if name in flags:
            flags[f"{name}_details"] = part.detail
    if "python_grader_server_error" in flags:
        flags["python_grader_server_error_type"] = part.verdict
    kind = run.grader["type"]
    models = list(part.tokens)
    metadata = GraderRunMetadata(
        name=str(run.grader.get("name", kind)),
        type=kind,
        execution_time=part.seconds,
        errors=GraderErrors(**flags),
        part=part,
        scores=part.sub,
        token_usage=sum(part.tokens.values()) if models else None,
        sampled_model_name=models[0] if len(models) == 1 else None,
    )
    usage = {model: {"total_tokens": tokens} for model, tokens in part.tokens.items()}
    return GraderRun(
        reward=score.value,
        sub_rewards=part.sub,
        metadata=metadata,
        model_grader_token_usage_per_model=usage,
    )
