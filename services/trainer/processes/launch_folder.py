"""The launcher's folder: state that outlives the ranks, so that new ranks continue. It is removed
with the launcher.

job              the loaded job's body, which new ranks load again by themselves
budget.json      how many tokens of a micro-batch fit into memory, after more did not
failure          why the ranks ended, by the first of them that knows
past.json        how often ranks were started again, and after what
writing          locked by each rank while a checkpoint is written, by the launcher once it stops
life-<n>/        where the n-th ranks meet: torchrun's rendezvous and logs, the store
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.errors import Unavailable
from shared.http import codec
from shared.wire import TrainerJob

POLL_S = 0.05

AGENT_PID = "TRAINER_AGENT_PID"
"""The variable with the process that the ranks must not outlive: see `agent.py`."""


@dataclass(frozen=True)
class RestartHistory:
    """How often the ranks were restarted, and the latest reason."""

    restarts: int = 0
    last_failure: str | None = None


class LaunchFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def new_life(self, past: RestartHistory) -> Path:
        """Returns an empty folder in which new ranks meet, after the previous ranks have ended."""
        _replace(self.path / "past.json", json.dumps(asdict(past)).encode())
        (self.path / "failure").unlink(missing_ok=True)
        life = self.path / f"life-{past.restarts}"
        life.mkdir()
        return life

    def past(self) -> RestartHistory:
        return RestartHistory(**json.loads((self.path / "past.json").read_bytes()))

    def remember_job(self, request: TrainerJob | None) -> None:
        """Keeps the loaded job's body; None: forgets it."""
        if request is None:
            (self.path / "job").unlink(missing_ok=True)
        else:
            _replace(self.path / "job", codec.encode(request, codec.MSGPACK))

    def job(self) -> TrainerJob | None:
        try:
            return codec.decode(TrainerJob, (self.path / "job").read_bytes(), codec.MSGPACK)
        except FileNotFoundError:
            return None

    def remember_budget(self, request: TrainerJob, tokens: int) -> None:
        """Keeps `tokens` as the size of micro-batches that may fit, because the job's own did
        not."""
        _replace(self.path / "budget.json", json.dumps([*_budget_key(request), tokens]).encode())

    def budget(self, request: TrainerJob) -> int:
        """Returns the kept size for exactly this job, or the job's own."""
        asked = request.job.memory.micro_batch_tokens
        try:
            *key, tokens = json.loads((self.path / "budget.json").read_bytes())
        except FileNotFoundError:
            return asked
        return min(asked, int(tokens)) if key == _budget_key(request) else asked

    def remember_failure(self, sentence: str) -> None:
        """Keeps why the ranks end, unless a reason is kept already: the first one knows best."""
        if self.failure() is None:
            _replace(self.path / "failure", sentence.encode())

    def failure(self) -> str | None:
        try:
            return (self.path / "failure").read_bytes().decode()
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Each rank writes a checkpoint in this block. Raises Unavailable once the launcher was
        asked to stop."""
        with (self.path / "writing").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Unavailable("the trainer stops, and begins no checkpoint") from error
            yield

    def end_writing(self, within_s: float) -> bool:
        """Waits at most `within_s` seconds until no rank writes a checkpoint, and returns whether
        none does. Then no rank begins one while this process lives, because it holds the lock."""
        lock = os.open(self.path / "writing", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + within_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            time.sleep(POLL_S)


def _budget_key(request: TrainerJob) -> list[Any]:
    return [request.job_id, request.job.memory.model_dump(mode="json")]


def _replace(path: Path, data: bytes) -> None:
    # Ranks run out of memory, and fail, at the same moment: each has a name of its own.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    aside.write_bytes(data)
    aside.replace(path)
