"""Which Redis has the jobs of a folder of runs. Both have a note of it, so that a Redis which lost
its data is not taken for the one that had the jobs. The note in the folder is by URL: several
stacks, each with a Redis of its own, may share a folder of runs."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import xxhash

from services.orchestrator.queue import keys
from services.orchestrator.queue.connection import Connection
from services.orchestrator.record.writing import writing
from shared import disk


async def identify(connection: Connection) -> str:
    """Returns the identity of this Redis, which it keeps; a new one has one from now on."""
    client = connection.client
    await connection.reach(client.set(keys.STORE, secrets.token_hex(16), nx=True))
    return str(await connection.reach(client.get(keys.STORE)))


async def check(connection: Connection, runs_dir: Path) -> str | None:
    """Returns why the jobs of `runs_dir` are not to be looked for in this Redis, if so; from then
    on the connection is refused. Else it is opened, and the Redis is noted as theirs."""
    found, noted = await identify(connection), _noted(connection, runs_dir)
    is_another = noted not in (None, found)
    if is_another and (num_runs := await asyncio.to_thread(_count_runs, runs_dir)):
        connection.refuse(_sentence(runs_dir, num_runs))
    else:
        adopt(connection, found, runs_dir)
    return connection.refused


def adopt(connection: Connection, found: str, runs_dir: Path) -> None:
    """Notes that the Redis of this identity has the jobs of `runs_dir`."""
    if _noted(connection, runs_dir) != found:
        with writing("folder", runs_dir):
            disk.make_folder(runs_dir)
            disk.write_file(_note(connection, runs_dir), found.encode())
    connection.accept(found)


def others(connection: Connection, runs_dir: Path) -> dict[str, Path]:
    """Returns the Redis servers that have jobs of `runs_dir` besides the one that was at the
    connection's URL: by identity, the file that says so."""
    notes = {path.read_text().strip(): path for path in sorted(runs_dir.glob(".redis-*"))}
    notes.pop(_noted(connection, runs_dir) or "", None)
    return notes


def _count_runs(runs_dir: Path) -> int:
    return sum(not file.parent.is_symlink() for file in runs_dir.glob("*/job.json"))


def _note(connection: Connection, runs_dir: Path) -> Path:
    """Returns the file with the identity of the Redis that was at the connection's URL."""
    return runs_dir / f".redis-{xxhash.xxh3_64_hexdigest(connection.place.encode())}"


def _noted(connection: Connection, runs_dir: Path) -> str | None:
    path = _note(connection, runs_dir)
    return path.read_text().strip() if path.is_file() else None


def _sentence(runs_dir: Path, num_runs: int) -> str:
    return (
        f"the Redis at HONE_REDIS_URL is not the one that was there with jobs of {str(runs_dir)!r} "
        f"({num_runs} run folder(s)): it was emptied, or it is another one; bring its file back "
        "(appendonlydir, up to Redis 6 appendonly.aof) and start it again, or let `hone recover` "
        "rebuild the jobs from their run folders; until then no job is accepted, shown or run"
    )
