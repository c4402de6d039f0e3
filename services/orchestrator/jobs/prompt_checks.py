"""Checks that every row of a job's data makes a prompt that can be sent, and counts tokens. A bad
row that is found only at its step is a dead end: the job pauses, and fixed data would differ from
the submitted data.

`python -m services.orchestrator.jobs.prompt_checks` reads a job as JSON, and prints the lengths of
its prompts as JSON.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.orchestrator.data.choosing import (
    BadRow,
    Fit,
    Problem,
    fit_of,
    held_out_fit,
    reader_of,
    tokenizer_stamp,
)
from services.orchestrator.data.sources import is_on_hub
from services.orchestrator.data.tables import check_wanted
from services.orchestrator.grpo.prompts import Prompts, load_prompts
from services.orchestrator.grpo.supervised import sft_examples
from services.orchestrator.store.records import named_sources
from shared.errors import BadRequest, HoneError
from shared.http import codec
from shared.job import Job
from shared.job.running import EvaluationSpec
from shared.settings import Settings, load_settings
from shared.templates import ROWS_PER_REQUEST, TokenizerUnavailable
from shared.wire import Prompt, PromptLengths

MAX_PASSED = 1000

CHECK_S = 10.0
"""Seconds for trying rows when a job is submitted, held-out sets included: enough for some 100,000
rows. If there are more, the first ones are tried."""

MAX_COUNTED = 256
"""Prompts whose tokens are counted: a second or two for prompts of some thousand tokens."""

MAX_COUNTED_SIZE = 4_000_000
"""Characters after which no further prompt is counted: a few seconds, however long prompts are."""


def check_rows(job: Job, prompts: Prompts) -> tuple[Prompt, ...]:
    """Returns the job's first prompts. Raises BadRequest with the first row that makes no prompt,
    cannot be sent, or is too long for the model, and the number of such rows. In a stream only the
    first step's rows are tried."""
    key = _key(job, prompts)
    if key in _PASSED:
        return prompts.first()
    end = time.monotonic() + CHECK_S
    fit, made_of = fit_of(job), prompts.made_of
    samples = not job.trains_without_sampling  # after the training prompts
    if prompts.train is not None:
        if job.has_answers:
            made_of = _with_answers(made_of, job, prompts.name)
        _check(_Rows("data.train", prompts.train, made_of, fit if samples else None), end)
    for held_out in prompts.sets:
        name = f"evaluation.sets.{held_out.name}" if held_out.name else "data.eval"
        of_set, made_of = held_out_fit(fit, job) if fit and job.rewards else None, held_out.made_of
        if not job.rewards:
            made_of = _with_answers(made_of, job, held_out.where)
        _check(_Rows(name, held_out.problems, made_of, of_set), end)
    first = prompts.first()
    if prompts.train is None:
        if job.has_answers:
            sft_examples(first, job, prompts.name)
        for prompt in first:
            _check_sendable(prompt, "data.train")
        if fit and samples:
            fit.check(first, "data.train")
    if key:
        _PASSED[key] = None
        while len(_PASSED) > MAX_PASSED:
            _PASSED.pop(next(iter(_PASSED)), None)
    return first


MadeOf = Callable[[Sequence[Problem]], Sequence[Prompt]]


def _with_answers(made_of: MadeOf, job: Job, where: str) -> MadeOf:
    """Returns the function that also makes the answers of the problems, and returns the prompts
    that they follow."""

    def made(problems: Sequence[Problem]) -> Sequence[Prompt]:
        return [example.prompt for example in sft_examples(made_of(problems), job, where)]

    return made


def _key(job: Job, prompts: Prompts) -> str | None:
    """Returns a digest of everything that decides whether the rows pass; None if a source's content
    is not identified."""
    if prompts.train is None or len(named_sources(job)) != len(prompts.versions):
        return None
    same = {"name", "steps", "seed", "metadata", "rewards", "training", "lora", "memory"}
    same |= {"wandb", "trackers"}
    of_job = job.model_dump_json(exclude=same)
    answers = job.has_answers, job.training.objective, job.training.train_on
    told = (
        of_job,
        answers,
        sorted(prompts.versions.items()),
        job.max_model_len,
        tokenizer_stamp(job),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()


_PASSED = dict[str, None]()
"""Keys of the last `MAX_PASSED` data sets that passed."""


@dataclass(frozen=True)
class _Rows:
    """Rows to try: the problems of `data`, the function that makes their prompts, and the length
    limits of the prompts, if known. Messages call the rows `data`."""

    data: str
    problems: Sequence[Problem]
    made_of: MadeOf
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
    """Yields the fault of each bad row among the rows that can be tried before `end`. The first
    rows are always tried."""
    for start in range(0, len(rows.problems), ROWS_PER_REQUEST):
        check_wanted()
        several = rows.problems[start : start + ROWS_PER_REQUEST]
        if fault := _fault(rows, several):
            yield from _single_faults(rows, several, fault, end)
        if time.monotonic() > end:
            return


def _single_faults(
    rows: _Rows, several: Sequence[Problem], known: BadRow, end: float
) -> Iterator[BadRow]:
    """Yields the fault of each row; `known` if there is no time to try any."""
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
    """Raises BadRow naming the row, and the column if the fault is in a column."""
    try:
        _encode(prompt)
    except BadRequest as error:
        at = f"row {prompt.index} of {data}"
        for name, value in prompt.row.items():
            try:
                _encode(Prompt(index=0, content="", row={name: value}))
            except BadRequest as of_value:
                raise BadRow(f"{at}, column {name!r}: {of_value.detail}") from of_value
        raise BadRow(f"{at}, its prompt: {error.detail}") from error


def _encode(prompt: Prompt) -> None:
    """Tries msgpack and JSON: services get msgpack, but accept only values that JSON can carry."""
    codec.encode(prompt, codec.MSGPACK)
    codec.encode(prompt)


def prompt_lengths(job: Job, settings: Settings) -> PromptLengths:
    """Returns the lengths of training prompts. Takes as long as reading the file. The Hub is not
    asked, because a plan must not wait for a download."""
    if job.is_pushed:
        return PromptLengths(why_not="the job's groups are sampled elsewhere")
    if job.data.train is not None and is_on_hub(job.data.train):
        name = job.data.train
        return PromptLengths(
            why_not=f"a dry run counts the tokens of {name!r}, on the Hugging Face Hub"
        )
    data = job.data.model_copy(update={"eval": None})
    trained = job.model_copy(update={"data": data, "evaluation": EvaluationSpec()})
    try:
        return counted(trained, load_prompts(trained, settings))
    except HoneError as error:
        return PromptLengths(why_not=error.detail)


def counted(job: Job, prompts: Prompts) -> PromptLengths:
    """Returns the lengths of at most `MAX_COUNTED` prompts, taken evenly from the data; of a
    stream, of the first step's. Raises as `Prompts.made_of`."""
    try:
        reader = reader_of(job)
    except TokenizerUnavailable as error:
        return PromptLengths(why_not=str(error))
    every = 0
    if prompts.train is None:
        made = prompts.first()[:MAX_COUNTED]
    else:
        every = math.ceil(len(prompts.train) / MAX_COUNTED)
        made = prompts.made_of(prompts.train[::every])
    if job.has_answers:
        made = tuple(example.prompt for example in sft_examples(made, job, prompts.name))
    counts, size = list[int](), 0
    for prompt in made:
        counts += reader.count([prompt.content])
        size += len(str(prompt.content))
        if size > MAX_COUNTED_SIZE:
            break
    is_all = every == 1 and len(counts) == len(made)
    return PromptLengths(longest=max(counts, default=None), num=len(counts), is_all=is_all)


def main() -> None:
    job = codec.decode(Job, sys.stdin.buffer.read())
    sys.stdout.write(prompt_lengths(job, load_settings()).model_dump_json())


if __name__ == "__main__":
    main()
