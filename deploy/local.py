"""The laptop stack: Redis and the four services as processes of this machine, under one supervisor.

`python -m deploy.local up` (what `hone up` runs) starts the supervisor (`supervisor.py`) in a
session of its own, shows its progress, and returns when every service is ready. `down` ends it and
everything it started.

It runs on one machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.machine import SERVICES
from deploy.supervisor import STOP_DEADLINE_S, TRAINER_STOP_DEADLINE_S, running
from shared.errors import BadRequest, Failed, HoneError
from shared.host import disk

OWN = Path(".hone")
"""The folder in which commands look for a stack."""

DOWN_DEADLINE_S = TRAINER_STOP_DEADLINE_S + 2 * STOP_DEADLINE_S
"""Seconds to stop the services and then Redis, with as much again to spare."""


def up(folder: Path, *, quiet: bool = False, services: Sequence[str] = SERVICES) -> dict[str, Any]:
    """Starts the given services of the stack, and returns its state (`pid`, `urls`, `logs`) once
    all are ready. If one does not become ready, stops everything again and raises HoneError with
    the reason."""
    try:
        disk.own_folder(folder)
    except OSError as error:
        raise BadRequest(
            f"no folder can be made at {str(folder)!r}: {error.strerror}; --dir names another"
        ) from error
    command = [sys.executable, "-m", "deploy.supervisor", str(folder), *services]
    errors = folder / "supervisor.err"
    with open(errors, "wb", opener=_for_this_user) as stderr:
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            text=True,
        )
    assert supervisor.stdout
    try:
        for line in supervisor.stdout:
            message = json.loads(line)
            match message["event"]:
                case "started" | "waiting" | "devices" if quiet:
                    pass
                case "started":
                    print(f"  {message['service']} is ready", flush=True)
                case "waiting":
                    print(f"  waiting for {message['service']}, {message['seconds']} s", flush=True)
                case "devices":
                    print(
                        f"  GPUs: {', '.join(message['rollout'])} sample "
                        f"({message['gpu_memory_utilization']:.0%} of their memory), "
                        f"{', '.join(message['trainer'])} train",
                        flush=True,
                    )
                case "ready":
                    return message
                case _:
                    supervisor.wait()
                    raise BadRequest(message["detail"])
    except KeyboardInterrupt:
        supervisor.terminate()
        supervisor.wait()
        raise
    why = errors.read_text(errors="replace").strip()[-2000:]
    raise Failed(f"the supervisor ended with exit code {supervisor.wait()}: {why}")


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def down(folder: Path) -> bool:
    """Stops the stack of `folder`; returns whether there was one. Raises Failed if it does not
    stop."""
    state = running(folder)
    if state is None:
        return False
    os.kill(state["pid"], signal.SIGTERM)
    deadline = time.monotonic() + DOWN_DEADLINE_S
    while running(folder) is not None:
        if time.monotonic() > deadline:
            raise Failed(
                f"the stack (process {state['pid']}) did not stop within {DOWN_DEADLINE_S:g} s; "
                f"logs: {state['logs']}"
            )
        time.sleep(0.1)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument(
        "--dir",
        type=Path,
        default=OWN,
        help="where logs and Redis's data go (default: .hone)",
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    folder = arguments.dir.resolve()
    as_json = arguments.output == "json"
    try:
        if arguments.action == "up":
            if not as_json:
                print("  starting Redis and the four services", flush=True)
            state = up(folder, quiet=as_json)
            print(json.dumps(state) if as_json else said_of(state, arguments.dir))
        else:
            stopped = down(folder)
            print(
                json.dumps({"stopped": stopped})
                if as_json
                else "stopped"
                if stopped
                else f"no stack runs in {folder}"
            )
    except HoneError as error:
        sys.exit(f"hone: {error.detail}")


def said_of(state: dict[str, Any], folder: Path) -> str:
    """Returns a sentence on where the stack in `folder` is, with commands that reach and stop
    it."""
    url = state["urls"]["orchestrator"]
    is_own = folder == OWN
    down = "hone down" if is_own else f"hone down --dir {shlex.quote(str(folder))}"
    reach = "" if is_own else f"; for other commands: export HONE_ORCHESTRATOR_URL={url}"
    return (
        f"up: jobs go to {url}, where the page is too; logs are in {state['logs']}; `{down}` stops "
        f"it{reach}"
    )


if __name__ == "__main__":
    main()
