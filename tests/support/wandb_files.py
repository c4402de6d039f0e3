"""What W&B's own process wrote into a run's file (`*.wandb`): the log format of LevelDB, with a
record of W&B's protobuf in each entry. The Python package has no reader of its own."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32768
FILE_HEADER_BYTES = 7
HEADER = struct.Struct("<IHB")
FULL, FIRST, LAST = 1, 2, 4


@dataclass
class OfflineRun:
    """One run: `rewards` are its rows' by their step."""

    id: str = ""
    name: str = ""
    project: str = ""
    exit_code: int | None = None
    rewards: dict[int, float] = field(default_factory=dict[int, float])


def offline_run(run_dir: Path) -> OfflineRun:
    """Returns the only run that a job's folder has."""
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = run_dir.rglob("*.wandb")
    found = OfflineRun()
    for data in _entries(path.read_bytes()):
        record = proto.Record.FromString(data)
        if record.HasField("run"):
            found.id, found.name = record.run.run_id, record.run.display_name
            found.project = record.run.project
        if record.HasField("exit"):
            found.exit_code = record.exit.exit_code
        if record.HasField("history"):
            named = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "reward" in named:
                found.rewards[named["_step"]] = named["reward"]
    return found


def _entries(data: bytes) -> Iterator[bytes]:
    at, entry = FILE_HEADER_BYTES, b""
    while at + HEADER.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        entry = (b"" if kind in (FULL, FIRST) else entry) + data[at : at + length]
        at += length
        if kind in (FULL, LAST):
            yield entry
