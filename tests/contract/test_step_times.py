"""Who waited for whom, in the metrics of a job's steps. What is asserted holds on a machine of any
speed."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from shared.wire import MetricsList
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

PARTS = ("wait_for_batch", "store", "train", "sync", "checkpoint", "eval", "record")
"""What a step is made of, one after another."""

TRAIN_S = 0.05


async def slow(_: Any) -> None:
    await asyncio.sleep(TRAIN_S)


async def rows_of(stack: Stack, max_staleness: int) -> list[dict[str, float]]:
    stack.fakes.fault["train_step"] = slow
    record = await stack.run(max_staleness=max_staleness)
    assert record.status == "succeeded"
    found = await stack.client.get(f"/v1/jobs/{record.id}/metrics?after_step=0", MetricsList)
    assert [row.step for row in found.rows] == list(range(1, 9))
    return [row.metrics for row in found.rows]


async def test_what_a_step_is_made_of_does_not_exceed_it_and_waits_in_turns(stack: Stack) -> None:
    rows = await rows_of(stack, 0)
    for metrics in rows:
        parts_s = sum(metrics.get(f"time/{part}", 0.0) for part in PARTS)
        assert parts_s <= metrics["time/step"] + 1e-6
    assert [row for row, metrics in enumerate(rows, 1) if "time/checkpoint" in metrics] == [8]
    assert [row for row, metrics in enumerate(rows, 1) if "time/eval" in metrics] == [4, 8]
    assert rows[0]["time/record"] == 0.0 and all(row["time/record"] > 0 for row in rows[1:])
    assert rows[0]["time/wait_for_trainer"] == 0.0
    for before, after in pairwise(rows):
        behind_s = sum(before[f"time/{part}"] for part in ("store", "train", "sync"))
        assert after["time/wait_for_trainer"] >= behind_s >= TRAIN_S
        assert after["time/wait_for_batch"] >= after["time/generate"]
    check_utilization(rows)


def check_utilization(rows: list[dict[str, float]]) -> None:
    """That of a service is a share of the step."""
    for metrics in rows:
        step_s = metrics["time/step"]
        shares = {name: metrics[f"utilization/{name}"] for name in ("rollout", "trainer", "reward")}
        assert all(0.0 <= share <= 1.0 + 1e-6 for share in shares.values()), shares
        asked_s = sum(metrics.get(f"time/{part}", 0.0) for part in ("train", "sync", "checkpoint"))
        assert TRAIN_S <= shares["trainer"] * step_s <= asked_s + 1e-3


async def test_with_staleness_sampling_does_not_wait_for_training(stack: Stack) -> None:
    """The samplers are slower here than the trainer, so the next batch is never held back."""
    slept = asyncio.Event()

    async def slower(_: Any) -> None:
        slept.set()
        await asyncio.sleep(4 * TRAIN_S)

    stack.fakes.fault["generate"] = slower
    rows = await rows_of(stack, 2)
    waits_s = [row["time/wait_for_trainer"] for row in rows]
    assert slept.is_set() and sorted(waits_s)[len(waits_s) // 2] == 0.0
    check_utilization(rows)
