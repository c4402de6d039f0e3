"""The service killed in the middle of a batch: asked again it is graded once, and nothing is left
behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shared.http.client import Client
from shared.job import RewardSpec
from shared.wire import ScoreItem, ScoreRequest, ScoreResult
from tests.support.reward_helpers import processes_in, processes_of, user_namespaces_of
from tests.support.reward_service import free_port, running_service

pytestmark = pytest.mark.slow

NUM_ITEMS = 24

OWN = """
import hone
class Runs(hone.Reward):
    def score_batch(self, prompts, completions, target):
        programs = [{"code": c, "expression": c.splitlines()[-1]} for c in completions]
        runs = self.execute_batch_in_sandbox(programs)
        return [float(run.value == t) for run, t in zip(runs, target)]
"""


async def test_a_batch_is_graded_once_although_the_service_is_killed_in_it(tmp_path: Path) -> None:
    port = free_port()
    programs = RewardSpec(grader="python_value", params={"timeout_s": 10.0})
    items = tuple(
        ScoreItem(
            prompt="", completion=f"import time\ntime.sleep(0.05)\n{number}", row={"target": number}
        )
        for number in range(NUM_ITEMS)
    )
    request = ScoreRequest(
        items=items, rewards=(programs, RewardSpec(file="own.py", function="Runs", source=OWN))
    )
    async with Client("reward", f"http://127.0.0.1:{port}") as client:
        with running_service(port, HONE_SANDBOX_SLOTS="2", TMPDIR=str(tmp_path)) as first:
            asked = asyncio.create_task(
                client.call("POST", "/score", request, ScoreResult, deadline_s=200, key="batch")
            )
            await asyncio.sleep(0.5)
            assert not asked.done(), "the batch is under way"
            namespaces = (
                user_namespaces_of(processes_of(first.process.pid))
                - user_namespaces_of([os.getpid()])
                - {None}
            )
            first.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.process.wait)
            for _ in range(100):
                await asyncio.sleep(0.1 if processes_in(namespaces) else 0)
            assert processes_in(namespaces) == []
        with running_service(port, HONE_SANDBOX_SLOTS="2", TMPDIR=str(tmp_path)) as second:
            result = await asked
            metrics = second.get("/metrics")
    assert [score.value for score in result.scores] == [2.0] * NUM_ITEMS
    assert f"hone_reward_completions {NUM_ITEMS}.0" in metrics
    assert list(tmp_path.iterdir()) == []
