"""Jobs' own rewards: one warm worker for each function of each job, kept between steps, in a
sandbox of its own.

Importing numpy takes longer than most steps have, so a worker stays until `MAX_WORKERS` others were
used after it. Jobs never share a worker, because it remembers what it was given. Calls of one
worker run in turn, and between them all its processes are stopped. A function that cannot be loaded
is the job's mistake (BadRequest); a call that fails gives no reward (GradingFailed). The answers
of a worker are untrusted: they are checked, and parts and programs are made of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from services.reward.grading.failures import ErrorName, GradingFailed
from services.reward.job_code.inside_serve import KEEP_CHARS
from services.reward.sandbox import host
from services.reward.sandbox.base import Sandbox, SlotDied, Worker
from services.reward.sandbox.slots import IsolationFailed
from shared.errors import BadRequest, Failed
from shared.explain import sentences
from shared.host.logs import get_logger
from shared.job import RewardSpec
from shared.wire import ExecuteRequest, Part

MAX_PROGRAMS = 4096
MAX_PROGRAMS_IN_ALL = 16 * MAX_PROGRAMS
MAX_DETAIL_CHARS = 1000


class WrongCount(GradingFailed):
    """A function returned more or fewer values than there are completions, so that none can be told
    whose it is."""


def parts(answer: Any, count: int, named: str) -> list[Part]:
    """Returns a part for each of `count` completions. Raises GradingFailed, whose sentence begins
    with `named`, if the whole answer is an error or cannot be read, WrongCount of them if it has
    another number of values."""
    if not isinstance(answer, dict):
        raise _failed(f"{named} answered with something that is not a table")
    printed = _text(answer.get("stdout", ""), KEEP_CHARS)
    if "error" in answer:
        raise _failed(
            f"{named} failed: {_text(answer['error'], MAX_DETAIL_CHARS)}"
            + (f"; it printed {printed!r}" if printed else "")
        )
    results = answer.get("results")
    if not isinstance(results, list):
        raise _failed(f"{named} answered with something that is not a list of numbers")
    if len(results) != count:
        raise WrongCount(
            f"{named} returned {len(results)} values for {count} completions; expected one for "
            "each, in their order",
            "python_grader_runtime_error",
        )
    return [_part(result, position, named, printed) for position, result in enumerate(results)]


def programs(asked: Any, named: str) -> list[list[ExecuteRequest] | str]:
    """Returns each list of programs that a worker asks to run, or a sentence saying what is wrong
    with the list. Raises GradingFailed for too many programs."""
    asked = asked if isinstance(asked, list) else [asked]
    total = len(asked) + sum(len(one) for one in asked if isinstance(one, list))
    if total > MAX_PROGRAMS_IN_ALL:
        raise _failed(
            f"{named} asked for {total} programs at once from all its threads; at most "
            f"{MAX_PROGRAMS_IN_ALL} are run"
        )
    return [_programs(one) for one in asked]


def _programs(asked: Any) -> list[ExecuteRequest] | str:
    if not isinstance(asked, list) or len(asked) > MAX_PROGRAMS:
        given = len(asked) if isinstance(asked, list) else "no"
        return f"{given} programs at once; at most {MAX_PROGRAMS} are taken"
    try:
        return [ExecuteRequest.model_validate(program) for program in asked]
    except ValidationError as error:
        return "; ".join(
            fault["detail"] for fault in sentences(error, ExecuteRequest, "execute_in_sandbox")
        )


def _part(result: Any, position: int, named: str, printed: str) -> Part:
    result = result if isinstance(result, dict) else {"value": result}
    value, detail, error = (
        result.get("value"),
        _text(result.get("detail", ""), MAX_DETAIL_CHARS),
        result.get("error"),
    )
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        error = f"it returned {value!r:.40} for completion {position}, expected a number or None"
    if error is not None:
        name: ErrorName = (
            "unresponsive_reward_error"
            if result.get("late") is True
            else "python_grader_runtime_error"
        )
        detail = f"{named} failed: {_text(error, MAX_DETAIL_CHARS)}"
        return Part(value=None, verdict="error", detail=detail, stdout=printed, errors=(name,))
    if value is None:
        return Part(value=None, verdict="skipped", detail=detail, stdout=printed)
    return Part(value=float(value), detail=detail, stdout=printed)


def _text(value: Any, limit: int) -> str:
    """Returns the end of a text, with lone surrogates replaced."""
    return str(value)[-limit:].encode("utf-8", "replace").decode()


def _failed(detail: str) -> GradingFailed:
    return GradingFailed(detail, "python_grader_runtime_error")


SERVE = "services.reward.job_code.inside_serve"
"""The module whose `serve` a worker runs."""

MAX_WORKERS = 8
LOAD_DEADLINE_S = 120.0
MAX_LATE = 8
"""Late calls for one completion each, after which a function that hangs is called no more."""

LATE_S = 1.0
"""Seconds beyond the limit that a worker may take if it limits its calls itself."""


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


class StrayAnswer(Exception):
    """A worker's answer came before its call, or belongs to another call."""


@dataclass(frozen=True)
class UserFunction:
    """A job's own function. `owner` is its job, or the request if that names no job."""

    spec: RewardSpec
    owner: str

    @property
    def key(self) -> str:
        text = f"{self.owner}\0{self.spec.function}\0{self.file}\0{self.spec.source}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def file(self) -> str:
        return PurePath(self.spec.file).name if self.spec.file else "reward.py"

    @property
    def named(self) -> str:
        return f"reward function {self.spec.function!r}"


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

    async def signature(self, own: UserFunction) -> Signature:
        """Returns what the function takes. Raises BadRequest with file, line and exception if its
        source cannot be loaded."""
        known = self._entries.get(own.key)
        if known is not None and known.signature is not None:
            return known.signature
        async with self._entry(own) as entry:
            return (await self._load(entry, own))[1]

    async def call(
        self,
        own: UserFunction,
        arguments: Mapping[str, Sequence[Any]],
        count: int,
        timeout_s: float,
    ) -> list[Part]:
        """Returns a part for each of the `count` completions whose `arguments` these are.

        Arguments that it has no parameter for are left out. One call is ended after `timeout_s`;
        there is one call for all, or one per completion where it takes one at a time, which then
        fails alone. Where the call for all fails, it is made again for each alone. Raises
        GradingFailed where all fail, and where the call for all returns another number of
        values.
        """
        async with self._entry(own) as entry:
            signature = (await self._load(entry, own))[1]
            taken = signature.taken(arguments)
            if signature.calls == "one by one":
                return await self._one_by_one(entry, own, taken, count, timeout_s)
            try:
                return await self._call(entry, own, taken, count, timeout_s)
            except WrongCount:  # of one completion alone a mean of all would be right
                raise
            except GradingFailed as error:
                if count == 1:
                    raise
                get_logger().warning(
                    "reward function failed, and is called for each completion alone",
                    function=own.spec.function,
                    reason=error.detail,
                )
                parts = await self._one_by_one(entry, own, taken, count, timeout_s)
                if all(part.verdict in ("error", "sandbox_error") for part in parts):
                    raise
                return parts

    async def _one_by_one(
        self,
        entry: _Entry,
        own: UserFunction,
        arguments: Mapping[str, Any],
        count: int,
        timeout_s: float,
    ) -> list[Part]:
        """Returns the parts of one call per completion. After MAX_LATE late ones no more are
        made."""
        parts: list[Part] = []
        num_late = 0
        for position in range(count):
            one = {name: [values[position]] for name, values in arguments.items()}
            try:
                if num_late == MAX_LATE:
                    raise GradingFailed(f"{own.named} was not called: it was late {num_late} times")
                parts += await self._call(entry, own, one, 1, timeout_s)
            except GradingFailed as error:
                num_late += "unresponsive_reward_error" in error.errors
                named = GradingFailed(
                    f"{error.detail} (completion {position})",
                    *error.errors,
                    by_sandbox=error.by_sandbox,
                )
                parts.append(named.part())
        return parts

    async def release(self, own: UserFunction) -> None:
        """Ends the function's worker, unless it is in use."""
        entry = self._entries.get(own.key)
        if entry is not None and not entry.users:
            del self._entries[own.key]
            await self._drop(entry)

    async def close(self) -> None:
        for entry in self._entries.values():
            await self._drop(entry)
        self._entries.clear()

    @contextlib.asynccontextmanager
    async def _entry(self, own: UserFunction) -> AsyncGenerator[_Entry]:
        """Yields this function's entry, locked, after closing surplus workers that no call uses,
        the least recently used first."""
        key = own.key
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
        own: UserFunction,
        arguments: Mapping[str, Any],
        count: int,
        timeout_s: float,
    ) -> list[Part]:
        """Returns the parts of one call. A worker that died may have been killed from outside, so
        it gets a second try; a function that ends its own process does so again."""
        message = {"arguments": arguments, "count": count, "timeout_s": timeout_s}
        for is_last in (False, True):
            worker, signature = await self._load(entry, own)
            answered = False
            try:
                answer = await self._converse(
                    worker,
                    message,
                    own.named,
                    timeout_s + (LATE_S if signature.calls == "together" else 0.0),
                )
                answered = True
                worker.pause()
                return parts(answer, count, own.named)
            except TimeoutError as error:
                late = f"{own.named} did not return within {timeout_s:g} s for {count} completions"
                raise GradingFailed(late, "unresponsive_reward_error") from error
            except StrayAnswer as error:
                raise GradingFailed(
                    f"{own.named} failed: {error}", "python_grader_runtime_error"
                ) from error
            except SlotDied as error:
                if is_last:
                    raise _ended_twice(own, error) from error
                get_logger().warning(
                    "reward function worker died", function=own.spec.function, reason=str(error)
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
            answer = await _asked(worker, message, max(end - loop.time(), 0.001))
            if not isinstance(answer, dict) or "execute" not in answer:
                return answer
            async with asyncio.timeout_at(end):
                message = {"executions": await self._executed(programs(answer["execute"], named))}

    async def _executed(
        self, lists: Sequence[Sequence[ExecuteRequest] | str]
    ) -> list[list[dict[str, Any]] | str]:
        """Returns the executions of each list of programs; a refusal is returned unchanged."""
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

    async def _load(self, entry: _Entry, own: UserFunction) -> tuple[Worker, Signature]:
        if entry.worker is not None and entry.signature is not None:
            return entry.worker, entry.signature
        try:
            worker = await self._sandbox.open_worker(SERVE)
        except IsolationFailed as error:
            raise Failed(f"no sandbox could be started for {own.named}: {error}") from error
        opening = {
            "source": own.spec.source,
            "file": own.file,
            "function": own.spec.function,
            "paths": host.package_paths(),
        }
        try:
            answer = await _asked(worker, opening, LOAD_DEADLINE_S)
            worker.pause()
            if "error" in answer:
                raise BadRequest(f"{own.named} cannot be loaded: {str(answer['error'])[:1000]}")
            required = {str(name): bool(value) for name, value in answer["parameters"].items()}
            entry.signature = Signature(required, bool(answer["any_keyword"]), str(answer["calls"]))
            entry.worker = worker
            return worker, entry.signature
        except TimeoutError as error:
            raise BadRequest(f"{own.named} was not loaded within {LOAD_DEADLINE_S:g} s") from error
        except (SlotDied, StrayAnswer, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"{own.named} cannot be loaded: {error}") from error
        finally:
            if entry.worker is None:
                await worker.dismiss()

    async def _drop(self, entry: _Entry) -> None:
        worker, entry.worker = entry.worker, None
        if worker is not None:
            await worker.dismiss()


async def _asked(worker: Worker, message: Mapping[str, Any], deadline_s: float) -> Any:
    """Returns the worker's untrusted answer to this message. It has to repeat the message's number,
    which is drawn for this call, so that a function cannot answer in advance."""
    number = secrets.token_hex(8)
    answer = await worker.ask({**message, "call": number}, deadline_s)
    if not isinstance(answer, dict) or answer.pop("call", None) != number:
        raise StrayAnswer("its process sent an answer that is not one to this call")
    return answer


def _ended_twice(own: UserFunction, error: SlotDied) -> GradingFailed:
    if error.killed:
        return GradingFailed(
            f"the process of {own.named} was killed twice, from outside or because its host ran "
            f"out of memory ({error})",
            "python_grader_server_error",
            by_sandbox=True,
        )
    return GradingFailed(
        f"{own.named} ended its process twice: {error} (it may use 8 GiB of memory)",
        "python_grader_runtime_error",
    )
