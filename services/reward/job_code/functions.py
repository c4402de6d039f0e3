"""Jobs' own reward functions: a call of a worker scores a batch.

Calls of one function run in turn. A function that cannot be loaded is the job's mistake
(BadRequest); a call that fails gives no reward (GradingFailed). The answers of a worker are
untrusted: they are checked, and parts and programs are made of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from services.reward.grading.failures import GradingFailed
from services.reward.job_code.inside_score import KEEP_CHARS
from services.reward.job_code.workers import (
    Call,
    CallLost,
    Entry,
    JobFile,
    JobWorker,
    JobWorkers,
    StrayAnswer,
)
from services.reward.sandbox.base import SlotDied
from shared.errors import BadRequest
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
    value, error = result.get("value"), result.get("error")
    detail = _text(result.get("detail", ""), MAX_DETAIL_CHARS)
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        error = f"it returned {value!r:.40} for completion {position}, expected a number or None"
    if error is not None:
        is_late = result.get("late") is True
        name = "unresponsive_reward_error" if is_late else "python_grader_runtime_error"
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


MAX_LATE = 8
"""Late calls for one completion each, after which a function that hangs is called no more."""

LATE_S = 1.0
"""Seconds beyond the limit that a worker may take if it limits its calls itself."""


def function_file(spec: RewardSpec, owner: str) -> JobFile:
    """Returns the file of a job's own function."""
    return JobFile(
        owner=owner,
        file=PurePath(spec.file).name if spec.file else "reward.py",
        source=spec.source,
        named=f"reward function {spec.function!r}",
        serve="services.reward.job_code.inside_score",
        options={"function": spec.function},
    )


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
        named = {*self.parameters}
        if self.calls != "batch":
            named |= {f"{name}s" for name in named & {"prompt", "completion"}}
        return {
            name: value for name, value in arguments.items() if self.any_keyword or name in named
        }


class FunctionWorkers(JobWorkers):
    async def signature(self, file: JobFile) -> Signature:
        """Returns what the function takes. Raises BadRequest with file, line and exception if its
        source cannot be loaded."""
        async with self.using(file) as entry:
            return (await self._ready(entry))[1]

    async def call(
        self,
        file: JobFile,
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
        async with self.using(file) as entry, entry.calling:
            _, signature = await self._ready(entry)
            taken = signature.taken(arguments)
            if signature.calls == "one by one":
                return await self._one_by_one(entry, taken, count, timeout_s)
            try:
                return await self._call(entry, taken, count, timeout_s)
            except WrongCount:  # of one completion alone a mean of all would be right
                raise
            except GradingFailed as error:
                if count == 1:
                    raise
                get_logger().warning(
                    "reward function failed, and is called for each completion alone",
                    function=file.named,
                    reason=error.detail,
                )
                parts = await self._one_by_one(entry, taken, count, timeout_s)
                if all(part.verdict in ("error", "sandbox_error") for part in parts):
                    raise
                return parts

    async def _ready(self, entry: Entry) -> tuple[JobWorker, Signature]:
        try:
            worker = await self.worker(entry)
            told = worker.loaded
            required = {str(name): bool(value) for name, value in told["parameters"].items()}
            return worker, Signature(required, bool(told["any_keyword"]), str(told["calls"]))
        except (SlotDied, KeyError, AttributeError) as error:
            raise BadRequest(f"{entry.file.named} cannot be loaded: {error}") from error

    async def _one_by_one(
        self, entry: Entry, arguments: Mapping[str, Any], count: int, timeout_s: float
    ) -> list[Part]:
        """Returns the parts of one call per completion. After MAX_LATE late ones no more are
        made."""
        parts: list[Part] = []
        num_late = 0
        for position in range(count):
            one = {name: [values[position]] for name, values in arguments.items()}
            try:
                if num_late == MAX_LATE:
                    raise GradingFailed(
                        f"{entry.file.named} was not called: it was late {num_late} times"
                    )
                parts += await self._call(entry, one, 1, timeout_s)
            except GradingFailed as error:
                num_late += "unresponsive_reward_error" in error.errors
                detail = f"{error.detail} (completion {position})"
                parts.append(
                    GradingFailed(detail, *error.errors, by_sandbox=error.by_sandbox).part()
                )
        return parts

    async def _call(
        self, entry: Entry, arguments: Mapping[str, Any], count: int, timeout_s: float
    ) -> list[Part]:
        """Returns the parts of one call. A worker that died may have been killed from outside, so
        it gets a second try; a function that ends its own process does so again."""
        named = entry.file.named
        message = {"arguments": arguments, "count": count, "timeout_s": timeout_s}
        for is_last in (False, True):
            worker, signature = await self._ready(entry)
            call = worker.open()
            grace_s = LATE_S if signature.calls == "together" else 0.0
            answered = False
            try:
                answer = await self._converse(call, message, named, timeout_s + grace_s)
                answered = True
                worker.close(call)
                return parts(answer, count, named)
            except TimeoutError as error:
                late = f"{named} did not return within {timeout_s:g} s for {count} completions"
                raise GradingFailed(late, "unresponsive_reward_error") from error
            except (StrayAnswer, CallLost) as error:
                raise _failed(f"{named} failed: {error}") from error
            except SlotDied as error:
                if is_last:
                    raise _ended_twice(named, error) from error
                get_logger().warning(
                    "reward function worker died", function=named, reason=str(error)
                )
            finally:
                if not answered:
                    await entry.drop()
        raise AssertionError("unreachable")

    async def _converse(
        self, call: Call, message: Mapping[str, Any], named: str, timeout_s: float
    ) -> Any:
        """Returns the worker's untrusted answer, after running the programs that it asks for
        meanwhile."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            answer = await call.ask(message, max(end - loop.time(), 0.001))
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


def _ended_twice(named: str, error: SlotDied) -> GradingFailed:
    if error.killed:
        return GradingFailed(
            f"the process of {named} was killed twice, from outside or because its host ran "
            f"out of memory ({error})",
            "python_grader_server_error",
            by_sandbox=True,
        )
    return GradingFailed(
        f"{named} ended its process twice: {error} (it may use 8 GiB of memory)",
        "python_grader_runtime_error",
    )
