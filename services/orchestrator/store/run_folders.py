"""Keeps a job's run folder in agreement with its record in Redis. A job is accepted once it is in
both, so that `hone recover` finds it even if Redis lost it before it began. The job's end is
written into the folder, so that a rebuilt record has it. Also serves the files of checkpoints: the
files in the manifest that the trainer wrote."""

from __future__ import annotations

import asyncio
import functools
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.orchestrator.store.connection import StoreEmptied, StoreUnavailable
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import Submission, named_sources, unsubmitted
from services.orchestrator.store.store import Store
from services.orchestrator.writable import ANSWERS_WITHIN_S
from shared.errors import BadRequest, Conflict, Failed, Forbidden, HoneError, NotFound, Unavailable
from shared.host.logs import get_logger
from shared.host.processes import run_in_thread
from shared.http.gate import own_jobs_of
from shared.job import Job
from shared.weights.folders import MANIFEST, STATE, StoredFile, step_of
from shared.wire import CheckpointFile, JobRecord, JobState

WRITTEN_WITHIN_S = 30.0
"""Seconds in which a run folder is made: some ten small files and names reach the disk."""

DISCARDED_WITHIN_S = 3.0
"""Longest wait, in seconds, of a refused submission for the removal of its folder."""

UNSUBMITTED_S = 900.0
"""Age in seconds at which a folder is removed whose job is not in Redis: every submission is done
by then. Also the seconds between two searches for such folders."""


async def accept(store: Store, submission: Submission) -> JobRecord:
    """Returns the record and raises as `Store.submit`; raises Unavailable if the run folder cannot
    be written. The folder is removed unless Redis has the job, or may have it."""
    await check_allowed(store, submission.job, submission.runs_dir)
    await check_start(store, submission.job, submission.runs_dir)
    folder, redis = RunFolder(submission.run_dir), store.identity
    prepare = functools.partial(
        folder.prepare, submission.job, submission.data, redis, submission.note
    )
    try:
        await _written(prepare)
        record = await store.submit(submission)
    except StoreUnavailable:
        raise  # Redis may have the job all the same, and its worker needs the folder
    except HoneError:
        await _discard(folder)
        raise
    if record.id == submission.id:
        await _written(folder.submitted)
    else:
        await _discard(folder)
    return record


async def check_allowed(store: Store, job: Job, runs_dir: Path, present: Job | None = None) -> None:
    """Checks what a request by a key of access "own" names, in any route. Raises NotFound for a
    path in a run folder of a job that it may not see, as for a job that does not exist; and
    Forbidden for a priority above 0, which would overtake other keys' jobs. What the `present` job
    has already may stay."""
    if (name := own_jobs_of()) is None:
        return
    most = max(0, present.priority if present else 0)
    if job.priority > most:
        raise Forbidden(
            f"priority is {job.priority}, expected {most} or less: key {name!r} has access 'own', "
            "and jobs of other keys would wait"
        )
    for named in _named_paths(job) - (_named_paths(present) if present else set()):
        await _visible_path(store, named, runs_dir.resolve())


async def _visible_path(store: Store, named: str, root: Path) -> Path:
    """Returns the resolved path. Raises NotFound for a path in the run folder of a job that the
    caller may not see. Run folders are in `root`."""
    path = await run_in_thread(lambda: Path(named).resolve())
    if path.is_relative_to(root) and path != root:
        await store.get(path.relative_to(root).parts[0])
    return path


def _named_paths(job: Job) -> set[str]:
    """Returns all values that may be a path on this host: models, the first checkpoint, and files
    of data."""
    models = (job.model, *(each.model for each in job.evaluated_models))
    values = (*models, job.training.start_from, *named_sources(job))
    return {value for value in values if value is not None and "\0" not in value}


async def complete_submission(store: Store, job: Job, key: str | None) -> JobRecord | None:
    """Returns and raises as `Store.submitted`. Completes the run folder, because the submission may
    have been interrupted. Raises Busy for a new job of an API key that has as many as it may."""
    record = await store.submitted(job, key)
    if record:
        await _written(RunFolder(Path(record.run_dir)).submitted)
    else:
        await store.check_quota()
    return record


async def keep_unsubmitted_removed(store: Store, runs_dir: Path) -> None:
    """Removes, again and again, the folders of submissions that were interrupted before Redis had
    the job. No such submission was answered."""
    while True:
        try:
            await remove_unsubmitted(store, runs_dir)
        except (HoneError, OSError) as error:
            get_logger().warning("unsubmitted run folders not removed", reason=str(error))
        await asyncio.sleep(UNSUBMITTED_S)


async def remove_unsubmitted(store: Store, runs_dir: Path) -> None:
    """Removes such folders once. Raises OSError, Failed, and the store's errors."""
    latest = time.time() - UNSUBMITTED_S
    for folder in await run_in_thread(lambda: unsubmitted(runs_dir, latest)):
        is_own = await run_in_thread(folder.redis) == store.identity
        if is_own and await store.status(folder.path.name) is None:
            await run_in_thread(folder.discard)
            get_logger().info("unsubmitted run folder removed", folder=str(folder.path))


async def note_end(store: Store, job_id: str) -> None:
    """Notes in the run folder, if it exists, how the job has ended. Faults are only logged, because
    the job has ended; a record rebuilt without the note would be paused. If the disk hangs, the
    caller does not wait: the note is then written at the next start."""
    try:
        note = await store.note(job_id)
        if note.has_ended:
            record = await store.get(job_id)
            folder = RunFolder(Path(record.run_dir))
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await run_in_thread(lambda: folder.write_note(note))
    except TimeoutError:
        get_logger().warning("end not noted in the run folder", job=job_id, reason="its disk hangs")
    except HoneError as error:
        get_logger().warning("end not noted in the run folder", job=job_id, reason=error.detail)


async def note_ends(store: Store) -> None:
    """Notes ends that were not noted: the process died before, its disk was full, or the job was
    cancelled while a worker took another one."""
    try:
        for job_id in await store.ended_ids():
            await _note_missing_end(store, job_id)
    except (StoreEmptied, StoreUnavailable) as error:
        get_logger().warning("ends not noted in the run folders", reason=error.detail)


async def cancel(store: Store, job_id: str) -> JobState:
    """Cancels as `Store.cancel`, and writes the end into the run folder if the job has ended."""
    state = await store.cancel(job_id)
    if state.status == "cancelled":
        await note_end(store, job_id)
    return state


async def cancel_if_active(store: Store, job_id: str) -> JobState:
    """Cancels as `cancel`, but raises no error for a job that has already ended."""
    try:
        return await cancel(store, job_id)
    except Conflict:
        return await store.state(job_id)


async def _written(write: Callable[[], None], within_s: float = WRITTEN_WITHIN_S) -> None:
    try:
        async with asyncio.timeout(within_s):
            await run_in_thread(write)
    except Failed as error:
        raise Unavailable(error.detail) from error
    except TimeoutError as error:
        raise Unavailable(
            f"the run folder was not written within {within_s:g} s; check HONE_RUNS_DIR and its "
            "disk"
        ) from error


async def _discard(folder: RunFolder) -> None:
    """Removes the folder. A folder that cannot be removed now belongs to no job, and is removed
    later."""
    try:
        await _written(folder.discard, DISCARDED_WITHIN_S)
    except Unavailable as error:
        reason = error.detail
        get_logger().warning("run folder not removed", folder=str(folder.path), reason=reason)


async def _note_missing_end(store: Store, job_id: str) -> None:
    """Notes one job's end. A fault of this job does not delay the other ones."""
    try:
        folder = await store.ended_run_dir(job_id)
        if folder and not await asyncio.to_thread(_is_noted, RunFolder(folder)):
            await note_end(store, job_id)
    except (StoreEmptied, StoreUnavailable):
        raise
    except HoneError as error:
        get_logger().warning("end not looked for", job=job_id, reason=error.detail)


def _is_noted(folder: RunFolder) -> bool:
    """Returns whether nothing needs to be noted: the folder has the job's end, or is gone."""
    try:
        note = folder.note()
    except (HoneError, OSError) as error:
        get_logger().warning("run folder not read", folder=str(folder.path), reason=str(error))
        return True
    return note.has_ended if note else not folder.path.is_dir()


# --- checkpoints ----------------------------------------------------------------------------------

_FILES = TypeAdapter(dict[str, StoredFile])


def checkpoint_step(path: Path, checkpoints: Path) -> int | None:
    """Returns the step of the checkpoint at or around `path`; None for a path in no checkpoint of
    the folder `checkpoints`."""
    inside = path.resolve().relative_to(checkpoints.resolve()).parts
    return step_of(inside[0]) if inside else None


def files_of(folder: Path) -> tuple[CheckpointFile, ...]:
    """Returns the files of the checkpoint at `folder`, its manifest included, by name. Raises
    NotFound for a removed checkpoint, and Failed for an unreadable manifest."""
    try:
        text = (folder / MANIFEST).read_bytes()
        files = _FILES.validate_python(json.loads(text)["files"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"the checkpoint {str(folder)!r} no longer exists") from error
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Failed(f"{str(folder / MANIFEST)!r} cannot be read: {why:.300}") from error
    files[MANIFEST] = StoredFile(size_bytes=len(text), crc32=zlib.crc32(text))
    return tuple(
        CheckpointFile(name=name, size_bytes=file.size_bytes, crc32=file.crc32)
        for name, file in sorted(files.items())
    )


def path_of(folder: Path, name: str) -> Path:
    """Returns the path of the file `name`. Raises NotFound for a file that is not in the
    checkpoint, and Failed if its size differs from the manifest."""
    sizes = {file.name: file.size_bytes for file in files_of(folder)}
    path = folder / name
    if name not in sizes or not path.resolve().is_relative_to(folder.resolve()):
        some = ", ".join([*sizes][:10]) + (", ..." if len(sizes) > 10 else "")
        raise NotFound(f"the checkpoint has no file {name!r:.200}; its files are {some}")
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{str(path)!r} no longer exists") from error
    if size != sizes[name]:
        raise Failed(
            f"{str(path)!r} is damaged: it has {size} bytes; expected {sizes[name]}, as the "
            "checkpoint's manifest says; download another checkpoint"
        )
    return path


async def check_start(store: Store, job: Job, runs_dir: Path) -> None:
    """Raises BadRequest for a checkpoint that the job cannot begin with (`training.start_from`),
    and NotFound for a checkpoint of a job that the caller may not see."""
    if (start := job.training.start_from) is None:
        return
    root = runs_dir.resolve()
    path = await _visible_path(store, start, root)
    await run_in_thread(lambda: _check_fits(job, start, path, root))


def _check_fits(job: Job, start: str, folder: Path, runs_dir: Path) -> None:
    """Raises BadRequest unless `start`, resolved to `folder`, is a checkpoint in `runs_dir` whose
    weights are as the job's."""
    if not folder.is_relative_to(runs_dir) or not (folder / STATE).is_dir():
        raise BadRequest(
            f"training.start_from is {start!r:.200}, which is no checkpoint below HONE_RUNS_DIR; "
            "expected the full path of one, as `hone download JOB --list` shows it"
        )
    try:
        source = Job.model_validate(json.loads((folder / MANIFEST).read_bytes())["job"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise BadRequest(f"training.start_from: {str(folder / MANIFEST)!r}: {why:.300}") from error
    theirs, ours = _adapter(source), _adapter(job)
    if theirs != ours:
        raise BadRequest(
            f"training.start_from is a checkpoint with {theirs}, and the job has {ours}; expected "
            "the same"
        )


def _adapter(job: Job) -> str:
    """Returns the properties of the job's adapter that a checkpoint must share."""
    if (lora := job.lora) is None:
        return "all weights"
    layers = lora.target_modules
    return f"lora of rank {lora.rank}, alpha {lora.alpha:g}, target_modules {layers!r}"
