"""Commands for a volume that hosts share. Some volumes show one host's files to the others only
after a command (Modal's Volumes, mounts of object storage)."""

from __future__ import annotations

import shlex
import subprocess

from shared.errors import Failed

DEADLINE_S = 300.0


def run(command: str | None, purpose: str) -> None:
    """Runs the command, if there is one. Raises Failed with what it printed if it fails."""
    if command is None:
        return
    try:
        ended = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{purpose}: {command!r} was not run to its end: {error}") from error
    if ended.returncode:
        why = (ended.stderr or ended.stdout).strip()[-500:]
        raise Failed(f"{purpose}: {command!r} ended with exit code {ended.returncode}: {why}")
