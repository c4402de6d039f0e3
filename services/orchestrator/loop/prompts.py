"""The job's prompts, made of the rows of its data. Which ones a step takes is a pure function of
(job seed, step, round): resuming needs no saved position."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from services.orchestrator.data.choosing import (
    PROMPT,
    BadRow,
    Columns,
    Problem,
    chosen,
    looked_at,
    streamed,
    unrenderable,
)
from services.orchestrator.data.order import InStream, InTable, Order
from services.orchestrator.data.rendering import RENDERER, CannotRender
from services.orchestrator.data.sources import Ask, open_source
from services.orchestrator.data.tables import Table
from services.orchestrator.loop.groups import num_rounds
from shared.config import Settings
from shared.job import DataSpec, Job, TemplateMessage
from shared.wire import Prompt

Content = str | tuple[dict[str, Any], ...]


class Prompts:
    """Training prompts by step, and the held-out ones. Making them may wait for a disk, the Hub or
    a template: call the methods off the event loop.

    `columns` are those that every problem has, held-out ones included; `versions` say which content
    the sources have, by "train" and "eval", as far as that is known. `train` are all problems to
    train on, None for a stream.
    """

    def __init__(
        self,
        job: Job,
        order: Order,
        held_out: Sequence[Problem] = (),
        *,
        columns: tuple[str, ...] = (),
        names: tuple[str, str] = ("data.train", "data.eval"),
        versions: Mapping[str, str] | None = None,
        train: Sequence[Problem] | None = None,
    ) -> None:
        self._job = job
        self._order = order
        self._held_out = held_out
        self._names = names
        self.columns = columns
        self.versions = dict(versions or {})
        self.train = train

    @property
    def num_train(self) -> int | None:
        return None if self.train is None else len(self.train)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def for_step(self, step: int, round: int = 0) -> tuple[Prompt, ...]:
        """Returns the step's `[P]` prompts. Each pass over the data has another order; step 1 is
        the first.

        In rounds from 1, those that may replace groups without signal: drawn from all rows that no
        earlier round of the step could have taken, so fewer than `[P]` once a small data set has no
        more.
        """
        return self.made_of(self._order.take(step, round))

    def made_of(self, problems: Sequence[Problem]) -> tuple[Prompt, ...]:
        """Returns the prompts of problems to train on. Raises BadRow for one that cannot be
        made."""
        return make_prompts(problems, self._job.data, self._names[0])

    def held_out(self) -> tuple[Prompt, ...]:
        """Returns the evaluation problems, the same ones each time; empty without `data.eval`."""
        return make_prompts(self._held_out, self._job.data, self._names[1])


def load_prompts(
    job: Job, settings: Settings, versions: Mapping[str, str] | None = None
) -> Prompts:
    """Returns the job's prompts. With the `versions` that its data had when it was submitted, these
    and no others.

    Raises BadRequest for a source that is missing, not allowed, empty or unreadable, and for a
    column that is not there; MustPause for a file that is not what it was; Unavailable while the
    Hub cannot be reached. Takes as long as reading the files; call it off the event loop.
    """
    spec, wanted = job.data, versions or {}
    train = open_source(
        Ask("data.train", spec.train, spec.train_split, spec, settings, wanted.get("train"))
    )
    found = {"train": train.version}
    columns, order, problems = _ordered(job, train)
    names, eval_name = columns.names, "data.eval"
    held_out: Sequence[Problem] = ()
    if spec.eval is not None:
        table = open_source(
            Ask("data.eval", spec.eval, spec.eval_split, spec, settings, wanted.get("eval"))
        )
        of_eval, held_out = _held_out(job, table)
        names = tuple(name for name in names if name in of_eval.names)
        found["eval"], eval_name = table.version, table.name
    return Prompts(
        job,
        order,
        held_out,
        columns=names,
        names=(train.name, eval_name),
        versions={name: version for name, version in found.items() if version},
        train=problems,
    )


def _ordered(job: Job, table: Table) -> tuple[Columns, Order, Sequence[Problem] | None]:
    if not job.data.streaming:
        columns, problems = chosen(table, job.data, job.data.max_samples)
        return columns, InTable(job, problems), problems
    columns = looked_at(table, job.data)
    order = InStream(job, lambda: streamed(table, columns, job.data), num_rounds(job))
    return columns, order, None


def _held_out(job: Job, table: Table) -> tuple[Columns, Sequence[Problem]]:
    limit = job.evaluation.num_prompts
    if not job.data.streaming:
        return chosen(table, job.data, limit)
    columns = looked_at(table, job.data)
    problems = streamed(table, columns, job.data)
    return columns, list(itertools.islice(problems, limit))


def make_prompts(problems: Sequence[Problem], spec: DataSpec, where: str) -> tuple[Prompt, ...]:
    """Returns the prompt of each problem. Raises BadRow for one that cannot be made, and BadRequest
    for a template that works on none."""
    problems = list(problems)
    if spec.template is not None:
        texts = _rendered("data.template", spec.template, problems, where)
        contents: list[Any] = [_with_system(text, spec) for text in texts]
    elif spec.messages is not None:
        contents = _conversations(spec.messages, problems, spec, where)
    else:
        contents = [_given(problem, spec, where) for problem in problems]
    for problem, content in zip(problems, contents, strict=True):
        if not content:
            raise BadRow(f"row {problem.index} of {where}: its prompt is empty; expected text")
    return tuple(
        Prompt(index=problem.index, content=content, row=problem.row)
        for problem, content in zip(problems, contents, strict=True)
    )


def _conversations(
    messages: tuple[TemplateMessage, ...],
    problems: Sequence[Problem],
    spec: DataSpec,
    where: str,
) -> list[Content]:
    texts_MP = [
        _rendered(f"data.messages.{number}.content", message.content, problems, where)
        for number, message in enumerate(messages)
    ]
    roles = [message.role for message in messages]
    return [
        (
            *_system(spec),
            *({"role": role, "content": text} for role, text in zip(roles, texts, strict=True)),
        )
        for texts in zip(*texts_MP, strict=True)
    ]


def _rendered(key: str, template: str, problems: Sequence[Problem], where: str) -> list[str]:
    try:
        return RENDERER.texts(template, [problem.row for problem in problems])
    except CannotRender as error:
        raise unrenderable(key, error, problems, where) from error


def _system(spec: DataSpec) -> list[dict[str, Any]]:
    return [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []


def _with_system(text: str, spec: DataSpec) -> Content:
    system = _system(spec)
    return (*system, {"role": "user", "content": text}) if system else text


def _given(problem: Problem, spec: DataSpec, where: str) -> Content:
    """Returns the prompt that a row has in its column."""
    value = problem.row[PROMPT]
    if isinstance(value, str):
        return _with_system(value, spec)
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return (*_system(spec), *value)
    column = spec.columns.get(PROMPT, PROMPT)
    raise BadRow(
        f"row {problem.index} of {where}, column {column!r}: got {value!r:.80}; expected text or a "
        "list of chat messages, each with a role and its content"
    )


def _is_message(value: Any) -> bool:
    """Whether it has a role and something beside it: what an assistant's tool calls stand in has no
    `content`. A key that only other rows have is None."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and any(said is not None for key, said in value.items() if key != "role")
    )
