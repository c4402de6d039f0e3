"""Weights & Biases, for jobs that ask for it. Its calls block, so they run off the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from shared.errors import BadRequest
from shared.job import Job
from shared.logs import get_logger

FINISH_S = 60.0


class Tracker:
    """Logs a job's metrics to W&B; does nothing for a job without a `[wandb]` section."""

    def __init__(self, job: Job, job_id: str, run_dir: Path) -> None:
        self._job = job
        self._job_id = job_id
        self._run_dir = run_dir
        self._run: Any = None

    async def start(self) -> None:
        if self._job.wandb is not None:
            self._run = await asyncio.to_thread(self._init)

    async def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run is not None:
            await asyncio.to_thread(self._run.log, metrics, step=step)

    async def finish(self, succeeded: bool) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            finish = asyncio.to_thread(run.finish, exit_code=0 if succeeded else 1)
            try:
                await asyncio.wait_for(finish, FINISH_S)
            except TimeoutError:
                get_logger().warning(
                    "W&B did not take the rest of the run", job=self._job_id, seconds=FINISH_S
                )

    def _init(self) -> Any:
        import wandb

        spec = self._job.wandb
        assert spec is not None
        try:
            return wandb.init(
                project=spec.project,
                entity=spec.entity,
                mode=spec.mode,
                tags=list(spec.tags),
                name=self._job_id,
                id=self._job_id,
                resume="allow",
                dir=str(self._run_dir),
                config=self._job.model_dump(mode="json"),
                settings=wandb.Settings(console="off", silent=True, init_timeout=60),
            )
        except wandb.Error as error:
            raise BadRequest(
                f'Weights & Biases refused the run: {error}; set WANDB_API_KEY, or wandb.mode = "offline"'
            ) from error
