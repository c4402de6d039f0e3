"""The job's prompts, made of the rows of its data. A step's prompts are a pure function of (job
seed, step, round), so resuming needs no saved position in the data. With `[difficulty]` they also
depend on the verdicts on earlier groups, which the run folder has (`History`)."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from services.orchestrator.data.choosing import (
    PROMPT,
    BadRow,
    Columns,
    Problem,
    peek_columns,
    select_problems,
    stream_problems,
    unrenderable,
)
from services.orchestrator.data.order import History, Order, SkippingOrder, StreamOrder, TableOrder
from services.orchestrator.data.sources import SourceRequest, open_source, source_requests
from services.orchestrator.data.tables import Table
from services.orchestrator.grpo.groups import num_rounds
from shared.errors import BadRequest
from shared.job import DataSpec, Job, TemplateMessage
from shared.job.checks import all_warm_up
from shared.settings import Settings
from shared.templates import RENDERER, RenderFailed
from shared.wire import Prompt
from shared.wire.messages import for_template, normalized

Content = str | tuple[dict[str, Any], ...]

MAX_STEPS = 10**9

FILTER_CPU_S, ACCEPTED_FILTER_CPU_S = 120.0, 240.0
"""Seconds of CPU time that `data.filter` may take over all rows of a source; in a stream, until it
is true of a row. Enough for some millions of rows; bounded, because one process runs the filters
and templates of all jobs. An accepted job has twice as many: the same work takes longer on a busy
machine."""

NUM_FIRST = 8
"""Held-out prompts of each set among the first prompts of a job of 0 steps."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out set of a table, called `name` in the job ("" for `data.eval`) and `where` in
    messages. All of its problems have the `columns`."""

    name: str
    spec: DataSpec
    table: Table
    columns: tuple[str, ...]
    problems: Sequence[Problem]

    @property
    def where(self) -> str:
        return self.table.name

    def prompts(self) -> tuple[Prompt, ...]:
        """Returns the prompts. Templates may take long: call it off the event loop."""
        return self.made_of(self.problems)

    def made_of(self, problems: Sequence[Problem]) -> tuple[Prompt, ...]:
        """Returns the prompts of some of the problems. Raises BadRow for a prompt that cannot be
        made."""
        return make_prompts(problems, self.spec, self.where)


@dataclass(eq=False)
class Prompts:
    """Training prompts by step, and the held-out ones. Making them may wait for a disk, the Hub or
    a template: call the methods off the event loop.

    Every problem, also held-out ones, has the `columns`. `versions` identify the sources' content,
    by "train", "eval" and "eval.<set>", if known. `train` are all training problems, which messages
    call `name`, None for a stream; `sets` are the held-out sets. `history` has the verdicts on
    earlier groups, for an order that skips problems. A job of 0 steps has no training problems, and
    no `order`; neither has a job whose groups are sampled elsewhere. `tables` are the sources.
    """

    job: Job
    order: Order | None
    sets: Sequence[HeldOut]
    columns: tuple[str, ...] = ()
    name: str = "data.train"
    versions: dict[str, str] = field(default_factory=dict[str, str])
    train: Sequence[Problem] | None = None
    history: History = field(default_factory=History)
    tables: tuple[Table, ...] = ()

    @property
    def num_train(self) -> int | None:
        return None if self.train is None else len(self.train)

    @property
    def num_held_out(self) -> int:
        return sum(len(held_out.problems) for held_out in self.sets)

    def for_step(self, step: int, round: int = 0) -> tuple[Prompt, ...]:
        """Returns the step's `[P]` prompts. Each pass over the data has another order; step 1 is
        the first.

        Rounds from 1 return prompts that may replace groups without signal. They come from rows
        that no earlier round of the step could have taken, so they are fewer than `[P]` once a
        small data set has no more.
        """
        assert self.order is not None, "a job of 0 steps has no steps"
        return self.made_of(self.order.take(step, round))

    def first(self) -> tuple[Prompt, ...]:
        """Returns the prompts of the first step; of a job of 0 steps, the first held-out prompts,
        taken from each set in turn."""
        if self.order is not None:
            return self.for_step(1)
        firsts = [held_out.made_of(held_out.problems[:NUM_FIRST]) for held_out in self.sets]
        rounds = itertools.zip_longest(*firsts)
        return tuple(prompt for each in rounds for prompt in each if prompt is not None)

    def made_of(self, problems: Sequence[Problem]) -> tuple[Prompt, ...]:
        """Returns the prompts of training problems. Raises BadRow for a prompt that cannot be
        made."""
        return make_prompts(problems, self.job.data, self.name)

    def num_skipped(self, step: int) -> int | None:
        """Returns how many problems the step skips; None if the job skips none, or the step is no
        longer known."""
        return self.order.num_skipped(step) if isinstance(self.order, SkippingOrder) else None

    def held_out(self) -> dict[str, tuple[Prompt, ...]]:
        """Returns the prompts of each held-out set by name, the same each time; "" is
        `data.eval`."""
        return {held_out.name: held_out.prompts() for held_out in self.sets}


def load_prompts(
    job: Job,
    settings: Settings,
    versions: Mapping[str, str] | None = None,
    history: History | None = None,
) -> Prompts:
    """Returns the job's prompts. `versions` are its data's versions at submission: other content is
    refused. `history` has the verdicts on its groups so far.

    Raises BadRequest for a source that is missing, not allowed, empty or unreadable, and for a
    missing column; OperatorActionNeeded for a file that has changed; Unavailable while the Hub
    cannot be reached. Takes as long as reading the files; call it off the event loop.
    """
    history, tables = history or History(), dict[str, Table]()
    order, problems, columns = None, (), list[tuple[str, ...]]()
    if ask := source_requests(job, settings, versions).get("train"):
        tables["train"] = train = open_source(ask)
        own, order, problems = _ordered(job, train, history, _filter_cpu_s(versions))
        columns.append(own.names)
    held_out = load_held_out(job, settings, versions)
    tables |= {_version_key(each.name): each.table for each in held_out}
    columns += [each.columns for each in held_out]
    return Prompts(
        job,
        order,
        held_out,
        tuple(name for name in next(iter(columns), ()) if all(name in each for each in columns)),
        tables["train"].name if ask else "data.train",
        {key: table.version for key, table in tables.items() if table.version},
        problems,
        history,
        tuple(tables.values()),
    )


def with_steps(job: Job, num_train: int | None) -> Job:
    """Returns the job with the number of steps for `data.epochs`, if given. The last step of a pass
    takes some prompts of the next pass. Raises BadRequest if all of them are of a warm-up."""
    if job.data.epochs is None or num_train is None:
        return job
    epochs = Fraction(str(job.data.epochs))  # as written: 1.1 * 10 is above 11 in floats
    steps = math.ceil(epochs * num_train / job.sampling.prompts_per_step)
    with_epochs = job.model_copy(update={"steps": min(steps, job.steps or steps, MAX_STEPS)})
    if with_epochs.warmup.steps >= with_epochs.steps:
        raise BadRequest(f"data.epochs is {job.data.epochs:g}: {all_warm_up(with_epochs)}")
    return with_epochs


def load_held_out(
    job: Job, settings: Settings, versions: Mapping[str, str] | None = None
) -> list[HeldOut]:
    """Returns the job's held-out sets, `data.eval` first. Raises as `load_prompts`."""
    asks, limit = source_requests(job, settings, versions), job.evaluation.num_prompts
    cpu_s = _filter_cpu_s(versions)
    held_out = [_held_out("", asks["eval"], limit, cpu_s)] if "eval" in asks else []
    for name, each in job.evaluation.sets.items():
        ask = asks[_version_key(name)]
        held_out.append(_held_out(name, ask, each.num_prompts or limit, cpu_s))
    return held_out


def _filter_cpu_s(versions: Mapping[str, str] | None) -> float:
    """Returns the seconds for a filter; the data of an accepted job has `versions`."""
    return FILTER_CPU_S if versions is None else ACCEPTED_FILTER_CPU_S


def _version_key(name: str) -> str:
    return f"eval.{name}" if name else "eval"


def _ordered(
    job: Job, table: Table, history: History, filter_cpu_s: float
) -> tuple[Columns, Order, Sequence[Problem] | None]:
    if not job.data.streaming:
        columns, problems = select_problems(table, job.data, job.data.max_samples, filter_cpu_s)
        skips = job.difficulty.skips
        order = SkippingOrder(job, problems, history) if skips else TableOrder(job, problems)
        return columns, order, problems
    columns = peek_columns(table, job.data)
    order = StreamOrder(
        job, lambda: stream_problems(table, columns, job.data, filter_cpu_s), num_rounds(job)
    )
    return columns, order, None


def _held_out(name: str, ask: SourceRequest, limit: int | None, cpu_s: float) -> HeldOut:
    table, spec = open_source(ask), ask.spec
    if spec.streaming:
        columns = peek_columns(table, spec)
        passing = stream_problems(table, columns, spec, cpu_s)
        problems: Sequence[Problem] = [*itertools.islice(passing, limit)]
    else:
        columns, problems = select_problems(table, spec, limit, cpu_s)
    return HeldOut(name, spec, table, columns.names, problems)


def make_prompts(problems: Sequence[Problem], spec: DataSpec, where: str) -> tuple[Prompt, ...]:
    """Returns the prompt of each problem. Raises BadRow for a prompt that cannot be made, and
    BadRequest for a template that works on no row."""
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
    except RenderFailed as error:
        raise unrenderable(key, error, problems, where) from error


def _system(spec: DataSpec) -> list[dict[str, Any]]:
    return [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []


def _with_system(text: str, spec: DataSpec) -> Content:
    system = _system(spec)
    return (*system, {"role": "user", "content": text}) if system else text


def _given(problem: Problem, spec: DataSpec, where: str) -> Content:
    """Returns the prompt from a row's prompt column."""
    value = problem.row[PROMPT]
    if isinstance(value, dict) and "messages" in value:  # OpenAI's `input` of preferences
        value = value["messages"]
    if isinstance(value, str):
        return _with_system(value, spec)
    column = spec.columns.get(PROMPT, PROMPT)
    at = f"row {problem.index} of {where}, column {column!r}"
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return (*_system(spec), *chat_of(value, at))
    raise BadRow(
        f"{at}: got {value!r:.80}; expected text or a list of chat messages, each with a role and "
        "its content"
    )


def chat_of(messages: Sequence[Any], at: str) -> tuple[dict[str, Any], ...]:
    """Returns a row's chat messages in the form in which samplers get them. Raises BadRow for what
    no chat template can be given."""
    try:
        for_template(messages)
        return normalized(messages)
    except ValueError as error:
        raise BadRow(f"{at}: {error}") from error


def _is_message(value: Any) -> bool:
    """Whether the value has a role and another key that is not None. `content` is not required: an
    assistant's message with tool calls lacks it. A key that only other rows have is None."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and any(item is not None for key, item in value.items() if key != "role")
    )


def group_seed(job: Job, *place: object) -> int | None:
    """Returns the seed of the first completion of the group at `place` in the job; each next
    completion has one more. None: the job does not ask for seeds."""
    if not job.sampling.repeatable:
        return None
    named = ":".join(map(str, (job.seed, *place)))
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 2
