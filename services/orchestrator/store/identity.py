"""Identifies the Redis that has the jobs of a folder of runs, and rebuilds records that Redis lost
(`hone recover`). Both folder and Redis keep the Redis's identity, so that a Redis that lost its
data is not mistaken for the Redis of the jobs. The folder's note is by URL: several stacks, each
with a Redis of its own, may share a folder of runs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from services.orchestrator.store import keys
from services.orchestrator.store.connection import Connection
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import WAS_DELETED, FoundRun, recovered_fields
from services.orchestrator.writable import make_runs_dir, writing
from shared.errors import Failed
from shared.host import disk
from shared.host.logs import get_logger
from shared.host.processes import run_in_thread
from shared.job import Job
from shared.wire import RecoveredJob

LOOK_AT_NOTE_S = 2.0
"""Seconds between two looks at whether the folder's jobs are still in the Redis in use."""

PAUSED = (
    "its record was lost with Redis's data and rebuilt from its run folder, which does not say "
    "that it has ended; `hone resume {id}` {goes_on}"
)
"""Why a job with a rebuilt record is paused."""

TOO_OLD = "ended before the newest ended jobs, and Redis keeps no others"


async def identify(connection: Connection) -> str:
    """Returns the identity stored in this Redis; a new Redis gets one."""
    client = connection.client
    await connection.reach(client.set(keys.STORE, secrets.token_hex(16), nx=True))
    return str(await connection.reach(client.get(keys.STORE)))


async def watch(connection: Connection, runs_dir: Path, deciding: asyncio.Lock) -> None:
    """Refuses the connection once `hone recover` has taken the jobs of `runs_dir` to another Redis.
    The lock `deciding` is held while the Redis to use is decided; nothing else waits for the
    folder. An unreadable note is ignored."""
    while True:
        async with deciding:
            if not connection.refused:
                await _check_still(connection, runs_dir)
        await asyncio.sleep(LOOK_AT_NOTE_S)


async def _check_still(connection: Connection, runs_dir: Path) -> None:
    try:
        noted = await run_in_thread(lambda: _noted(connection, runs_dir))
    except Failed as error:
        get_logger().warning("which Redis has the jobs is not known", reason=error.detail)
        return
    if noted not in (None, connection.identity):
        connection.refused = (
            f"the jobs of {str(runs_dir)!r} are in another Redis now, into which `hone recover` "
            "took them, and this orchestrator still uses the Redis before; point HONE_REDIS_URL "
            "at the other one, and start this orchestrator again"
        )


async def check(connection: Connection, runs_dir: Path) -> str | None:
    """Returns why this Redis does not have the jobs of `runs_dir`, and refuses the connection. If
    it has them, returns None, opens the connection, and notes this Redis in the folder. Raises
    Failed for a folder that cannot be read or written."""
    identity = await identify(connection)
    noted = await asyncio.to_thread(_noted, connection, runs_dir)
    is_another = noted not in (None, identity)
    if is_another and (num_runs := await asyncio.to_thread(_count_runs, runs_dir)):
        connection.refused = (
            "the Redis at HONE_REDIS_URL is not the Redis that had the jobs of "
            f"{str(runs_dir)!r} ({num_runs} run folder(s)): it was emptied, or it is another one; "
            "bring its file back (appendonlydir, up to Redis 6 appendonly.aof) and start it again, "
            "or let `hone recover` rebuild the jobs from their run folders; until then no job is "
            "accepted, shown or run"
        )
    else:
        adopt(connection, identity, runs_dir)
    return connection.refused


def adopt(connection: Connection, identity: str, runs_dir: Path) -> None:
    """Notes in `runs_dir` that the Redis with this identity has its jobs."""
    if _noted(connection, runs_dir) != identity:
        make_runs_dir(runs_dir)
        with writing("folder", runs_dir):
            disk.write_file(_note(connection, runs_dir), identity.encode())
    connection.accept(identity)


def others(connection: Connection, runs_dir: Path) -> dict[str, Path]:
    """Returns the other Redis servers that have jobs of `runs_dir`, apart from the Redis at this
    connection's URL: by identity, the file with the note."""
    notes = {path.read_text().strip(): path for path in sorted(runs_dir.glob(".redis-*"))}
    notes.pop(_noted(connection, runs_dir) or "", None)
    return notes


def unmounted(connection: Connection, runs_dir: Path) -> str | None:
    """Returns a message if the folder lacks the note of its Redis, as the empty mount point of a
    missing volume does; None if it has the note. Raises Failed as `check`."""
    if connection.refused or _noted(connection, runs_dir) == connection.identity:
        return None
    return (
        f"folder {str(runs_dir)!r} has no note of the Redis that has its jobs: is its volume "
        "mounted? (HONE_RUNS_DIR)"
    )


async def rebuild(
    connection: Connection, runs: Sequence[FoundRun], runs_dir: Path, key_ttl_s: float
) -> list[RecoveredJob]:
    """Makes a record for each run folder whose job has none, as `Store.recover` says. The Redis is
    noted as the jobs' Redis when all have a record, so a crash in between loses nothing. An
    idempotency key is remembered again for the rest of its `key_ttl_s`."""
    identity = await identify(connection)
    connection.accept(identity)
    with_jobs = others(connection, runs_dir)
    jobs: dict[str, RecoveredJob] = {}
    for run in sorted(runs, key=lambda run: -(run.note.finished_at or 0.0)):  # newest first
        if run.job is None:
            jobs[run.id] = RecoveredJob(id=run.id, problem=run.problem)
        elif other := with_jobs.get(run.redis or ""):
            why = f"is a job of another Redis; if that is gone, remove {str(other)!r} first"
            jobs[run.id] = RecoveredJob(id=run.id, problem=why)
        else:
            jobs[run.id] = await _rebuilt(connection, run, run.job, key_ttl_s)
    await connection.call("open")
    adopt(connection, identity, runs_dir)
    return [jobs[run.id] for run in runs]


def _count_runs(runs_dir: Path) -> int:
    return sum(not file.parent.is_symlink() for file in runs_dir.glob("*/job.json"))


def _note(connection: Connection, runs_dir: Path) -> Path:
    """Returns the file with the identity of the Redis at the connection's URL."""
    return runs_dir / f".redis-{xxhash.xxh3_64_hexdigest(connection.place.encode())}"


def _noted(connection: Connection, runs_dir: Path) -> str | None:
    """Raises Failed for a note that cannot be read."""
    path = _note(connection, runs_dir)
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failed(
            f"{str(path)!r} cannot be read: {error.strerror or error}; check HONE_RUNS_DIR"
        ) from error


async def _rebuilt(
    connection: Connection, run: FoundRun, job: Job, key_ttl_s: float
) -> RecoveredJob:
    """Writes this Redis's identity into the folder before the record is made, so that an
    interrupted recovery can be repeated. An unwritable folder is a problem of this job alone."""
    redis = connection.identity
    if run.end is None and redis and run.redis != redis:
        try:
            await asyncio.to_thread(RunFolder(run.path).set_redis, redis)
        except Failed as error:
            return RecoveredJob(id=run.id, problem=error.detail)
    answer = await connection.call("recover", **_arguments(run, job, key_ttl_s))
    if answer in ("deleted", "old"):
        return RecoveredJob(id=run.id, problem=WAS_DELETED if answer == "deleted" else TOO_OLD)
    new, _, status = answer.rpartition(" ")
    return RecoveredJob.model_validate(
        {"id": run.id, "status": status, "step": run.step, "steps": job.steps, "known": not new}
    )


def _arguments(run: FoundRun, job: Job, key_ttl_s: float) -> Mapping[str, Any]:
    goes_on = f"continues after step {run.step}" if run.step else "begins it"
    note = run.note
    key_left_s = int(note.created_at + key_ttl_s - time.time())
    has_key = note.key and note.fingerprint and key_left_s > 0
    return {
        "id": run.id,
        "fields": recovered_fields(run, job),
        "checkpoints": {str(each.step): each.model_dump_json() for each in run.checkpoints},
        "status": run.end,
        "error": run.error,
        "why": None if run.end else PAUSED.format(id=run.id, goes_on=goes_on),
        "key": note.key if has_key else None,
        "fingerprint": note.fingerprint,
        "key_left_s": key_left_s,
    }
