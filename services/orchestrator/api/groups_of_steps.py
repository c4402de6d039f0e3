"""The groups of a step in brief, for lists: a step of many long completions need not be sent whole
to see which groups have something to learn. And one problem over the steps."""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import Path as Path_
from fastapi import Query, Request
from fastapi.responses import Response

from services.orchestrator.api.history import MAX_STEP, Step, graded
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.reading import Readable
from shared.http import rendering
from shared.http.rendering import render
from shared.http.service import Service
from shared.job import Job
from shared.wire import (
    Batch,
    GradedRollout,
    GroupList,
    GroupSummary,
    Message,
    ProblemHistory,
    ProblemStep,
    RolloutGroup,
)

SHOWN_CHARS = 300
"""Characters of a prompt in a list."""

LOOK_S = 2.0
"""Seconds for looking for a problem in the batches of one request."""


def add_routes(service: Service, store: Readable) -> None:
    @service.app.get("/v1/jobs/{job_id}/rollouts/groups", responses=rendering.answers(GroupList))
    async def groups(
        job_id: str,
        request: Request,
        step: Step | None = None,
        search: Annotated[str, Query(max_length=1000)] = "",
    ) -> Response:
        """The groups of a step, or of the newest one, in brief. With `search` only those with the
        text, in upper or lower case, in their prompt, a completion, or what a grader said of it."""
        record = await store.get(job_id)
        run = RunFolder(Path(record.run_dir))

        def read() -> GroupList:
            steps = run.batch_steps()
            number = step if step is not None else max(steps, default=0)
            batch = run.batch(number)
            found = summaries(batch, record.job, search)
            return GroupList(
                step=number, groups=tuple(found), steps=tuple(steps), dropped=len(batch.dropped)
            )

        return await render(await asyncio.to_thread(read), request)

    @service.app.get("/v1/jobs/{job_id}/problems/{index}")
    async def problem(
        job_id: str,
        index: Annotated[int, Path_(ge=0, le=MAX_STEP)],
        before: Step | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> ProblemHistory:
        """The groups of a problem in the steps before `before`, newest first. It looks for two
        seconds, and says where to continue."""
        record = await store.get(job_id)
        return await asyncio.to_thread(
            history_of, RunFolder(Path(record.run_dir)), record.job, index, before, limit
        )


def summaries(batch: Batch, job: Job, search: str = "") -> list[GroupSummary]:
    """Returns the batch's groups `[P]`; only those in which `search` occurs, if it is given."""
    rollouts, first, found = graded(batch, job), 0, list[GroupSummary]()
    for group in batch.groups:
        own = rollouts[first : first + len(group.rollouts)]
        hits = _hits(own, search)
        if not search or hits:
            found.append(_summary(group, own, first, hits if search else ()))
        first += len(own)
    return found


def history_of(
    run: RunFolder, job: Job, index: int, before: int | None, limit: int
) -> ProblemHistory:
    """Returns the steps before `before` with the problem `index`, newest first: at most `limit`
    steps, and only the steps found in LOOK_S seconds."""
    steps = [step for step in reversed(run.batch_steps()) if before is None or step < before]
    found, end = list[ProblemStep](), time.monotonic() + LOOK_S
    for at, step in enumerate(steps):
        if index in _problems(run.path, step):
            chosen = [one for one in summaries(run.batch(step), job) if one.prompt_index == index]
            found += [ProblemStep(step=step, group=group) for group in chosen]
        if (len(found) >= limit or time.monotonic() > end) and at + 1 < len(steps):
            return ProblemHistory(prompt_index=index, steps=tuple(found), next_before=step)
    return ProblemHistory(prompt_index=index, steps=tuple(found))


@functools.lru_cache(maxsize=20_000)
def _problems(run: Path, step: int) -> frozenset[int]:
    """Returns the problems of a stored step. A scored batch never changes."""
    return frozenset(prompt.index for prompt in RunFolder(run).batch(step).prompts)


def _summary(
    group: RolloutGroup, rollouts: Sequence[GradedRollout], first: int, found: Sequence[int]
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
        found=tuple(found),
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
    """Returns a prompt's text; of messages the last one's."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content", "") if prompt else ""
    return content if isinstance(content, str) else str(content)
