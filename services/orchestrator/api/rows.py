"""Whether a prompt can be made of every row of a job's data, and sent. A row that is found out only
when its step comes is a dead end: the job pauses, and data that was mended is not what it was
submitted with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from services.orchestrator.data.choosing import BadRow, Problem
from services.orchestrator.data.rendering import ROWS_PER_REQUEST
from services.orchestrator.loop.prompts import Prompts
from shared import codec
from shared.errors import BadRequest
from shared.wire import Prompt

CHECK_S = 10.0
"""Seconds in which rows are tried when a job is submitted: enough for some 100,000. Of a larger
table the first are."""


def check_rows(prompts: Prompts) -> tuple[Prompt, ...]:
    """Returns the first step's prompts. Raises BadRequest with the first row that no prompt can be
    made of, or that cannot be sent, and how many there are. Of a stream only the first step's rows
    are tried."""
    if prompts.train is not None:
        _check(prompts, prompts.train, "data.train")
    first = prompts.for_step(1)
    held_out = {
        f"evaluation.sets.{name}" if name else "data.eval": several
        for name, several in prompts.held_out().items()
    }
    for data, several in ({"data.train": first} | held_out).items():
        for prompt in several:
            _check_sendable(prompt, data)
    return first


def _check(prompts: Prompts, problems: Sequence[Problem], data: str) -> None:
    end = time.monotonic() + CHECK_S
    faults = _faults(prompts, problems, data, end)
    first = next(faults, None)
    if first is None:
        return
    others = sum(1 for _ in faults)
    least = "at least " if time.monotonic() > end else ""
    more = f"; so have {least}{others} more of its {len(problems)} rows a fault" if others else ""
    raise BadRequest(first.detail + more) from first


def _faults(
    prompts: Prompts, problems: Sequence[Problem], data: str, end: float
) -> Iterator[BadRow]:
    """Yields what is wrong with each row that is bad, as far as they can be tried before `end`."""
    for start in range(0, len(problems), ROWS_PER_REQUEST):
        several = problems[start : start + ROWS_PER_REQUEST]
        if _fault(prompts, several, data):
            found = (_fault(prompts, [problem], data) for problem in several)
            yield from filter(None, found)
        if time.monotonic() > end:
            return


def _fault(prompts: Prompts, problems: Sequence[Problem], data: str) -> BadRow | None:
    try:
        for prompt in prompts.made_of(problems):
            _check_sendable(prompt, data)
    except BadRow as error:
        return error
    return None


def _check_sendable(prompt: Prompt, data: str) -> None:
    """Raises BadRow with the row, and the column if it is that."""
    try:
        _encode(prompt)
    except BadRequest as error:
        at = f"row {prompt.index} of {data}"
        for name, value in prompt.row.items():
            _check_value(name, value, at)
        raise BadRow(f"{at}, its prompt: {error.detail}") from error


def _encode(prompt: Prompt) -> None:
    """In both ways: msgpack goes to services, which take what JSON can carry."""
    codec.encode(prompt, codec.MSGPACK)
    codec.encode(prompt)


def _check_value(name: str, value: Any, at: str) -> None:
    try:
        _encode(Prompt(index=0, content="", row={name: value}))
    except BadRequest as error:
        raise BadRow(f"{at}, column {name!r}: {error.detail}") from error
