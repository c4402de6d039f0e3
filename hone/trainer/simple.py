"""The mode Simple: TRL's `GRPOTrainer` trains the job in a process here, without a stack.
`deploy/simple.py` is that process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hone.installed import check_installed, version_of
from hone.trainer import to_trl
from hone.trainer.dataset import Problems
from hone.trainer.modes import Mode
from hone.trainer.progress import view_here
from hone.trainer.run import Measured, TrainOutput
from shared.errors import BadRequest, Failed, how_to_install
from shared.explain import shown
from shared.host.processes import ending_with_parent
from shared.job import Job
from shared.weights.folders import step_of
from shared.wire import Event, MetricsRow

LOOK_S = 0.3
END_S = 20.0
"""Seconds that a run has to stop before it is killed."""

LOG, LOG_SHOWN = "trl.log", 500


@dataclass(frozen=True)
class Simple(Mode):
    """TRL's `GRPOTrainer`, in a process of its own that ends with this one. The run folder is
    `folder`/<name>-<time>; None: `simple` in HONE_RUNS_DIR."""

    folder: str | Path | None = None

    def check(self, job: Job) -> None:
        folder: Any = self.folder
        if folder is not None and (not isinstance(folder, str | Path) or Path(folder).is_file()):
            raise BadRequest(f"folder is {shown(folder)}; expected a folder, or one to be made")
        to_trl.check(job)

    def start(self, job: Job, sources: Mapping[str, Problems]) -> SimpleRun:
        """Returns the run, as soon as its process has begun. Raises BadRequest for what TRL cannot
        do, and if TRL is missing."""
        from shared.settings import load_settings

        self.check(job)
        if version_of("trl") is None:
            raise BadRequest(f"the mode Simple runs TRL: {how_to_install('simple')}")
        check_installed("simple", "orchestrator")
        parent = Path(self.folder or load_settings().runs_dir / "simple").resolve()
        path = parent / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        path.mkdir(parents=True)
        rows = {
            key: source.saved(path / f"{key}.jsonl")
            for key, source in sources.items()
            if source.lines
        }
        job = job.model_copy(update={"data": job.data.model_copy(update=rows)})
        return SimpleRun.begin(path, job)


class SimpleRun(Measured):
    """A run of TRL's trainer, with its run folder at `path`."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(path.name)
        self.path = path
        self._process = process

    @classmethod
    def begin(cls, path: Path, job: Job) -> Self:
        with (path / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.simple", str(path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"TOKENIZERS_PARALLELISM": "false"} | os.environ,
                start_new_session=True,  # Ctrl-C is for this process, which then cancels
                preexec_fn=ending_with_parent(),
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it may end at once
            stdin.write(job.model_dump_json().encode())
        return cls(path, process)

    def __repr__(self) -> str:
        return f"<{self.status} run of TRL in {str(self.path)!r}>"

    @property
    def status(self) -> str:
        """ "running", "succeeded", "failed" or "cancelled"."""
        if self._process.poll() is None:
            return "running"
        found = str(self._read("record.json").get("status"))
        return found if found in ("succeeded", "cancelled") else "failed"

    def wait(self, timeout_s: float | None = None) -> TrainOutput:
        """Returns what training came to. Raises TimeoutError after `timeout_s`, and Failed for a
        run that failed or was cancelled."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"run {self.id} continues after {timeout_s:g} s") from error
        if self.status != "succeeded":
            raise Failed(f"run {self.id} {self.status}: {self._why()}")
        return TrainOutput.of(self._rows(), self._read("summary.json"))

    def follow(self) -> TrainOutput:
        """Shows progress until the end, and returns as `wait` does. Ctrl-C ends the run."""
        try:
            with view_here() as view:
                for event in self.events():
                    view.show(event)
        except KeyboardInterrupt:
            self.cancel()
            raise
        return self.wait()

    def cancel(self) -> None:
        """Ends the run; what it wrote stays."""
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        finally:  # also at a second Ctrl-C
            self._process.kill()
            self._process.wait()

    def checkpoint(self, to: str | Path | None = None, *, step: int | None = None) -> Path:
        """Returns the folder of the newest checkpoint, or of `step`, as `transformers` loads it;
        copied to `to`, unless that is None."""
        found = {
            each: path
            for path in (self.path / "checkpoints").glob("*")
            if (each := step_of(path.name)) is not None and step in (None, each)
        }
        if not found:
            raise self._no_checkpoint(step)
        newest = found[max(found)]
        return newest if to is None else Path(shutil.copytree(newest, to, dirs_exist_ok=True))

    def events(self) -> Generator[Event]:
        """Yields an event for each step and evaluation, until the process ends."""
        yield self._event("status", f"TRL trains; its output is in {str(self.path / LOG)!r}")
        shown, ended = -1, False
        while not ended:
            ended = self._process.poll() is not None
            for row in self._rows():
                if row.step <= shown:
                    continue
                shown, steps = row.step, self._read("job.json").get("steps", 0)
                told = {"step": row.step, "steps": steps, "metrics": row.metrics}
                if row.step:
                    yield self._event("step", f"step {row.step} of {steps}", told)
                if (held_out := row.metrics.get("eval/reward")) is not None:
                    said = f"held-out reward {held_out:.3f} after step {row.step}"
                    yield self._event("eval", said, told)
            time.sleep(0 if ended else LOOK_S)

    def _event(self, kind: Any, message: str, data: dict[str, Any] | None = None) -> Event:
        return Event(
            id="0", job_id=self.id, time=time.time(), type=kind, message=message, data=data or {}
        )

    def _rows(self) -> Sequence[MetricsRow]:
        path = self.path / "metrics.jsonl"
        return MetricsRow.stored(path) if path.exists() else ()

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return json.loads(path.read_bytes()) if path.exists() else {}

    def _why(self) -> str:
        said = (self.path / LOG).read_text(errors="replace").strip()[-LOG_SHOWN:]
        return self._read("record.json").get("error") or f"its output ends: {said}"
