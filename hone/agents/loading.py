"""Agents as the command line names them: a function of a Python file, or any command. A command
finds the model by its environment, and says what it earned at the end of what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.agents.working import Agent, AgentFailed
from shared.errors import BadRequest, HoneError
from shared.settings import FILE, REWARD_FILE, ROW, secret_variables

NAME = "run"
"""The function of a file that is its agent, if none is named."""


def agent_of(words: Sequence[str]) -> Agent:
    """Returns the agent that `words` stand for: one Python file, perhaps with `:name` behind it, or
    a command. Raises BadRequest for a file without such a function, and for no command."""
    path, _, name = words[0].partition(":")
    if len(words) == 1 and path.endswith(".py"):
        return _in_file(Path(path), name or NAME)
    if shutil.which(words[0]) is None:
        raise BadRequest(
            f"there is no command {words[0]!r}; expected a program that can be run, or one Python "
            "file without arguments"
        )
    return Command(words)


def _in_file(path: Path, name: str) -> Agent:
    if not path.is_file():
        raise BadRequest(
            f"there is no file {str(path)!r}; expected one with an agent, such as "
            f"`async def {NAME}(row, base_url, api_key)`"
        )
    found: Any = getattr(_loaded(path), name, None)
    if not callable(found):
        raise BadRequest(
            f"{str(path)!r} has no function {name!r}; expected `async def {name}(row, base_url, "
            "api_key)`, or its name behind a colon: agent.py:play"
        )
    _check_arguments(found, f"{name!r} of {str(path)!r}")
    return found


def _check_arguments(agent: Any, which: str) -> None:
    try:
        parameters = inspect.signature(agent)
    except ValueError:  # of a function that is not Python's nothing is known
        return
    try:
        parameters.bind({}, "", "")
    except TypeError:
        raise BadRequest(f"{which} takes {parameters}; expected (row, base_url, api_key)") from None


def _loaded(path: Path) -> Any:
    """Returns the file as a module. Files beside it can be imported, as by `python agent.py`.
    Raises BadRequest for what the file raises."""
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except HoneError:
        raise
    except Exception as error:  # the user's own code
        why = f"{type(error).__name__}: {error}"
        raise BadRequest(f"{_where(error, path)} cannot be loaded: {why}") from error
    return module


def _where(error: Exception, path: Path) -> str:
    """Returns the file, and its line that raised or that cannot be compiled."""
    places = [(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno))
    line = next((line for name, line in reversed(places) if name == str(path.resolve())), None)
    return repr(str(path)) if line is None else f"line {line} of {str(path)!r}"


# --- commands ------------------------------------------------------------------------------------

TAIL_BYTES = 4096
"""How much of the end of each stream is kept."""

END_S = 2.0
"""Seconds that a command has to end after SIGTERM."""

MAX_VARIABLE = 100_000
"""Bytes of a row that fit into one variable of an environment, which Linux bounds."""

COLLECTOR = "OTEL_EXPORTER_OTLP_"
"""How the variables begin that name the collector of Hone's traces: its headers are secrets, and
its URL may have a password."""


class Command:
    """An agent that runs `argv` for each episode."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = [*argv]

    async def __call__(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        """Returns the reward that the command wrote into HONE_REWARD_FILE, or else its last line.
        Raises AgentFailed if it exits with another code than 0 or says no reward."""
        with tempfile.TemporaryDirectory(prefix="hone-") as folder:
            file, text = Path(folder) / "reward", json.dumps(row)
            given = environment(text, base_url, api_key) | {REWARD_FILE: str(file)}
            out, err, code = await run(self._argv, given, text.encode())
            if code != 0:
                raise AgentFailed(f"{self._argv[0]!r} exited with {code}: {err or out or 'silent'}")
            return reward_in(file.read_text() if file.exists() else out, self._argv[0])


def environment(row: str, base_url: str, api_key: str) -> dict[str, str]:
    """Returns the variables of a command: the worker's own without Hone's secrets, the files that
    hold them and the collector, and how the model is called."""
    secrets = {name + suffix for name in secret_variables().values() for suffix in ("", FILE)}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in secrets and not name.startswith(COLLECTOR)
    }
    return inherited | {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its clients add /v1/messages
        "ANTHROPIC_API_KEY": api_key,
        **({ROW: row} if len(row.encode()) <= MAX_VARIABLE else {}),
    }


async def run(argv: Sequence[str], env: dict[str, str], stdin: bytes) -> tuple[str, str, int]:
    """Returns the ends of the command's output and errors, and its exit code. Its whole process
    group has ended then, also if this is cancelled. Raises AgentFailed if it cannot be started."""
    process = await _started(argv, env)
    assert process.stdin and process.stdout and process.stderr
    feeding = asyncio.create_task(_feed(process.stdin, stdin))
    streams = [asyncio.create_task(_tail(each)) for each in (process.stdout, process.stderr)]
    try:
        code = await process.wait()
        _signal(process, signal.SIGKILL)  # what it left running would keep the streams open
        out, err = await asyncio.gather(*streams)
        return out, err, code
    finally:
        await _end(process, [feeding, *streams])


async def _started(argv: Sequence[str], env: dict[str, str]) -> Process:
    """Returns the process. If this is cancelled meanwhile, the process group is ended: asyncio
    itself would end the process alone, and wait for what that started."""
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *argv, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    )
    try:
        return await asyncio.shield(starting)
    except OSError as error:
        raise AgentFailed(f"the command {argv[0]!r} cannot be started: {error}") from error
    except asyncio.CancelledError:
        _signal(await starting, signal.SIGKILL)
        raise


async def _end(process: Process, tasks: Sequence[asyncio.Task[Any]]) -> None:
    try:
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
    finally:
        if process.returncode is None:
            _signal(process, signal.SIGKILL)
        for task in tasks:
            task.cancel()


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _feed(stream: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(OSError):  # a command need not read it
        stream.write(text)
        await stream.drain()
        stream.close()


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while piece := await stream.read(1 << 16):
        kept = (kept + piece)[-TAIL_BYTES:]
    return kept.decode(errors="replace").strip()


def reward_in(text: str, name: str) -> Any:
    """Returns what the last line says, a number or JSON. Raises AgentFailed for other text."""
    line = text.strip().rpartition("\n")[2]
    try:
        found: Any = json.loads(line)
    except ValueError:
        found = line
    if isinstance(found, str):
        raise AgentFailed(
            f"the last line of {name!r} is {line[:80]!r}; expected a reward: a number, or JSON "
            'such as {"reward": 0.5}'
        )
    return found
