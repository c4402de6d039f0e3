"""The Redis scripts: `lua/<name>.lua`, whose first lines say what it does. `lua/shared.lua` has the
building blocks. Every change of a job is one atomic script.

    queued --take--> running --report--> succeeded, failed, cancelled
      ^ ^              |
      | +-----halt-----+----halt
      |                v
      +----resume--- paused          cancel: queued and paused at once, running by way of the worker

A running job whose worker is gone waits to be taken again: it is paused and cancelled at once too.

A worker sends its lease: the job, the trainer and the attempt. Once the trainer's lease has expired
or is another worker's, or the job does not run any more, nothing is changed.
"""

from __future__ import annotations

from pathlib import Path

from services.orchestrator.store import keys
from shared.settings import MAX_PLACES

CALL_TTL_S = 900
"""Seconds that a script's answer is kept for retries of the same call: longer than a caller retries
(connection.py)."""

FOLDER = Path(__file__).with_name("lua")
SHARED = "shared"
NAMES = frozenset(file.stem for file in FOLDER.glob("*.lua")) - {SHARED}


def source(name: str) -> str:
    """Returns the text of the script, with the keys of keys.py, by the same names, and the building
    blocks before it."""
    texts = {name: value for name, value in vars(keys).items() if isinstance(value, str)}
    names = [f"local {name} = '{value}'" for name, value in texts.items() if name.isupper()]
    names.append(f"local MAX_PLACES = {MAX_PLACES}")
    files = [(FOLDER / f"{each}.lua").read_text() for each in (SHARED, name)]
    return "\n".join([*names, f"local CALL_TTL_S = {CALL_TTL_S}", *files])
