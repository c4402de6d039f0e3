"""A job's own reward functions: one warm worker for each (source, function), kept between steps, in a sandbox of its own.

Importing numpy takes longer than most steps have, so a worker stays until `MAX_WORKERS` others were used after it. Calls of
one worker run in turn. What a worker answers is untrusted and checked here; what is wrong with it is the job's mistake
(BadRequest), never a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from services.reward.failures import GradingFailed
from services.reward.sandbox import visible
from services.reward.sandbox.base import Sandbox, SlotDied, Worker
from services.reward.sandbox.slots import CannotIsolate
from shared.errors import BadRequest, Failed
from shared.job import RewardSpec
from shared.logs import get_logger

MAX_WORKERS = 8
LOAD_DEADLINE_S = 120.0


@dataclass
class _Loaded:
    """A worker and what its function takes: `required` by parameter name; `any_keyword` if it has `**kwargs`."""

    worker: Worker
    required: dict[str, bool]
    any_keyword: bool


@dataclass
class _Entry:
    """One function's worker, if it has one now, and how many callers hold or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    loaded: _Loaded | None = None


class FunctionWorkers:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def parameters(self, spec: RewardSpec) -> tuple[dict[str, bool], bool]:
        """Returns the function's parameters (name -> whether required) and whether it has `**kwargs`.

        Raises BadRequest with file, line and exception if its source cannot be loaded.
        """
        async with self._entry(spec) as entry:
            loaded = await self._load(entry, spec)
            return loaded.required, loaded.any_keyword

    async def call(self, spec: RewardSpec, arguments: dict[str, Any], count: int, timeout_s: float) -> list[float | None]:
        """Returns the `count` values that the function gives for `arguments`; None means not applicable.

        Arguments that it has no parameter for are left out. Raises GradingFailed if it raises, is late, or returns anything else.
        """
        async with self._entry(spec) as entry:
            try:
                answer = await self._answer(entry, spec, arguments, timeout_s)
            except TimeoutError as error:
                late = f"{_named(spec)} did not return within {timeout_s:g} s for {count} completions"
                raise GradingFailed(late, "unresponsive_reward_error") from error
        return _values(answer, count, spec)

    async def close(self) -> None:
        for entry in self._entries.values():
            await self._drop(entry)
        self._entries.clear()

    @contextlib.asynccontextmanager
    async def _entry(self, spec: RewardSpec) -> AsyncGenerator[_Entry]:
        """Yields this function's entry, locked, after closing workers that were not used for longest and by nobody now."""
        key = hashlib.sha256(f"{spec.function}\0{_file(spec)}\0{spec.source}".encode()).hexdigest()
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        entry.users += 1
        try:
            surplus = len(self._entries) - MAX_WORKERS
            unused = [old_key for old_key, old in self._entries.items() if not old.users]
            for old in [self._entries.pop(old_key) for old_key in unused[: max(surplus, 0)]]:
                await self._drop(old)
            async with entry.lock:
                yield entry
        finally:
            entry.users -= 1

    async def _answer(self, entry: _Entry, spec: RewardSpec, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Returns the worker's untrusted answer. A worker that died may have been killed from outside, so it gets a second
        try; a function that ends its own process does so again."""
        for is_last in (False, True):
            loaded = await self._load(entry, spec)
            taken = {name: value for name, value in arguments.items() if loaded.any_keyword or name in loaded.required}
            answered = False
            try:
                answer = await loaded.worker.ask({"arguments": taken}, timeout_s)
                answered = True
                return answer
            except SlotDied as error:
                if is_last:
                    raise _failed(f"{_named(spec)} ended its process twice: {error} (it may use 8 GiB of memory)") from error
                get_logger().warning("reward function worker died", function=spec.function, reason=str(error))
            finally:
                if not answered:
                    await self._drop(entry)
        raise AssertionError("unreachable")

    async def _load(self, entry: _Entry, spec: RewardSpec) -> _Loaded:
        if entry.loaded is not None:
            return entry.loaded
        try:
            worker = await self._sandbox.open_worker()
        except CannotIsolate as error:
            raise Failed(f"no sandbox could be started for {_named(spec)}: {error}") from error
        opening = {"source": spec.source, "file": _file(spec), "function": spec.function, "paths": visible.package_paths()}
        try:
            answer = await worker.ask(opening, LOAD_DEADLINE_S)
            if "error" in answer:
                raise BadRequest(f"{_named(spec)} cannot be loaded: {str(answer['error'])[:1000]}")
            required = {str(name): bool(value) for name, value in answer["parameters"].items()}
            entry.loaded = _Loaded(worker, required, bool(answer["any_keyword"]))
            return entry.loaded
        except TimeoutError as error:
            raise BadRequest(f"{_named(spec)} was not loaded within {LOAD_DEADLINE_S:g} s") from error
        except (SlotDied, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"{_named(spec)} cannot be loaded: {error}") from error
        finally:
            if entry.loaded is None:
                await worker.close()

    async def _drop(self, entry: _Entry) -> None:
        loaded, entry.loaded = entry.loaded, None
        if loaded is not None:
            await loaded.worker.close()


def _values(answer: Any, count: int, spec: RewardSpec) -> list[float | None]:
    if isinstance(answer, dict) and "error" in answer:
        raise _failed(f"{_named(spec)} failed: {str(answer['error'])[:1000]}")
    values = answer.get("values") if isinstance(answer, dict) else None
    if not isinstance(values, list):
        raise _failed(f"{_named(spec)} answered with something that is not a list of numbers")
    if len(values) != count:
        raise _failed(f"{_named(spec)} returned {len(values)} values for {count} completions")
    for position, value in enumerate(values):
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise _failed(f"{_named(spec)} returned {value!r:.40} for completion {position}, expected a number or None")
    return [None if value is None else float(value) for value in values]


def _named(spec: RewardSpec) -> str:
    return f"reward function {spec.function!r}"


def _file(spec: RewardSpec) -> str:
    return PurePath(spec.file).name if spec.file else "reward.py"


def _failed(detail: str) -> GradingFailed:
    return GradingFailed(detail, "python_grader_runtime_error")
