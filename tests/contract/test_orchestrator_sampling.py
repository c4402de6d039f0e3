"""What a step samples: by which weights, with which seeds, how far ahead of training, and in place
of groups without signal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.store.folder import RunFolder
from shared.job import Job
from shared.wire import (
    GenerateRequest,
    ModelRequest,
    Part,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


async def test_a_repeatable_job_asks_with_the_same_seeds_and_each_completion_has_its_own(
    stack: Stack,
) -> None:
    asked: list[dict[tuple[str, int | None], int | None]] = []

    async def note(body: GenerateRequest) -> None:
        assert isinstance(body.prompt, str)
        asked[-1][body.prompt, body.min_version] = body.sampling.seed

    stack.fakes.fault["generate"] = note
    jobs = [
        Job.model_validate(
            stack.job.model_dump() | {"steps": 2, "seed": seed, "sampling": sampling}
        )
        for seed, sampling in (
            (0, stack.job.sampling.model_dump() | {"repeatable": True}),
            (0, stack.job.sampling.model_dump() | {"repeatable": True}),
            (1, stack.job.sampling.model_dump() | {"repeatable": True}),
            (0, stack.job.sampling.model_dump()),
        )
    ]
    for job in jobs:
        asked.append({})
        assert (await stack.run(job=job)).status == "succeeded"
    first, again, other, free = asked
    assert first == again and set(free.values()) == {None}
    seeds = {seed for seed in first.values() if seed is not None}
    assert not seeds & set(other.values())
    groups = [range(seed, seed + 4) for seed in seeds]
    assert len({number for group in groups for number in group}) == 4 * len(seeds) > 4 * 4


async def test_a_job_that_truncates_asks_the_sampler_for_masks(stack: Stack) -> None:
    specs: list[ModelRequest] = []

    async def note(body: ModelRequest) -> None:
        specs.append(body)

    stack.fakes.fault["model"] = note
    for top_k in (0, 5):
        sampling = stack.job.sampling.model_copy(update={"top_k": top_k})
        assert (await stack.run(steps=1, sampling=sampling)).status == "succeeded"
    assert [spec.sampling_masks for spec in specs] == [False, True]


@pytest.mark.parametrize("max_staleness", [1, 2])
async def test_sampling_runs_ahead_by_exactly_the_staleness_allowed(
    stack: Stack, max_staleness: int
) -> None:
    async def slow(_: Any) -> None:
        await asyncio.sleep(0.05)

    stack.fakes.fault["train_step"] = slow
    record = await stack.run(max_staleness=max_staleness)
    staleness = [
        row.metrics["staleness"] for row in RunFolder(Path(record.run_dir)).metrics() if row.step
    ]
    assert max(staleness) == max_staleness and staleness[0] == 0
    assert stack.fakes.calls["generate"] == 8 * 2 + 3 * 4, "nothing sampled is thrown away"


async def test_groups_without_signal_are_replaced_by_the_same_fresh_prompts_each_time(
    stack: Stack,
) -> None:
    """Of 20 problems, the odd ones always have signal and the even ones never."""
    count = iter(range(1_000_000))
    stack.fakes.grade = lambda item: Part(
        value=float(next(count) % 2) if item.row["answer"] % 2 else 0.0
    )
    document = stack.job.model_dump(mode="json") | {"data": {"train": stack.job.data.train}}
    document["sampling"] |= {"refills": 2, "prompts_per_step": 6}
    runs = [await stack.run(job=Job.model_validate(document)) for _ in range(2)]
    first, second = (
        [
            [prompt.index for prompt in stack.folder(run.id).batch(step).prompts]
            for step in range(1, 9)
        ]
        for run in runs
    )
    assert first == second and all(len(set(indices)) == 6 for indices in first)
    batches = [stack.folder(runs[0].id).batch(step) for step in range(1, 9)]
    dropped = [len(batch.dropped) for batch in batches]
    assert [
        row.metrics["dropped_groups"] for row in stack.folder(runs[0].id).metrics() if row.step
    ] == dropped
    assert sum(dropped) > 0 and max(dropped) <= 6 * 2, "at most as many a round as prompts a step"
    assert stack.fakes.calls["generate"] == 2 * (8 * 6 + sum(dropped)), (
        "what was sampled is what was kept or dropped"
    )
    odd = [sum(index % 2 for index in indices) for indices in first]
    assert [len(request.examples) for request in stack.fakes.trained[:8]] == [
        4 * number for number in odd
    ]
    document["sampling"]["refills"] = 0
    plain = await stack.run(job=Job.model_validate(document))
    without = [
        sum(prompt.index % 2 for prompt in stack.folder(plain.id).batch(step).prompts)
        for step in range(1, 9)
    ]
    assert sum(odd) > sum(without), "more is learned from"
