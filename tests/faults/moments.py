"""What a job does at a moment, seen in the requests that pass and in the files of its run
folder."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from pathlib import Path

from services.orchestrator.store import finished
from shared.job import Job

PATHS = {
    "/generate": "sampling",
    "/episodes/step": "acting",
    "/score": "grading",
    "/train_step": "training",
    "/publish_weights": "publishing",
    "/reload_weights": "loading",
    "/checkpoints": "checkpointing",
}

LOOK_S = 0.002
"""Seconds between two looks at the run folder."""


class Moments:
    """`times` are when each step's row was there first. `now` is the stage that began last."""

    def __init__(self) -> None:
        self.now = ""
        self.times: dict[int, float] = {}
        self._evaluating = False
        self._waiting: dict[str, asyncio.Event] = {}

    @property
    def furthest(self) -> int:
        """The newest step with a row, or -1."""
        return max(self.times, default=-1)

    async def begins(self, stage: str) -> None:
        """Returns when the stage begins next."""
        await self._waiting.setdefault(stage, asyncio.Event()).wait()

    def seen(self, path: str, key: str) -> None:
        """Hears of a request."""
        stage = PATHS.get(path)
        if stage == "sampling":
            self._evaluating = ":eval:" in key
        if self._evaluating and stage in ("sampling", "grading"):
            stage = "evaluating"
        if stage:
            self._note(stage)

    async def look(self, run: Path, job: Job) -> None:
        """Follows the run folder until it is cancelled."""
        stored, rows_at, pushed_at = -1, None, None
        while True:
            await asyncio.sleep(LOOK_S)
            if (now := _size(run / "weights.jsonl")) != pushed_at:
                pushed_at = now
                if _is_last_before_row(_last(run / "weights.jsonl").get("version", -1), self, job):
                    self._note("committing")
            if (now := _size(run / "metrics.jsonl")) != rows_at:
                rows_at = now
                newest = _last(run / "metrics.jsonl").get("step", -1)
                if newest > self.furthest:
                    self.times[newest] = time.monotonic()
                    self._note("committing")
            if (step := _sampled(run / "rollouts", job)) > stored:
                stored = step
                self._note("storing")

    def _note(self, stage: str) -> None:
        self.now = stage
        if waiting := self._waiting.pop(stage, None):
            waiting.set()


def _is_last_before_row(version: int, moments: Moments, job: Job) -> bool:
    """Whether nothing but the row is missing of the step that made this version."""
    due = (job.evaluation.every, job.checkpoints.every, job.steps)
    return version > moments.furthest and version > 0 and all(version % every for every in due)


def _size(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_ino


def _last(path: Path) -> dict[str, int]:
    """Returns the last whole line of a file, if there is one."""
    try:
        lines = path.read_text().split("\n")[:-1]
        return json.loads(lines[-1])
    except (FileNotFoundError, IndexError, json.JSONDecodeError):
        return {}


def _sampled(rollouts: Path, job: Job) -> int:
    """Returns the newest step whose groups are all on disk and whose batch is not, or -1."""
    found = [-1]
    try:
        for folder in rollouts.glob("*.groups"):
            step = int(folder.name.partition(".")[0])
            files = tuple(sorted(folder.glob("*.msgpack")))
            if _num_groups(rollouts, step, files) >= job.sampling.prompts_per_step:
                found.append(step)
    except FileNotFoundError:  # it went meanwhile
        pass
    return max(found)


@functools.lru_cache(maxsize=64)
def _num_groups(rollouts: Path, step: int, _files: tuple[Path, ...]) -> int:
    """Returns how many groups of the first round these files hold, read once."""
    groups, _ = finished.read(rollouts, step)
    return sum(round == 0 for round, _ in groups)
