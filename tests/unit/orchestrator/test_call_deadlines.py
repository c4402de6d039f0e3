"""How long a job waits for each call to its trainer: a call that hangs is noticed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.orchestrator.samplers.clients import TrainerClient
from services.orchestrator.samplers.status import Caller
from shared.job import Job
from shared.settings import Settings
from shared.wire import StepTotals
from tests.support.job_records import JOB

SETTINGS = Settings(operation_deadline_s=1800, generate_deadline_s=600, rollout_adapters=3)


class Recorder:
    """A client that notes the deadline of each call, by its path."""

    def __init__(self) -> None:
        self.deadlines_s: dict[str, float] = {}

    async def call(self, _method: str, path: str, *_: Any, deadline_s: float, **__: Any) -> Any:
        self.deadlines_s[path] = deadline_s


@pytest.mark.parametrize(
    ("lora", "waits_s"),
    [(None, 0), ({"rank": 4}, 2 * 1800)],  # three jobs share the trainer: for a step of two others
    ids=["alone", "shared"],
)
async def test_publishing_and_checkpoints_have_the_short_deadline(
    lora: dict[str, int] | None, waits_s: int
) -> None:
    job = Job.model_validate(JOB.model_dump(exclude_unset=True) | ({"lora": lora} if lora else {}))

    async def free_gpu() -> None:
        pass

    trainer = TrainerClient(Caller(job, SETTINGS), free_gpu)
    recorder = Recorder()
    trainer.client = cast(Any, recorder)
    await trainer.train_step(1, (), StepTotals.model_construct())
    await trainer.publish_weights(1, "shm")
    await trainer.checkpoint(1)
    assert recorder.deadlines_s == {
        "/train_step": 1800 + waits_s,
        "/publish_weights": 300 + waits_s,
        "/checkpoints": 300 + waits_s,
    }
