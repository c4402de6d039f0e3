"""Chooses the rows of a source that are problems, and renames their columns. And counts the tokens
of prompts in the job's model: whether they leave enough tokens for completions, and for a dry run
how the first prompts are rendered."""

from __future__ import annotations

import itertools
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.orchestrator.data.hub import cached_model
from services.orchestrator.data.tables import (
    ROWS_LOOKED_AT,
    ArrowTable,
    Row,
    Rows,
    Table,
    check_wanted,
    no_rows,
)
from shared.errors import BadRequest
from shared.explain import nearest
from shared.job import DataSpec, Job
from shared.templates import (
    RENDERER,
    ROWS_PER_REQUEST,
    PromptReader,
    RenderFailed,
    TokenizerUnavailable,
    prompt_reader,
)
from shared.weights.model_folder import limit_of, model_folder, read_config, window_of
from shared.wire import PreviewedPrompt, Prompt

PROMPT = "prompt"
"""The column with the prompt, if no template makes it."""

MAX_FILTERS = 16
"""Most filters whose kept rows are cached, at eight bytes a row."""


class BadRow(BadRequest):
    """A row without a valid prompt. Other rows may have one."""


@dataclass(frozen=True)
class Problem:
    """A row, and its number in the source, from 0."""

    index: int
    row: Row


@dataclass(frozen=True)
class Columns:
    """The columns of a source under the job's names: `old[new]` is the source's name for each."""

    old: dict[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.old)

    def problem(self, index: int, row: Row) -> Problem:
        return Problem(index, {new: row.get(old) for new, old in self.old.items()})


class SelectedProblems(Sequence[Problem]):
    """The problems of a table, in its order. A row is read when it is accessed."""

    def __init__(self, rows: Rows, columns: Columns, indices: Sequence[int]) -> None:
        self._rows = rows
        self._columns = columns
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def number(self, position: int) -> int:
        """Returns the problem's row number in the source, without reading the row."""
        return self._indices[position]

    def __getitem__(self, position: Any, /) -> Any:
        if isinstance(position, slice):
            return SelectedProblems(self._rows, self._columns, self._indices[position])
        index = self._indices[position]
        return self._columns.problem(index, self._rows[index])


def select_problems(
    table: Table, spec: DataSpec, limit: int | None = None, filter_cpu_s: float = math.inf
) -> tuple[Columns, SelectedProblems]:
    """Returns the first `limit` problems of a table. Raises BadRequest if there are none, or the
    filter takes more than `filter_cpu_s` seconds of CPU time."""
    rows = table.rows()
    if not len(rows):
        raise no_rows(table.name)
    columns = columns_of(rows.column_names, table, spec)
    indices: Sequence[int] = range(len(rows))
    if spec.filter is not None:
        indices = _kept_rows(table, spec, columns, limit, filter_cpu_s)
        if not indices:
            raise BadRequest(
                f"data.filter {spec.filter!r} is true of no row of {table.name}; expected one"
            )
    return columns, SelectedProblems(rows, columns, indices[:limit])


def stream_problems(
    table: Table, columns: Columns, spec: DataSpec, filter_cpu_s: float = math.inf
) -> Iterator[Problem]:
    """Yields the problems of a table in order, without holding its rows. Raises BadRequest if the
    filter takes more than `filter_cpu_s` seconds of CPU time until a row passes."""
    problems = (columns.problem(index, row) for index, row in enumerate(table.stream()))
    if spec.filter is None:
        return problems
    return _passing(problems, spec, table.name, _Budget(filter_cpu_s, per_problem=True))


def peek_columns(table: Table, spec: DataSpec) -> Columns:
    """Returns the columns of a stream's first rows. Raises BadRequest if there are no rows."""
    first = list(itertools.islice(table.stream(), ROWS_LOOKED_AT))
    if not first:
        raise no_rows(table.name)
    names = list(dict.fromkeys(itertools.chain.from_iterable(first)))
    return columns_of(names, table, spec)


def columns_of(names: Sequence[str], table: Table, spec: DataSpec) -> Columns:
    """Returns the columns, renamed. Raises BadRequest for a column that is missing, or that cannot
    be read."""
    where = table.name
    _check_types(table, spec)
    for new, old in spec.columns.items():
        if old not in names:
            raise BadRequest(
                f"{where} has no column {old!r} (data.columns.{new}); "
                f"{nearest(old, names, 'its columns')}"
            )
    renamed = set(spec.columns.values())
    kept = {name: name for name in names if name not in renamed}
    columns = Columns(kept | spec.columns)
    if spec.template is None and spec.messages is None and PROMPT not in columns.old:
        raise BadRequest(
            f"{where} has no column {PROMPT!r}; its columns are {', '.join(names)}. Name the one "
            'with the prompt, as in data.columns = { prompt = "question" }, or make prompts of '
            "several by data.template or data.messages"
        )
    return columns


EXPRESSION = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
"""The expressions and statements in a template."""


def _check_types(table: Table, spec: DataSpec) -> None:
    """Raises BadRequest for a column that the job reads and whose type no service can be sent."""
    for column, kind in table.left_out.items() if isinstance(table, ArrowTable) else ():
        if key := _reader_of(column, spec):
            raise BadRequest(
                f"{key} reads the column {column!r} of {table.name}, whose type is {kind}; "
                "expected text, numbers, or lists and tables of them: convert the column to text"
            )


def _reader_of(column: str, spec: DataSpec) -> str | None:
    """Returns the key of the job that reads the column `column` of the data; None if none does."""
    for new, old in spec.columns.items():
        if old == column:
            return f"data.columns.{new}"
    if column == PROMPT and spec.template is None and spec.messages is None:
        return "the prompt"
    sources = {"data.template": spec.template, "data.answer": spec.answer}
    for number, message in enumerate(spec.messages or ()):
        sources[f"data.messages.{number}.content"] = message.content
    computed = {key: " ".join(EXPRESSION.findall(text or "")) for key, text in sources.items()}
    computed["data.filter"] = spec.filter or ""
    named = re.compile(rf"\b{re.escape(column)}\b")
    return next((key for key, text in computed.items() if named.search(text)), None)


_KEPT: dict[str, array[int]] = {}
"""The rows of the last `MAX_FILTERS` filters, by the key that identifies table and filter."""


def _kept_rows(
    table: Table, spec: DataSpec, columns: Columns, limit: int | None, max_cpu_s: float
) -> array[int]:
    """Returns the numbers of the first `limit` rows that the filter keeps, cached if the table's
    content is identified."""
    key = repr((table.version, spec.filter, columns.old, limit))
    kept = _KEPT.pop(key, None)
    if kept is None:
        rows = table.rows()
        problems = SelectedProblems(rows, columns, range(len(rows)))
        passing = _passing(problems, spec, table.name, _Budget(max_cpu_s))
        kept = array("q", itertools.islice((problem.index for problem in passing), limit))
    if table.version is not None:
        _KEPT[key] = kept
    while len(_KEPT) > MAX_FILTERS:
        _KEPT.pop(next(iter(_KEPT)), None)
    return kept


@dataclass
class _Budget:
    """CPU seconds that a filter may take, over all rows or for each row that passes."""

    max_cpu_s: float
    per_problem: bool = False
    cpu_s: float = 0.0
    num_rows: int = 0

    def spend(self, cpu_s: float, holds: Sequence[bool]) -> bool:
        """Returns whether any budget is left."""
        if self.per_problem and any(holds):
            self.cpu_s, self.num_rows = 0.0, 0
            return True
        self.cpu_s += cpu_s
        self.num_rows += len(holds)
        return self.cpu_s <= self.max_cpu_s


def _passing(
    problems: Iterable[Problem], spec: DataSpec, where: str, budget: _Budget
) -> Iterator[Problem]:
    assert spec.filter is not None
    source = iter(problems)
    while several := list(itertools.islice(source, ROWS_PER_REQUEST)):
        check_wanted()
        try:
            holds, cpu_s = RENDERER.holds(spec.filter, [problem.row for problem in several])
        except RenderFailed as error:
            raise unrenderable("data.filter", error, several, where) from error
        if not budget.spend(cpu_s, holds):
            raise _too_slow(where, spec, budget)
        yield from itertools.compress(several, holds)


def unrenderable(
    key: str, error: RenderFailed, problems: Sequence[Problem], where: str
) -> BadRequest:
    """Returns the error for a template or a filter that failed on one of the problems."""
    if error.position is None:
        return BadRequest(f"{key} does not work: {error.reason}")
    problem = problems[error.position]
    return BadRow(
        f"{key} does not work on row {problem.index} of {where}: {error.reason}; its columns are "
        f"{', '.join(problem.row)}"
    )


def _too_slow(where: str, spec: DataSpec, budget: _Budget) -> BadRequest:
    what = "and was true of none" if budget.per_problem else "and there may be more of them"
    return BadRequest(
        f"data.filter {spec.filter!r} took {budget.cpu_s:.3g} s of processor time for "
        f"{budget.num_rows} rows of {where}, {what}; expected at most {budget.max_cpu_s:g} s: "
        "filter the data beforehand"
    )


# --- prompts in tokens ----------------------------------------------------------------------------

REMEDIES = (
    "lower {key}, leave such rows out by data.filter, or set sampling.overlong_prompts to "
    '"drop" or "truncate"'
)


@dataclass
class Fit:
    """Whether prompts leave room for their completions. `limit` is the maximum number of tokens of
    prompt and completion together, and `what` sets it: the model, or a key of the job. A completion
    has at most `max_tokens`, which the job's `key` sets. `overlong` says what happens to longer
    prompts. `num_fitting` counts the prompts that fit."""

    reader: PromptReader
    limit: int
    what: str
    key: str
    max_tokens: int
    overlong: str
    num_tried: int = 0
    num_fitting: int = 0

    def check(self, prompts: Sequence[Prompt], data: str) -> None:
        """Raises BadRow for the first prompt that leaves too few tokens, and BadRequest for
        messages that the model's chat template refuses."""
        counts = self.reader.count([prompt.content for prompt in prompts])
        for prompt, count in zip(prompts, counts, strict=True):
            self.num_tried += 1
            self.num_fitting += 0 < count <= self.limit - self.max_tokens
            at = f"row {prompt.index} of {data}"
            if not count:
                raise BadRow(f"{at}: its prompt has no tokens")
            if self.overlong == "error" and count + self.max_tokens > self.limit:
                raise BadRow(
                    f"{at}: its prompt has {count} tokens, which with {self.key} "
                    f"{self.max_tokens} makes {count + self.max_tokens}, and {self.what} holds "
                    f"{self.limit}; {REMEDIES.format(key=self.key)}"
                )

    def check_any(self, data: str) -> None:
        """Raises BadRequest if all of the prompts would be dropped."""
        if self.overlong == "drop" and self.num_tried and not self.num_fitting:
            raise BadRequest(
                f"none of the {self.num_tried} prompts of {data} leaves room for {self.key} "
                f"{self.max_tokens}: {self.what} holds {self.limit} tokens; lower {self.key}"
            )


def fit_of(job: Job) -> Fit | None:
    """Returns the limits of the job's model; None if its tokenizer is not known here. Raises
    BadRequest if completions leave no tokens for any prompt."""
    try:
        folder = tokenizer_folder(job)
        reader = prompt_reader(job.model, folder, job.sampling.template_args)
        window = _window(folder)
    except TokenizerUnavailable:
        return None
    limit = limit_of(job.max_model_len, window)
    if limit is None:
        return None
    fit = Fit(
        reader,
        *limit,
        "sampling.max_tokens",
        job.sampling.max_tokens,
        job.sampling.overlong_prompts,
    )
    if not job.trains:
        return held_out_fit(fit, job)
    if not (job.is_pushed or job.trains_without_sampling):
        _check_limit(fit)
    return fit


def held_out_fit(fit: Fit, job: Job) -> Fit:
    """Returns the limits for held-out problems."""
    held_out = replace(fit, num_tried=0, num_fitting=0)
    if (most := job.evaluation.max_tokens) is not None:
        held_out = replace(held_out, key="evaluation.max_tokens", max_tokens=most)
    _check_limit(held_out)
    return held_out


def _check_limit(fit: Fit) -> None:
    if fit.max_tokens >= fit.limit:
        raise BadRequest(
            f"{fit.key} is {fit.max_tokens}, and {fit.what} holds {fit.limit} tokens of prompt and "
            f"completion together; expected at most {fit.limit - 1}, and room for the prompts"
        )


MAX_SHOWN = 4


def preview(job: Job, prompts: Sequence[Prompt]) -> tuple[tuple[PreviewedPrompt, ...], str]:
    """Returns the first prompts as they are rendered, and why their tokens were not counted ("" if
    they were). Raises BadRequest for prompts that the model's chat template refuses."""
    shown = prompts[:MAX_SHOWN]
    contents = [prompt.content for prompt in shown]
    try:
        reader = reader_of(job)
    except TokenizerUnavailable as error:
        return tuple(PreviewedPrompt(index=p.index, content=p.content) for p in shown), str(error)
    texts, counts = reader.texts(contents), reader.count(contents)
    previewed = tuple(
        PreviewedPrompt(index=prompt.index, content=prompt.content, text=text, num_tokens=count)
        for prompt, text, count in zip(shown, texts, counts, strict=True)
    )
    return previewed, ""


MAX_CHARS = 300
"""Characters of a prompt that a warning shows."""


def prompt_warnings(job: Job, prompts: Sequence[Prompt]) -> list[str]:
    """Returns warnings about how the job's model reads the prompts. A job with an environment has
    none: its prompts become messages."""
    texts = [prompt for prompt in prompts[:MAX_SHOWN] if isinstance(prompt.content, str)]
    if job.environment is not None or not texts:
        return []
    try:
        reader = reader_of(job)
    except TokenizerUnavailable:
        return []
    return [*_without_template(reader, texts[0]), *_twice_begun(reader, texts)]


def _without_template(reader: PromptReader, prompt: Prompt) -> list[str]:
    """Returns a warning if the model has a chat template, which prompts that are text do not
    use."""
    if reader.template is None:
        return []
    try:
        (chat,) = reader.texts([[{"role": "user", "content": prompt.content}]])
    except BadRequest:  # the template refuses a single user message
        return []
    return [
        f"the prompts are text, and go to the model {reader.model!r} without its chat template: "
        f"row {prompt.index} as {_shortened(str(prompt.content))!r}; as a chat message it would be "
        f"{_shortened(chat)!r}. If the model is a chat model, make messages of the prompts: "
        "data.messages, or data.system_prompt"
    ]


def _twice_begun(reader: PromptReader, prompts: Sequence[Prompt]) -> list[str]:
    """Returns a warning for the first prompt that has a beginning-of-sequence token before which
    the tokenizer puts another one."""
    token = reader.values.get("bos_token")
    bos = reader.tokenizer.token_to_id(token) if isinstance(token, str) else None
    for prompt in prompts:
        if bos is not None and reader.ids(prompt.content)[:2] == [bos, bos]:
            return [
                f"the prompt of row {prompt.index} begins with {token!r}, and the tokenizer of "
                f"{reader.model!r} puts another one before it; leave {token!r} out of the prompt"
            ]
    return []


def _shortened(text: str) -> str:
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]} ... {text[-half:]}"


def reader_of(job: Job) -> PromptReader:
    """Returns the reader of the job's model's tokenizer. Raises TokenizerUnavailable."""
    return prompt_reader(job.model, tokenizer_folder(job), job.sampling.template_args)


def tokenizer_folder(job: Job) -> Path:
    """Returns the folder with the configuration and the tokenizer of the job's model; for a Hub
    model, in this machine's cache. Raises TokenizerUnavailable."""
    folder = model_folder(job.model) or cached_model(job.model, job.model_revision)
    if folder is None:
        raise TokenizerUnavailable(f"the model {job.model!r} is not in the Hugging Face cache here")
    return folder


def length_limit(job: Job) -> int | None:
    """Returns how many tokens a sequence of the job's model may have; None if neither the job nor a
    local configuration has the limit."""
    try:
        folder = tokenizer_folder(job)
    except (TokenizerUnavailable, BadRequest):  # the trainer's host has it
        return job.max_model_len
    limit = limit_of(job.max_model_len, _window(folder))
    return limit and limit[0]


def _window(folder: Path) -> int | None:
    return window_of(read_config(folder)) if (folder / "config.json").is_file() else None


def tokenizer_stamp(job: Job) -> tuple[object, ...]:
    """Returns a stamp that changes whenever the files with the model's tokenizer or chat template
    change."""
    try:
        folder = tokenizer_folder(job)
    except TokenizerUnavailable:
        return ()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = [folder / name for name in names]
    stats = [file.stat() for file in files if file.is_file()]
    return (str(folder), *((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats))
