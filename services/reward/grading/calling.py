"""How graders are called: how many items at a time, how many calls at once, each call with a
deadline, equal items of a request once.

A call that fails gives its items parts without a value, with the reason. Only what no grader can
change (the host cannot isolate programs) ends the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import sqlite3
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.reward.grading import registry
from services.reward.grading.failures import ErrorName, GradingFailed
from services.reward.grading.registry import Grader, GraderTools, in_thread_if_long
from services.reward.sandbox.base import asking, waiting
from shared.errors import BadRequest, HoneError
from shared.host.logs import get_logger
from shared.job import RewardSpec
from shared.turns import Turns
from shared.wire import Part, ScoreItem

MAX_KEPT = 64
MAX_VALUE = 1e30
"""Largest value of a grader, of either sign. With weights of up to 1e6, an advantage that no
deviation divides is still a number in float32, which ends at 3.4e38."""

HOSTS = (OSError, MemoryError, sqlite3.Error)
"""What a grader raises because of its host, such as a full disk. A text may have caused any other
error that a grader did not foresee (`with_failures_graded`)."""


class Caller:
    """One bound grader and its limits."""

    def __init__(self, grader: Grader[Any]) -> None:
        self.grader = grader
        self._turns = Turns(grader.max_concurrency)

    async def grade(self, items: Sequence[ScoreItem]) -> list[Part]:
        """Returns one part per item, in order."""
        asked = await self._alike(items)
        size = self.grader.items_per_call or len(asked) or 1
        calls = [asked[start : start + size] for start in range(0, len(asked), size)]
        parts: dict[int, Part] = {}
        await run_all(self._call(call, items, parts) for call in calls)
        return with_failures_graded(
            self.grader, items, [parts[position] for position in range(len(items))]
        )

    async def _alike(self, items: Sequence[ScoreItem]) -> list[list[int]]:
        """Returns the positions of a pure grader's items, grouped by the content that its verdict
        depends on; of another grader each item is alone."""
        if not self.grader.pure:
            return [[position] for position in range(len(items))]
        by_key: dict[bytes, list[int]] = {}
        for position, item in enumerate(items):
            key = await in_thread_if_long(functools.partial(key_of, self.grader), item)
            by_key.setdefault(key, []).append(position)
        return list(by_key.values())

    async def _call(
        self, call: Sequence[list[int]], items: Sequence[ScoreItem], found: dict[int, Part]
    ) -> None:
        first_of_all = call[0][0]
        job, group = self.grader.tools.job_id, str(items[first_of_all].prompt)
        with await self._turns.take((group,)):
            asking.set((job, group, first_of_all))
            parts = await self._parts([items[first] for first, *_ in call])
        for (first, *others), part in zip(call, parts, strict=True):
            found[first] = part
            for position in others:
                found[position] = part.model_copy(update={"cached": True, "seconds": 0.0})

    async def _parts(self, items: Sequence[ScoreItem]) -> list[Part]:
        """Returns one part per item, whatever the grader does. Raises only what ends the whole
        request."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.grader.deadline_s) as deadline:
                waiting.set(_Clock(deadline).stopped)
                parts = await self.grader.grade(items)
            if len(parts) != len(items):
                raise GradingFailed(
                    f"the grader returned {len(parts)} verdicts for {len(items)} completions"
                )
            parts = [_bounded(part) for part in parts]
        except GradingFailed as error:
            parts = [error.part()] * len(items)
        except BadRequest as error:
            parts = [GradingFailed(error.detail, "invalid_variable_error").part()] * len(items)
        except HoneError:
            raise
        except Exception as error:  # the last resort: a grader's bug costs its items, not the job
            if isinstance(error, TimeoutError) and deadline.expired():
                failure = GradingFailed(
                    f"not done within {self.grader.deadline_s:g} s", "unresponsive_reward_error"
                )
            else:
                get_logger().exception("grader failed", grader=self.grader.name)
                name = "other_error" if isinstance(error, HOSTS) else "python_grader_runtime_error"
                failure = GradingFailed(f"{type(error).__name__}: {error}", name)
            parts = [failure.part()] * len(items)
        seconds = (time.perf_counter() - start) / len(items)
        return [
            part if part.seconds else part.model_copy(update={"seconds": round(seconds, 6)})
            for part in parts
        ]


class _Clock:
    """The clock of a deadline: it stands still while a program waits for a free sandbox."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline = deadline
        self._num_waiting = 0
        self._left_s = 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        now, when = asyncio.get_running_loop().time, self._deadline.when()
        if when is not None:
            self._left_s = when - now()
            self._deadline.reschedule(None)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._deadline.reschedule(now() + self._left_s)


class Callers:
    """The graders that jobs use now, each bound once, with the `MAX_KEPT` last used ones. One that
    remembers ends with its request where that names no job. `close` closes all."""

    def __init__(self, tools: GraderTools) -> None:
        self._tools = tools
        self._kept: OrderedDict[tuple[str | None, str], _BoundGrader] = OrderedDict()

    @contextlib.asynccontextmanager
    async def of(
        self, rewards: Sequence[RewardSpec], job_id: str | None
    ) -> AsyncGenerator[list[Caller]]:
        """Yields one caller per reward; none is closed meanwhile. Raises BadRequest for a reward
        that cannot be bound."""
        kept = [self._keep(spec, job_id) for spec in rewards]
        for one in kept:
            one.users += 1
        try:
            await self._close_surplus()
            yield [one.caller for one in kept]
        finally:
            for one in kept:
                one.users -= 1
                if one.ends_with_request:
                    await one.caller.grader.close()

    async def close(self) -> None:
        for kept in self._kept.values():
            await kept.caller.grader.close()
        self._kept.clear()

    def _keep(self, spec: RewardSpec, job_id: str | None) -> _BoundGrader:
        key = (job_id, spec.model_dump_json())
        if key not in self._kept:
            grader = registry.bind(spec, replace(self._tools, job_id=job_id))
            kept = _BoundGrader(Caller(grader))
            if grader.remembers and job_id is None:
                kept.ends_with_request = True
                return kept
            self._kept[key] = kept
        self._kept.move_to_end(key)
        return self._kept[key]

    async def _close_surplus(self) -> None:
        unused = [key for key, kept in self._kept.items() if not kept.users]
        surplus = max(len(self._kept) - MAX_KEPT, 0)
        for kept in [self._kept.pop(key) for key in unused[:surplus]]:
            await kept.caller.grader.close()


@dataclass
class _BoundGrader:
    caller: Caller
    users: int = 0
    ends_with_request: bool = False


def _bounded(part: Part) -> Part:
    if part.value is None or abs(part.value) <= MAX_VALUE:
        return part
    return GradingFailed(
        f"the value is {part.value:g}; expected one from {-MAX_VALUE:g} to {MAX_VALUE:g}",
        "python_grader_runtime_error",
    ).part()


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all; the first failure ends the others and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:  # not caught: the first of them is raised
        raise errors.exceptions[0] from None


def key_of(grader: Grader[Any], item: ScoreItem) -> bytes:
    """Returns a digest of all that a pure grader's verdict on `item` depends on. 1, 1.0, True and
    "1" differ."""
    return hashlib.sha256(
        repr((grader.name, grader.params, grader.content(grader.subject(item)))).encode(
            "utf-8", "surrogatepass"
        )
    ).digest()


BY_TEXT: frozenset[ErrorName] = frozenset(
    (
        "formula_parse_error",
        "model_grader_parse_error",
        "model_grader_refusal_error",
        "python_grader_runtime_error",
        "unresponsive_reward_error",
    )
)
"""Errors that a completion's text can cause. It cannot cause that a judge is unreachable or that
the sandbox fails."""


def with_failures_graded(
    grader: Grader[Any], items: Sequence[ScoreItem], parts: Sequence[Part]
) -> list[Part]:
    """Returns the parts with a value for each failure that a text may have caused.

    A missing reward is left out of a group's normalization, so a text that causes one would escape
    a negative advantage. If the grader could grade other completions of the row, such a text gets
    the least that these got, and no more than 0 (with a negative weight the most, and no less than
    0), so that its advantage is never positive.
    """
    # How long a judge takes is no text's doing.
    by_text = BY_TEXT - {"unresponsive_reward_error"} if grader.asks_models else BY_TEXT
    failed = [
        position
        for position, part in enumerate(parts)
        if part.value is None and not by_text.isdisjoint(part.errors)
    ]
    if not failed:
        return list(parts)
    graded: dict[str, list[float]] = defaultdict(list)
    for item, part in zip(items, parts, strict=True):
        if part.value is not None:
            graded[_row(item)].append(part.value)
    all_parts, num = list(parts), 0
    for position in failed:
        if others := graded.get(_row(items[position])):
            value = max(0.0, *others) if grader.spec.weight < 0 else min(0.0, *others)
            why = f"it gets {value:g}: the grader fails on this text, not on others of its row"
            part = parts[position]
            detail = f"{part.detail}; {why}"[-1000:]
            all_parts[position] = part.model_copy(
                update={"value": value, "verdict": "wrong", "detail": detail}
            )
            num += 1
    if num:
        get_logger().warning(
            "reward fails on some texts",
            reward=grader.spec.label,
            job=grader.tools.job_id,
            failed=num,
            graded=sum(map(len, graded.values())),
            first=parts[failed[0]].detail[:200],
        )
    return all_parts


def _row(item: ScoreItem) -> str:
    """Returns what tells the item's row from others: rows that are compared with each other would
    take as many looks as a request has pairs of items."""
    return repr((item.prompt, item.row))
