"""Jobs' own rewards: one warm worker for each (source, function), kept between steps, in a sandbox
of its own.

Importing numpy takes longer than most steps have, so a worker stays until `MAX_WORKERS` others were
used after it. Calls of one worker run in turn. What cannot be loaded is the job's mistake
(BadRequest); what fails when called gives no reward (GradingFailed).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from services.reward.grading.failures import GradingFailed
from services.reward.job_code import answers
from services.reward.sandbox import visible
from services.reward.sandbox.base import Sandbox, SlotDied, Worker
from services.reward.sandbox.slots import CannotIsolate
from shared.errors import BadRequest, Failed
from shared.job import RewardSpec
from shared.logs import get_logger
from shared.wire import ExecuteRequest, Part

SERVE = "services.reward.job_code.inside.serve"
"""The module whose `serve` a worker runs."""

MAX_WORKERS = 8
LOAD_DEADLINE_S = 120.0
LATE_S = 1.0
"""What a worker that bounds its calls itself may take beyond their limit."""


@dataclass(frozen=True)
class Signature:
    """What a function or method takes: `parameters` by name, whether each is required;
    `any_keyword` if it has `**kwargs`.

    `calls`: it takes a "batch" of completions, or one: awaited "together", or "one by one".
    """

    parameters: Mapping[str, bool]
    any_keyword: bool
    calls: str

    def taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments that it has a parameter for."""
        if self.calls != "batch":
            named = {
                *self.parameters,
                *(f"{name}s" for name in ("prompt", "completion") if name in self.parameters),
            }
        else:
            named = {*self.parameters}
        return {
            name: value for name, value in arguments.items() if self.any_keyword or name in named
        }


@dataclass
class _Entry:
    """One function's worker, if it has one now, and how many callers hold or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    worker: Worker | None = None
    signature: Signature | None = None


class FunctionWorkers:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def signature(self, spec: RewardSpec) -> Signature:
        """Returns what the function takes. Raises BadRequest with file, line and exception if its
        source cannot be loaded."""
        known = self._entries.get(_key(spec))
        if known is not None and known.signature is not None:
            return known.signature
        async with self._entry(spec) as entry:
            return (await self._load(entry, spec))[1]

    async def call(
        self, spec: RewardSpec, arguments: Mapping[str, Sequence[Any]], count: int, timeout_s: float
    ) -> list[Part]:
        """Returns a part for each of the `count` completions whose `arguments` these are.

        Arguments that it has no parameter for are left out. One call is ended after `timeout_s`;
        there is one call for all, or one per completion where it takes one at a time, which
        then fails alone. Raises GradingFailed where all fail.
        """
        async with self._entry(spec) as entry:
            signature = (await self._load(entry, spec))[1]
            taken = signature.taken(arguments)
            if signature.calls != "one by one":
                return await self._call(entry, spec, taken, count, timeout_s)
            parts: list[Part] = []
            for position in range(count):
                try:
                    one = {name: [values[position]] for name, values in taken.items()}
                    parts += await self._call(entry, spec, one, 1, timeout_s)
                except GradingFailed as error:
                    parts.append(error.part())
            return parts

    async def close(self) -> None:
        for entry in self._entries.values():
            await self._drop(entry)
        self._entries.clear()

    @contextlib.asynccontextmanager
    async def _entry(self, spec: RewardSpec) -> AsyncGenerator[_Entry]:
        """Yields this function's entry, locked, after closing workers that were not used for
        longest and by nobody now."""
        key = _key(spec)
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

    async def _call(
        self,
        entry: _Entry,
        spec: RewardSpec,
        arguments: Mapping[str, Any],
        count: int,
        timeout_s: float,
    ) -> list[Part]:
        """Returns the parts of one call. A worker that died may have been killed from outside, so
        it gets a second try; a function that ends its own process does so again."""
        message = {"arguments": arguments, "count": count, "timeout_s": timeout_s}
        for is_last in (False, True):
            worker, signature = await self._load(entry, spec)
            answered = False
            try:
                answer = await self._converse(
                    worker,
                    message,
                    _named(spec),
                    timeout_s + (LATE_S if signature.calls == "together" else 0.0),
                )
                answered = True
                return answers.parts(answer, count, _named(spec))
            except TimeoutError as error:
                late = (
                    f"{_named(spec)} did not return within {timeout_s:g} s for {count} completions"
                )
                raise GradingFailed(late, "unresponsive_reward_error") from error
            except SlotDied as error:
                if is_last:
                    raise _ended_twice(spec, error) from error
                get_logger().warning(
                    "reward function worker died", function=spec.function, reason=str(error)
                )
            finally:
                if not answered:
                    await self._drop(entry)
        raise AssertionError("unreachable")

    async def _converse(
        self, worker: Worker, message: Mapping[str, Any], named: str, timeout_s: float
    ) -> Any:
        """Returns the worker's untrusted answer, after running the programs that it asks for
        meanwhile."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            answer = await worker.ask(dict(message), max(end - loop.time(), 0.001))
            if not isinstance(answer, dict) or "execute" not in answer:
                return answer
            async with asyncio.timeout_at(end):
                message = {
                    "executions": await self._executed(answers.programs(answer["execute"], named))
                }

    async def _executed(
        self, lists: Sequence[Sequence[ExecuteRequest] | str]
    ) -> list[list[dict[str, Any]] | str]:
        """Returns for each list of programs the list of their executions, and a refusal as it
        is."""
        requests = [
            program for programs in lists if not isinstance(programs, str) for program in programs
        ]
        executions = iter(await self._sandbox.run(requests))
        return [
            programs
            if isinstance(programs, str)
            else [next(executions).model_dump() for _ in programs]
            for programs in lists
        ]

    async def _load(self, entry: _Entry, spec: RewardSpec) -> tuple[Worker, Signature]:
        if entry.worker is not None and entry.signature is not None:
            return entry.worker, entry.signature
        try:
            worker = await self._sandbox.open_worker(SERVE)
        except CannotIsolate as error:
            raise Failed(f"no sandbox could be started for {_named(spec)}: {error}") from error
        opening = {
            "source": spec.source,
            "file": _file(spec),
            "function": spec.function,
            "paths": visible.package_paths(),
        }
        try:
            answer = await worker.ask(opening, LOAD_DEADLINE_S)
            if "error" in answer:
                raise BadRequest(f"{_named(spec)} cannot be loaded: {str(answer['error'])[:1000]}")
            required = {str(name): bool(value) for name, value in answer["parameters"].items()}
            entry.signature = Signature(required, bool(answer["any_keyword"]), str(answer["calls"]))
            entry.worker = worker
            return worker, entry.signature
        except TimeoutError as error:
            raise BadRequest(
                f"{_named(spec)} was not loaded within {LOAD_DEADLINE_S:g} s"
            ) from error
        except (SlotDied, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"{_named(spec)} cannot be loaded: {error}") from error
        finally:
            if entry.worker is None:
                await worker.close()

    async def _drop(self, entry: _Entry) -> None:
        worker, entry.worker = entry.worker, None
        if worker is not None:
            await worker.close()


def _ended_twice(spec: RewardSpec, error: SlotDied) -> GradingFailed:
    if error.killed:
        return GradingFailed(
            f"the process of {_named(spec)} was killed twice, from outside or by the kernel for "
            f"its memory ({error})",
            "python_grader_server_error",
            by_sandbox=True,
        )
    return GradingFailed(
        f"{_named(spec)} ended its process twice: {error} (it may use 8 GiB of memory)",
        "python_grader_runtime_error",
    )


def _key(spec: RewardSpec) -> str:
    return hashlib.sha256(f"{spec.function}\0{_file(spec)}\0{spec.source}".encode()).hexdigest()


def _named(spec: RewardSpec) -> str:
    return f"reward function {spec.function!r}"


def _file(spec: RewardSpec) -> str:
    return PurePath(spec.file).name if spec.file else "reward.py"
