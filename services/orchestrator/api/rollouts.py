"""A job's stored rollouts: of a step, of an evaluation, by group, of one problem over the steps; in
detail with messages, tokens and log-probs; and graded by other rewards."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import Path as Path_
from fastapi import Query, Request
from fastapi.responses import Response

from services.orchestrator.api.history import MAX_STEP, Step
from services.orchestrator.data.choosing import reader_of
from services.orchestrator.jobs.rollouts import graded, regrade
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.lists import Readable
from services.orchestrator.store.store import Store
from shared.http import rendering
from shared.http.rendering import render
from shared.http.service import Service
from shared.job import Job
from shared.settings import Settings
from shared.templates import PromptReader, TokenizerUnavailable
from shared.wire import (
    Batch,
    GradedRollout,
    GroupList,
    GroupSummary,
    Message,
    ProblemHistory,
    ProblemStep,
    RegradeReport,
    RegradeRequest,
    Rollout,
    RolloutDetail,
    RolloutGroup,
    RolloutList,
    Score,
    TokenColumns,
    TrainedTokens,
)
from shared.wire.packed import Logprobs, Mask
from shared.wire.pages import MAX_ROWS

SetName = Annotated[str, Query(pattern=r"^([a-z0-9][a-z0-9_-]*)?$", max_length=40)]

NO_LOGPROBS = Logprobs()

MAX_DETAILED = 100
"""Rollouts with detail in one answer."""

MAX_TOKENS = 8192
"""Tokens of a completion that are decoded one by one."""

SHOWN_CHARS = 300
"""Characters of a prompt in a list."""

LOOK_S = 2.0
"""Seconds for looking for a problem in the batches of one request."""


def add_routes(service: Service, store: Readable) -> None:
    _add_rollouts(service, store)
    _add_groups(service, store)


def add_regrading(service: Service, settings: Settings, store: Store) -> None:
    given = rendering.answers(RegradeReport) | rendering.accepted()

    @service.app.post("/v1/jobs/{job_id}/regrade", response_model=None, responses=given)
    async def regrade_job(job_id: str, request: Request) -> Response:
        """Grades stored rollouts by other rewards and returns the differences. Nothing is written
        to the run."""
        body = await rendering.read_body(request, RegradeRequest)
        record = await store.get(job_id)
        folder = RunFolder(Path(record.run_dir))
        key = request.headers.get("idempotency-key")
        operation = service.operations.start(
            lambda: regrade(body, record.job, folder, settings),
            f"regrade {job_id} {key}" if key else None,
            body.model_dump_json(),
            f"regrading {job_id}",
        )
        return await service.answer(operation, request)

    service.body(RegradeRequest, "POST", "/v1/jobs/{job_id}/regrade")


def _add_rollouts(service: Service, store: Readable) -> None:
    app = service.app

    @app.get("/v1/jobs/{job_id}/rollouts")
    async def rollouts(
        job_id: str,
        step: Step | None = None,
        after: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = MAX_ROWS,
        detail: bool = False,
    ) -> RolloutList:
        """The graded rollouts of a step, `[P*G]` without the first `after`. Without `step`, of the
        newest step. With `detail` each has its messages and tokens, and at most 100 are
        returned."""
        record = await store.get(job_id)
        run = RunFolder(Path(record.run_dir))
        number = step if step is not None else max(run.batch_steps(), default=0)
        end = after + (min(limit, MAX_DETAILED) if detail else limit)

        def read() -> tuple[Sequence[GradedRollout], int]:
            batch = run.batch(number)
            graded_rollouts = graded(batch, record.job)
            page = graded_rollouts[after:end]
            if detail:
                page = rollout_details(page, batch, after, record.job, run.trained(number))
            return page, len(graded_rollouts)

        page, total = await asyncio.to_thread(read)
        return RolloutList(
            step=number, rollouts=tuple(page), next_after=end if end < total else None
        )

    @app.get("/v1/jobs/{job_id}/held_out")
    async def held_out(
        job_id: str,
        step: Step | None = None,
        name: SetName = "",
        after: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = MAX_ROWS,
    ) -> RolloutList:
        """Completions of the evaluation after `step`, with their rewards, without the first
        `after`: two of each of the first 64 problems of `data.eval`, or of the held-out set `name`,
        with at most 20,000 characters of each prompt and completion. Without `step`, of the newest
        evaluation; step 0 is the model before training. In a job of 0 steps, `step` is the number
        of a model in its report, from 0."""
        run = RunFolder(Path((await store.get(job_id)).run_dir))
        stored = await asyncio.to_thread(run.held_out, name, step)
        end = after + limit
        page, more = stored.rollouts[after:end], end < len(stored.rollouts)
        return stored.model_copy(update={"rollouts": page, "next_after": end if more else None})


def _add_groups(service: Service, store: Readable) -> None:
    @service.app.get("/v1/jobs/{job_id}/rollouts/groups", responses=rendering.answers(GroupList))
    async def groups(
        job_id: str,
        request: Request,
        step: Step | None = None,
        search: Annotated[str, Query(max_length=1000)] = "",
    ) -> Response:
        """The groups of a step, or of the newest one, in brief. With `search` only those with the
        text, in upper or lower case, in their prompt, in a completion, or in a grader's detail."""
        record = await store.get(job_id)
        run = RunFolder(Path(record.run_dir))

        def read() -> GroupList:
            steps = run.batch_steps()
            number = step if step is not None else max(steps, default=0)
            batch = run.batch(number)
            matching = summaries(batch, record.job, search)
            return GroupList(
                step=number, groups=tuple(matching), steps=tuple(steps), dropped=len(batch.dropped)
            )

        return await render(await asyncio.to_thread(read), request)

    @service.app.get("/v1/jobs/{job_id}/problems/{index}")
    async def problem(
        job_id: str,
        index: Annotated[int, Path_(ge=0, le=MAX_STEP)],
        before: Step | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> ProblemHistory:
        """The groups of a problem in the steps before `before`, newest first. The search stops
        after two seconds, and the answer says where to continue."""
        record = await store.get(job_id)
        return await asyncio.to_thread(
            history_of, RunFolder(Path(record.run_dir)), record.job, index, before, limit
        )


def rollout_details(
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
    trained_columns = list(zip(*columns_2S, strict=True))[first : first + len(rollouts)]
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
            rollouts, stored[first : first + len(rollouts)], trained_columns, strict=True
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
    tokens among them. In the score the log-probs of branches come before the row's own.
    `trainer_logprobs` and `entropies` `[T]` are NaN for a token that was not trained on."""
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
        return _cached(job.model_dump_json()), ""
    except TokenizerUnavailable as error:
        return None, str(error)


@functools.lru_cache(maxsize=4)
def _cached(job: str) -> PromptReader:
    """Cached because a large vocabulary takes a second to read."""
    return reader_of(Job.model_validate_json(job))


def summaries(batch: Batch, job: Job, search: str = "") -> list[GroupSummary]:
    """Returns the batch's groups `[P]`; only those in which `search` occurs, if it is given."""
    rollouts, first, matching = graded(batch, job), 0, list[GroupSummary]()
    for group in batch.groups:
        own = rollouts[first : first + len(group.rollouts)]
        hits = _hits(own, search)
        if not search or hits:
            matching.append(_summary(group, own, first, hits if search else ()))
        first += len(own)
    return matching


def history_of(
    run: RunFolder, job: Job, index: int, before: int | None, limit: int
) -> ProblemHistory:
    """Returns the steps before `before` with the problem `index`, newest first: at most `limit`
    steps, and only the steps found in LOOK_S seconds."""
    steps = [step for step in reversed(run.batch_steps()) if before is None or step < before]
    history, end = list[ProblemStep](), time.monotonic() + LOOK_S
    for at, step in enumerate(steps):
        if index in _problems(run.path, step):
            chosen = [one for one in summaries(run.batch(step), job) if one.prompt_index == index]
            history += [ProblemStep(step=step, group=group) for group in chosen]
        if (len(history) >= limit or time.monotonic() > end) and at + 1 < len(steps):
            return ProblemHistory(prompt_index=index, steps=tuple(history), next_before=step)
    return ProblemHistory(prompt_index=index, steps=tuple(history))


@functools.lru_cache(maxsize=20_000)
def _problems(run: Path, step: int) -> frozenset[int]:
    """Returns the problems of a stored step. A scored batch never changes."""
    return frozenset(prompt.index for prompt in RunFolder(run).batch(step).prompts)


def _summary(
    group: RolloutGroup, rollouts: Sequence[GradedRollout], first: int, hits: Sequence[int]
) -> GroupSummary:
    rewards = [rollout.reward for rollout in rollouts]
    present = [reward for reward in rewards if reward is not None]
    return GroupSummary(
        prompt_index=rollouts[0].prompt_index if rollouts else 0,
        prompt=_text(rollouts[0].prompt)[:SHOWN_CHARS] if rollouts else "",
        first=first,
        rewards=tuple(rewards),
        advantages=tuple(rollout.advantage for rollout in rollouts),
        finish_reasons=tuple(rollout.finish_reason for rollout in rollouts),
        num_tokens=tuple(rollout.num_sampled for rollout in group.rollouts),
        versions=tuple(sorted({version for one in rollouts for version in one.versions})),
        spread=statistics.stdev(present) if len(present) > 1 else None,
        replica=group.replica,
        found=tuple(hits),
    )


def _hits(rollouts: Sequence[GradedRollout], search: str) -> list[int]:
    """Returns the positions of the rollouts with the text; all, if their prompt has it."""
    wanted = search.casefold()
    if not wanted or not rollouts:
        return []
    if wanted in _text(rollouts[0].prompt).casefold():
        return list(range(len(rollouts)))
    return [at for at, rollout in enumerate(rollouts) if wanted in _said(rollout).casefold()]


def _said(rollout: GradedRollout) -> str:
    parts = (f"{part.verdict}\n{part.detail}\n{part.stdout}" for part in rollout.parts.values())
    return "\n".join((rollout.completion, *parts))


def _text(prompt: str | tuple[Message, ...]) -> str:
    """Returns a prompt's text; for messages the text of the last one."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content", "") if prompt else ""
    return content if isinstance(content, str) else str(content)
