"""Whether a prompt can be made of every row of a job's data, and sent. A row that is found out only
when its step comes is a dead end: the job pauses, and data that was mended is not what it was
submitted with."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.orchestrator.data.choosing import BadRow, Problem
from services.orchestrator.data.fitting import Fit, fit_of, held_out_fit
from services.orchestrator.data.preview import tokenizer_stamp
from services.orchestrator.data.tables import go_on
from services.orchestrator.loop.prompts import Prompts
from shared import codec
from shared.errors import BadRequest
from shared.job import Job
from shared.prompts.templates import ROWS_PER_REQUEST
from shared.wire import Prompt

MAX_PASSED = 1000

CHECK_S = 10.0
"""Seconds in which rows are tried when a job is submitted, those of held-out sets included: enough
for some 100,000. Of more the first are."""


def check_rows(job: Job, prompts: Prompts) -> tuple[Prompt, ...]:
    """Returns the first step's prompts. Raises BadRequest with the first row that no prompt can be
    made of, that cannot be sent, or that is too long for the model, and how many there are. Of a
    stream only the first step's rows are tried."""
    key = _key(job, prompts)
    if key in _PASSED:
        return prompts.for_step(1)
    end = time.monotonic() + CHECK_S
    fit = fit_of(job)
    if prompts.train is not None:
        _check(_Rows("data.train", prompts.train, prompts.made_of, fit), end)
    for held_out in prompts.sets:
        name = f"evaluation.sets.{held_out.name}" if held_out.name else "data.eval"
        of_set = held_out_fit(fit, job) if fit else None
        _check(_Rows(name, held_out.problems, held_out.made_of, of_set), end)
    first = prompts.for_step(1)
    if prompts.train is None:
        for prompt in first:
            _check_sendable(prompt, "data.train")
        if fit:
            fit.check(first, "data.train")
    if key:
        _PASSED[key] = None
        while len(_PASSED) > MAX_PASSED:
            _PASSED.pop(next(iter(_PASSED)), None)
    return first


def _key(job: Job, prompts: Prompts) -> str | None:
    """Returns a digest of all that says whether the rows pass; None where it is not known which
    content a source has."""
    held_out = [each.source for each in job.evaluation.sets.values()]
    named = [one for one in (job.data.train, job.data.eval, *held_out) if isinstance(one, str)]
    if prompts.train is None or len(named) != len(prompts.versions):
        return None
    same = {"name", "steps", "seed", "metadata", "rewards", "training", "lora", "memory", "wandb"}
    of_job = job.model_dump_json(exclude=same)
    told = (of_job, sorted(prompts.versions.items()), job.max_model_len, tokenizer_stamp(job))
    return hashlib.sha256(repr(told).encode()).hexdigest()


_PASSED = dict[str, None]()
"""What passed, the last `MAX_PASSED`."""


@dataclass(frozen=True)
class _Rows:
    """What is tried: the problems of `data`, as sentences call it, what makes their prompts, and
    what these have to fit into, if that is known."""

    data: str
    problems: Sequence[Problem]
    made_of: Callable[[Sequence[Problem]], Sequence[Prompt]]
    fit: Fit | None


def _check(rows: _Rows, end: float) -> None:
    faults = _faults(rows, end)
    first = next(faults, None)
    if first is None:
        if rows.fit:
            rows.fit.check_any(rows.data)
        return
    others = sum(1 for _ in faults)
    least = "at least " if time.monotonic() > end else ""
    more = (
        f"; so have {least}{others} more of its {len(rows.problems)} rows a fault" if others else ""
    )
    raise BadRequest(first.detail + more) from first


def _faults(rows: _Rows, end: float) -> Iterator[BadRow]:
    """Yields what is wrong with each row that is bad, as far as they can be tried before `end`; of
    the first rows one in any case."""
    for start in range(0, len(rows.problems), ROWS_PER_REQUEST):
        go_on()
        several = rows.problems[start : start + ROWS_PER_REQUEST]
        if fault := _fault(rows, several):
            yield from _single_faults(rows, several, fault, end)
        if time.monotonic() > end:
            return


def _single_faults(
    rows: _Rows, several: Sequence[Problem], known: BadRow, end: float
) -> Iterator[BadRow]:
    """Yields the fault of each row, `known` if there is time for none."""
    any_found = False
    for problem in several:
        if fault := _fault(rows, [problem]):
            any_found = True
            yield fault
        if time.monotonic() > end:
            break
    if not any_found:
        yield known


def _fault(rows: _Rows, problems: Sequence[Problem]) -> BadRow | None:
    try:
        prompts = rows.made_of(problems)
        for prompt in prompts:
            _check_sendable(prompt, rows.data)
        if rows.fit:
            rows.fit.check(prompts, rows.data)
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
