"""Checks the answers of a worker of a job's own code, which are untrusted, and makes parts and
programs of them."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from services.reward.grading.failures import ErrorName, GradingFailed
from services.reward.job_code.inside_tools import KEEP_CHARS
from shared.explain import sentences
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
