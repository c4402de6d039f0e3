"""The run folder: all files of a job, which outlive every service.

    runs/<job>/job.json           the job as it was submitted; a folder without it belongs to no job
               redis              the identity of the Redis that has the job
               record.json        what a rebuilt record needs besides (`Note`): when it was
                                  submitted, with which key, and how it ended
               .job.json          job.json of a job that is being submitted: Redis may not have it,
                                  and then the folder is removed (run_folders.py)
               data.json          which content its data has, as in its record
               metrics.jsonl      one line per step
               hours, cost        for how long the job has had the services, over all attempts,
                                  and what that has cost
               difficulty.jsonl   which problems taught nothing, a line per step, if the job
                                  skips those
               evaluation.jsonl   the scores of a job of 0 steps: a line for each model and
                                  held-out set, with the metrics of each problem
               weights.jsonl      how each version reached the samplers
               rollouts/000012.msgpack            the scored batch of step 12 (wire.Batch)
               rollouts/000012.ungraded.msgpack   the same before it was graded, if that must wait
               rollouts/000012.trained.msgpack    what the trainer said of its tokens
               rollouts/000012.groups/            finished groups of a step that has no batch yet
               pushed/            groups that were sampled elsewhere, and in what order
               held_out/000010.msgpack    completions of the evaluation after step 10, for people;
                                          of a named set in held_out/<name>/; in a job of 0 steps,
                                          of the model with this number in its report
               checkpoints/       Hugging Face checkpoints, written by the trainer
               summary.json       written once, at the end
               deleted            the job was deleted and its folder left: no record is made of it
    runs/<name>                   points at the newest job of that name

The folder is made when the job is submitted, or by `create` before its first step. Later writers
never make it again: if it was removed, the job pauses. A file is complete or absent
(shared/host/disk.py). A scored batch is written once: a worker with another batch for the step was
superseded, or soon will be.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from services.orchestrator.store import finished
from services.orchestrator.store.finished import FinishedGroup, Place
from services.orchestrator.writable import writing
from shared.errors import Conflict, Failed, HoneError, NotFound
from shared.host import disk
from shared.http import codec
from shared.job import Job
from shared.job.job import differences
from shared.weights.folders import CHECKPOINTS
from shared.wire import (
    TERMINAL,
    Batch,
    GradedRollout,
    JobStatus,
    MetricsRow,
    RolloutList,
    TrainedTokens,
    Wire,
)

OF_SUBMISSION = ("created_at", "key", "fingerprint", "submitted_by", "weight")
"""The fields of a `Note` that do not change after the submission."""


class Note(Wire):
    """The fields of the job's record that a rebuilt one needs, as of when a worker took the job or
    the job ended. Times are Unix seconds. `key` is the idempotency key of its submission,
    `fingerprint` the digest of the submitted job; `submitted_by` and `weight` are as in
    `JobSummary`."""

    created_at: float
    finished_at: float | None = None
    status: JobStatus
    error: str | None = None
    key: str | None = None
    fingerprint: str | None = None
    submitted_by: str | None = None
    weight: float = 1.0
    schema_version: int = 1

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL


BATCH_FILE = re.compile(r"(\d+)(\.ungraded)?\.msgpack")
PUSHED_FOLDER = "pushed"
_HELD_OUT_FILE = re.compile(r"(\d+)\.msgpack")

REDIS = "redis"
"""The file with the identity of the Redis that has the job."""

NOTE, JOB, SUBMITTED = "record.json", "job.json", ".job.json"

HOURS, COST = "hours", "cost"

DIFFICULTY, EVALUATION, SYNCS = "difficulty.jsonl", "evaluation.jsonl", "weights.jsonl"

DELETED = "deleted"
"""The file that says that the job was deleted."""

SHOWN_DIFFERENCES = 3


class BatchExists(Exception):
    """Another scored batch of the step is stored: another worker has the job."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self, job: Job, data: Mapping[str, str], redis: str | None, note: Note) -> None:
        """Makes the folder of a job that is about to be submitted, with everything that a record
        needs. It counts as a job's folder after `submitted`."""
        with writing("run folder", self.path):
            self._make(data, redis)
            disk.write_file(self.path / NOTE, _json(note))
            disk.write_file(self.path / SUBMITTED, _json(job))

    def submitted(self) -> None:
        """Notes that Redis has the job. Changes nothing if that is noted, or a worker has begun the
        job."""
        with writing("run folder", self.path):
            if not (self.path / SUBMITTED).exists():
                return
            with contextlib.suppress(FileNotFoundError):  # a worker has just begun the job
                (self.path / SUBMITTED).replace(self.path / JOB)
            disk.flush(self.path)

    def discard(self) -> None:
        """Removes the folder of a job that was not submitted."""
        with writing("run folder", self.path):
            if self.path.is_dir() and not (self.path / JOB).exists():
                shutil.rmtree(self.path)

    def create(
        self,
        job: Job,
        data: Mapping[str, str] | None = None,
        redis: str | None = None,
        *,
        has_begun: bool = False,
    ) -> None:
        """Makes the folder unless it exists, with the files before the first step: `data.json`,
        `job.json`, the identity of the job's Redis; and points `runs/<name>` here. Doing it again
        changes nothing. Raises Failed, "run_folder_gone", if a job that `has_begun` has no folder;
        Conflict if the folder's job learns something else, so its batches are no replay of
        this job, or if another Redis has the job."""
        self._check_same(job)
        self._check_redis(redis)
        with writing("run folder", self.path):
            if has_begun:
                self._check_there()
            self._make(data or {}, redis)
            disk.make_folder(self.path / "rollouts")
            disk.write_file(self.path / JOB, _json(job))
            (self.path / SUBMITTED).unlink(missing_ok=True)
            _point(self.path.parent / job.name, self.path.name)

    def _make(self, data: Mapping[str, str], redis: str | None) -> None:
        if not self.path.is_dir():
            self.path.mkdir(exist_ok=True)  # not its parents: their volume may be unreachable
            disk.flush(self.path.parent)
        disk.write_file(self.path / "data.json", json.dumps(dict(data)).encode())
        if redis:
            disk.write_file(self.path / REDIS, redis.encode())

    def check_there(self) -> None:
        """Raises Failed, "run_folder_gone", if the folder was removed."""
        with self._writing():
            pass

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """Wraps every write after the job was submitted. Raises as `check_there` and `writing`."""
        with writing("run folder", self.path):
            self._check_there()
            yield

    def _check_there(self) -> None:
        if self._is_there:
            return
        if not self.path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path.parent)
        raise Failed(
            f"the run folder {str(self.path)!r}, or its {JOB}, was removed or moved: nothing more "
            "is written there",
            code="run_folder_gone",
        )

    def _check_same(self, job: Job) -> None:
        file = self.path / JOB
        if not file.exists():
            return
        different = differences(codec.decode_tolerantly(Job, file.read_bytes()), job)
        if different:
            raise Conflict(
                f"{str(file)!r} is of the same job id with another job: "
                f"{'; '.join(different[:SHOWN_DIFFERENCES])}; continuing would contradict the "
                "stored steps: restore that file, or submit the job again"
            )

    def _check_redis(self, redis: str | None) -> None:
        if redis and self.redis() not in (None, redis):
            raise Conflict(
                "the job is in another Redis now, into which `hone recover` took it "
                f"({str(self.path / REDIS)!r} names that Redis); continue the job there, or remove "
                "the file if that Redis no longer exists"
            )

    def redis(self) -> str | None:
        """Returns the identity of the job's Redis; None if it is not known."""
        file = self.path / REDIS
        return file.read_text().strip() if file.exists() else None

    def set_redis(self, redis: str) -> None:
        """Notes the job's Redis from now on."""
        self._write(REDIS, redis.encode())

    def start_at(self, last_step: int) -> int | None:
        """Returns the last recorded step up to `last_step`, or None if there is none. Removes the
        records and held-out completions of later steps, which will be done again, and the groups
        that later weights sampled."""
        with self._writing():
            finished.forget_newer(self._rollouts, last_step)
            for step, path in self._held_out_files():
                if step > last_step:
                    path.unlink(missing_ok=True)
        rows = [row for row in self.metrics() if row.step <= last_step]
        self._write("metrics.jsonl", b"".join(_metrics_line(row) for row in rows))
        return rows[-1].step if rows else None

    def append_metrics(self, row: MetricsRow) -> None:
        self._append("metrics.jsonl", _metrics_line(row))

    def replace_metrics(self, row: MetricsRow) -> None:
        """Writes the row. Replaces a row of the same step."""
        rows = {each.step: each for each in self.metrics()} | {row.step: row}
        self._write("metrics.jsonl", b"".join(_metrics_line(rows[step]) for step in sorted(rows)))

    def write_spent(self, hours: float, cost: float) -> None:
        """Stores the hours for which the job has had the services, and their cost, unless a larger
        value is stored already. Does nothing without the folder."""
        for name, spent, noted in zip((HOURS, COST), (hours, cost), self.spent(), strict=True):
            if self._is_there and spent > noted:
                self._write(name, f"{spent!r}\n".encode())

    def spent(self) -> tuple[float, float]:
        """Returns the stored hours for which the job has had the services, and its cost so far; 0
        if nothing is stored."""
        paths = self.path / HOURS, self.path / COST
        hours, cost = (float(path.read_text()) if path.exists() else 0.0 for path in paths)
        return hours, cost

    def append_verdicts(self, step: int, verdicts: Mapping[int, str]) -> None:
        """Adds the verdicts on the step's groups to `difficulty.jsonl`. They replace an older line
        of the step."""
        row = {"step": step, "verdicts": {str(number): each for number, each in verdicts.items()}}
        self._append(DIFFICULTY, _row(row))

    def verdicts(self) -> dict[int, dict[int, Any]]:
        """Returns the verdicts on the groups of each step, by row number."""
        return {
            row["step"]: {int(number): each for number, each in row["verdicts"].items()}
            for row in self._rows(DIFFICULTY)
        }

    def append_scores(self, row: dict[str, Any]) -> None:
        """Adds the scores of a model on a held-out set to `evaluation.jsonl`."""
        self._append(EVALUATION, _row(row))

    def scores(self) -> list[dict[str, Any]]:
        """Returns the rows of `evaluation.jsonl`, oldest first."""
        return self._rows(EVALUATION)

    def _append(self, name: str, line: bytes) -> None:
        with self._writing(), (self.path / name).open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a crash cut the previous line short
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the file's rows. Ignores a line that a crash cut short."""
        path = self.path / name
        rows: list[dict[str, Any]] = []
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            with contextlib.suppress(ValueError):
                # a line of zeros, or a cut one, is neither valid text nor JSON
                rows.append(json.loads(line))
        return rows

    def write_held_out(self, name: str, step: int, rollouts: Sequence[GradedRollout]) -> None:
        """Stores completions of the evaluation of the held-out set `name` ("": `data.eval`) by the
        weights of `step`, each problem's in a row. Replaces the completions of an earlier attempt.
        No run depends on them."""
        path = self._held_out_path(name, step)
        rollouts = [
            each.model_copy(update={"prompt": ""}) if _same_prompt(each, before) else each
            for before, each in zip([None, *rollouts], rollouts, strict=False)
        ]
        with self._writing():
            disk.make_folder(path.parent)
            disk.write_file(path, codec.pack(RolloutList(step=step, rollouts=tuple(rollouts))))

    def held_out(self, name: str, step: int | None) -> RolloutList:
        """Returns the stored completions of the evaluation after `step`; None: of the newest.
        Raises NotFound naming the evaluated steps."""
        folder = self._held_out_path(name, 0).parent
        matches = map(_HELD_OUT_FILE.fullmatch, (path.name for path in folder.glob("*.msgpack")))
        files = {int(match[1]): folder / match[0] for match in matches if match}
        number = max(files, default=0) if step is None else step
        # A file listed here may have been pruned before it is read.
        with contextlib.suppress(FileNotFoundError):
            if number in files:
                data = files[number].read_bytes()
                stored = codec.decode_tolerantly(RolloutList, data, codec.MSGPACK)
                return stored.model_copy(update={"rollouts": _with_prompts(stored.rollouts)})
        have = f"steps {', '.join(map(str, sorted(files)))}" if files else "none"
        of_set = f" of the set {name!r}" if name else ""
        raise NotFound(
            f"step {number} has no stored held-out completions{of_set}; stored: {have}. They exist "
            f"after each evaluation of {f'the set {name!r}' if name else 'data.eval'} that "
            "[[rewards]] grade"
        )

    def append_sync(self, row: dict[str, Any]) -> None:
        """Notes in `weights.jsonl` how a version reached the samplers. No run depends on it."""
        self._append(SYNCS, _row(row))

    def syncs(self) -> list[dict[str, Any]]:
        """Returns the rows of `weights.jsonl`, oldest first."""
        return self._rows(SYNCS)

    def metrics(self, after_step: int = -1) -> list[MetricsRow]:
        """Returns the rows after `after_step`, in order."""
        path = self.path / "metrics.jsonl"
        rows = MetricsRow.stored(path) if path.exists() else []
        return [row for row in rows if row.step > after_step]

    def stamp(self) -> tuple[object, ...]:
        """Returns a stamp that changes with the metrics, the syncs and the stored batches."""
        state = list[object](sorted(path.name for _, path in self._batch_files()))
        for name in ("metrics.jsonl", SYNCS):
            with contextlib.suppress(FileNotFoundError):
                stat = (self.path / name).stat()
                state.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(state)

    def write_batch(self, batch: Batch) -> None:
        """Stores the step's batch. A graded batch replaces an ungraded one. Raises BatchExists if
        another graded batch is stored; storing the same batch again changes nothing."""
        data = codec.pack(batch)
        path, ungraded = self._batch_path(batch.step), self._batch_path(batch.step, ".ungraded")
        with self._writing():
            if not batch.graded:
                disk.write_file(ungraded, data)
                finished.forget(self._rollouts, batch.step)  # earlier steps may still be under way
                return
            try:
                disk.create_file(path, data)
            except FileExistsError as error:
                # Compares bytes, because a row may hold NaN, which equals nothing. The batch is
                # packed again, because another version of Hone may have written the file.
                if codec.pack(self.batch(batch.step)) != data:
                    raise BatchExists(
                        f"another batch of step {batch.step} is stored in {str(path)!r}"
                    ) from error
            ungraded.unlink(missing_ok=True)
            finished.forget_up_to(self._rollouts, batch.step)
            numbers = [*(prompt.index for prompt in batch.prompts), *batch.dropped_prompts]
            forget_pushed(self.path, max(numbers, default=0))

    def batch(self, step: int) -> Batch:
        """Returns the scored batch of `step`, else the ungraded one. Raises NotFound naming the
        stored steps."""
        for path in (self._batch_path(step), self._batch_path(step, ".ungraded")):
            if path.exists():
                return codec.decode_tolerantly(Batch, path.read_bytes(), codec.MSGPACK)
        steps = self.batch_steps()
        have = f"steps {steps[0]} to {steps[-1]} have" if steps else "no step has yet"
        raise NotFound(f"step {step} has no stored rollouts; {have}")

    def batch_steps(self) -> list[int]:
        """Returns the steps with a stored batch, in order."""
        return sorted({step for step, _ in self._batch_files()})

    def prune_batches(self, first_step: int) -> None:
        """Removes the batches of steps before `first_step`, and held-out completions except step
        0's, with which later ones are compared."""
        with self._writing():
            for step, path in self._held_out_files():
                if 0 < step < first_step:
                    path.unlink(missing_ok=True)
            for step, path in self._batch_files():
                if step < first_step:
                    self._batch_path(step, ".trained").unlink(missing_ok=True)
                    path.unlink(missing_ok=True)

    def write_trained(self, tokens: TrainedTokens) -> None:
        """Stores the trainer's log-probs and entropies of the step's tokens, for readers only."""
        with self._writing():
            disk.write_file(self._batch_path(tokens.step, ".trained"), codec.pack(tokens))

    def trained(self, step: int) -> TrainedTokens | None:
        """Returns the trainer's log-probs and entropies of the step's tokens; None if not
        stored."""
        try:
            data = self._batch_path(step, ".trained").read_bytes()
            return codec.decode_tolerantly(TrainedTokens, data, codec.MSGPACK)
        except (OSError, ValueError, HoneError):
            return None

    def write_groups(self, step: int, groups: Mapping[Place, FinishedGroup]) -> None:
        """Stores finished groups of a step that has no batch yet."""
        with self._writing():
            finished.write(self._rollouts, step, groups)

    def groups(self, step: int) -> tuple[dict[Place, FinishedGroup], list[str]]:
        """Returns the step's finished groups by place, and a sentence for each damaged file.
        Damaged files are removed."""
        with self._writing():
            return finished.read(self._rollouts, step)

    def write_note(self, note: Note) -> None:
        """Writes `record.json`, if the folder exists."""
        self._note(NOTE, _json(note))

    def note(self) -> Note | None:
        """Returns `record.json`; None if there is none."""
        path = self.path / NOTE
        return codec.decode_tolerantly(Note, path.read_bytes()) if path.exists() else None

    def mark_deleted(self) -> None:
        """Notes that the job was deleted, if the folder exists."""
        self._note(DELETED, b"")

    @property
    def is_deleted(self) -> bool:
        """Whether the job was deleted, after it had ended."""
        return (self.path / DELETED).exists()

    def remove(self) -> None:
        """Removes the folder, and the link `runs/<name>` to it. Doing it again changes nothing."""
        with writing("run folder", self.path):
            for link in self.path.parent.iterdir() if self.path.parent.is_dir() else ():
                if link.is_symlink() and link.readlink() == Path(self.path.name):
                    link.unlink()
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.path)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", json.dumps(summary, indent=2).encode())

    def summary(self) -> dict[str, Any] | None:
        """Returns `summary.json`; None if there is none."""
        path = self.path / "summary.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def _note(self, name: str, data: bytes) -> None:
        """Writes a file, also into a folder that is not yet, or no longer, a job's."""
        with writing("run folder", self.path):
            if self.path.is_dir():
                disk.write_file(self.path / name, data)

    @property
    def _is_there(self) -> bool:
        return (self.path / JOB).exists()

    @property
    def checkpoints(self) -> Path:
        """The folder into which the trainer writes the job's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def _rollouts(self) -> Path:
        return self.path / "rollouts"

    def _batch_path(self, step: int, kind: str = "") -> Path:
        return self.path / f"rollouts/{step:06d}{kind}.msgpack"

    def _held_out_path(self, name: str, step: int) -> Path:
        return self.path / "held_out" / name / f"{step:06d}.msgpack"

    def _held_out_files(self) -> Iterator[tuple[int, Path]]:
        for path in (self.path / "held_out").rglob("[0-9]*.msgpack"):
            yield int(path.stem), path

    def _batch_files(self) -> Iterator[tuple[int, Path]]:
        for path in (self.path / "rollouts").glob("*.msgpack"):
            if match := BATCH_FILE.fullmatch(path.name):
                yield int(match[1]), path

    def _write(self, name: str, data: bytes) -> None:
        with self._writing():
            disk.write_file(self.path / name, data)


def _same_prompt(rollout: GradedRollout, before: GradedRollout | None) -> bool:
    return before is not None and before.prompt_index == rollout.prompt_index


def _with_prompts(rollouts: Sequence[GradedRollout]) -> tuple[GradedRollout, ...]:
    """Returns the rollouts, each with its prompt, which the file has once per problem."""
    with_prompts: list[GradedRollout] = []
    for each in rollouts:
        if not each.prompt and with_prompts and _same_prompt(each, with_prompts[-1]):
            each = each.model_copy(update={"prompt": with_prompts[-1].prompt})
        with_prompts.append(each)
    return tuple(with_prompts)


def _json(stored: BaseModel) -> bytes:
    return stored.model_dump_json(indent=2).encode()


def _row(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _metrics_line(row: MetricsRow) -> bytes:
    return json.dumps({"step": row.step, **row.metrics}).encode() + b"\n"


def _point(link: Path, target: str) -> None:
    """Makes `link` a symbolic link to its sibling `target`, unless it links to a newer sibling (ids
    of one name sort by time) or is something else than a link."""
    if link.exists() and (not link.is_symlink() or link.readlink().name > target):
        return
    aside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    aside.symlink_to(target)
    aside.replace(link)
    disk.flush(link.parent)


def forget_pushed(run: Path, number: int) -> None:
    """Removes the files of the pushed groups up to `number`, whose batch is stored."""
    for path in (run / PUSHED_FOLDER).glob("*.msgpack"):
        if path.stem.isdecimal() and int(path.stem) <= number:
            path.unlink(missing_ok=True)
