"""Runs work in a process of its own, which is killed when its caller is cancelled. Calls of the Hub
may hang in ways that no deadline of its libraries ends, and a thread cannot be killed.

`python -m services.orchestrator.data.subprocesses PID` is that process. It ends with process PID,
reads its work from stdin, and writes the result to stdout.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

from shared.errors import Failed, HoneError
from shared.host.processes import die_with

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

MAX_BYTES = 300
"""Bytes of a failed process's last line on stderr that are shown."""

T = TypeVar("T")


class SubprocessTimeout(Failed):
    """The work did not finish by its deadline, and was killed."""


async def run_in_subprocess(
    work: Callable[..., T],
    *args: Any,
    deadline_s: float,
    what: str = "the work",
    environment: Mapping[str, str] | None = None,
) -> T:
    """Returns the result of `work(*args)`. `work` is a module's function; its arguments and result
    can be pickled. Raises the work's own HoneError; SubprocessTimeout; and Failed if the process
    ended without a result. Their sentences begin with `what`, as in "fetching the model 'm'".
    `environment` is added to the process's variables."""
    variables = os.environ | QUIET | dict(environment or {})
    with tempfile.TemporaryFile() as errors:  # a process left behind would hold a pipe open
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.orchestrator.data.subprocesses", str(os.getpid())),
            env=variables,
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
        )
        try:
            async with asyncio.timeout(deadline_s):
                answer, _ = await process.communicate(pickle.dumps((work, args)))
        except TimeoutError as error:
            raise SubprocessTimeout(f"{what} did not finish within {deadline_s:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        if not answer:
            ended = f"{what} failed: its process ended with status {process.returncode}"
            raise Failed(f"{ended}: {last}" if (last := _last_line(errors)) else ended)
    error, result = pickle.loads(answer)
    if error is not None:
        raise error
    return result


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-MAX_BYTES:] if lines else ""


def _main() -> None:
    die_with(int(sys.argv[1]))  # not os.getppid(): the parent may have ended already
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # output of libraries must not mix with the answer
        pickle.dump(_answer(), answer)


def _answer() -> tuple[HoneError | None, Any]:
    work, args = pickle.load(sys.stdin.buffer)
    try:
        return None, work(*args)
    except HoneError as error:
        return error, None
    except Exception as error:
        # a bug in the work: reported to the parent, as the last act of this process
        return Failed(f"{type(error).__name__}: {error}", code="bug"), None


if __name__ == "__main__":
    _main()
