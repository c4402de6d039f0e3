"""What a first job (`hone init`) must know of its data file: the columns, which of them is the
prompt, the right answer or the tests, and the bounds that follow from the token lengths."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from shared.errors import BadRequest
from shared.explain import nearest

Reward = Literal["math", "code", "judge", "function"]
Row = Mapping[str, Any]

MAX_ROWS = 20_000
"""Most rows that are read: all rows of most data sets, in seconds."""

BATCH_ROWS = 256
"""Rows of a Parquet file that are decoded at a time."""

PROMPTS = ("prompt", "question", "problem", "instruction", "messages", "query", "input", "text")
ANSWERS = ("answer", "solution", "target", "expected", "ground_truth", "label", "response")
TESTS = ("tests", "testcase", "test_list", "test", "test_cases", "input_output")
ENDING = {"train": "test", "training": "test"}
"""Ending of a file's name, and the ending of its held-out file's name."""

ANSWER = re.compile(r"####\s*\S|\\boxed\{|^\s*-?\$?[\d,.]+%?\s*$")
"""Answers that can be compared as mathematics."""


@dataclass(frozen=True)
class Layout:
    """The columns of a source, by role. `is_chat`: the prompt is a list of messages; `is_answered`:
    the last one is the assistant's; `has_system`: the first one is the system's."""

    columns: tuple[str, ...]
    prompt: str
    answer: str | None = None
    tests: str | None = None
    entry_point: str | None = None
    is_chat: bool = False
    is_answered: bool = False
    has_system: bool = False
    is_math: bool = False

    @property
    def suggested(self) -> Reward:
        if self.tests:
            return "code"
        return "math" if self.is_math else "function" if self.answer else "judge"


@dataclass(frozen=True)
class Source:
    """Where problems come from: `train` and `eval` as the job names them, other keys of `[data]`
    (`more`), and the rows of both that were read (none unless the source is a file)."""

    train: str
    eval: str | None
    layout: Layout
    more: Mapping[str, str]
    rows: tuple[Row, ...] = ()
    held_out: tuple[Row, ...] = ()


HUB = {
    "openai/gsm8k": Source(
        train="openai/gsm8k",
        eval="openai/gsm8k",
        layout=Layout(("question", "answer"), "question", "answer", is_math=True),
        more={"config": "main"},
    ),
    "OpenCoder-LLM/opc-sft-stage2": Source(
        train="OpenCoder-LLM/opc-sft-stage2",
        eval="OpenCoder-LLM/opc-sft-stage2",
        layout=Layout(("instruction", "testcase"), "instruction", tests="testcase"),
        more={
            "config": "educational_instruct",
            "train_split": "train[200:]",
            "eval_split": "train[:200]",
        },
    ),
}
"""Data sets of the Hub whose layout is known without reading them."""


def look(train: str, held_out: str | None, prompt: str | None, answer: str | None) -> Source:
    """Returns the source that `train` names; `prompt` and `answer` are columns given by name.

    Raises BadRequest for a file that cannot be read, for unknown columns, and for a row without a
    prompt: the job would be refused."""
    path = Path(train)
    if not path.is_file():
        return _unseen(train, held_out, prompt, answer)
    held_out = held_out or _beside(path)
    rows = read_rows(path)
    if not rows:
        raise BadRequest(f"{train!r} has no rows; expected at least one")
    layout = layout_of(rows, train, prompt, answer)
    tested = read_rows(Path(held_out)) if held_out and Path(held_out).is_file() else []
    for name, read in ((train, rows), (held_out or "", tested)):
        _check_prompts(name, read, layout.prompt)
    return Source(train, held_out, layout, {}, tuple(rows), tuple(tested))


def _check_prompts(name: str, rows: Sequence[Row], column: str) -> None:
    for number, row in enumerate(rows):
        if (value := row.get(column)) is None or value == "":
            raise BadRequest(
                f"{name!r}, row {number}, column {column!r}: got {value!r}; expected a prompt. "
                "Remove the row, or name another column by --prompt"
            )


def read_rows(path: Path) -> list[Row]:
    """Returns the first MAX_ROWS rows of a file of one of the READERS. Raises BadRequest with the
    line that cannot be read."""
    read = READERS.get(path.suffix)
    if read is None:
        raise BadRequest(f"{str(path)!r}: expected a file ending in {', '.join(READERS)}")
    try:
        return list(itertools.islice(read(path), MAX_ROWS))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadRequest(f"{str(path)!r} cannot be read: {error}") from error


def layout_of(
    rows: Sequence[Row], name: str, prompt: str | None = None, answer: str | None = None
) -> Layout:
    """Returns the roles of the columns of `rows`. Raises BadRequest if no column is recognized as
    the prompt, a given column is missing, or there is no column at all."""
    columns = tuple(dict.fromkeys(itertools.chain.from_iterable(rows[:100])))
    if not columns:
        raise BadRequest(f"the rows of {name} have no columns; expected one with the prompt")
    for given in filter(None, (prompt, answer)):
        if given not in columns:
            raise BadRequest(
                f"{name} has no column {given!r}; {nearest(given, columns, 'columns')}"
            )
    found = prompt or _first(PROMPTS, columns)
    if found is None:
        raise BadRequest(
            f"none of the columns of {name} is known to be the prompt: {', '.join(columns)}; "
            "--prompt names it"
        )
    roles = _roles(rows[0].get(found))
    right = answer or _first([each for each in ANSWERS if each != found], columns)
    values = [str(row.get(right)) for row in rows[:100]] if right else []
    return Layout(
        columns=columns,
        prompt=found,
        answer=right,
        tests=_first(TESTS, columns),
        entry_point=_entry_point(rows[0]),
        is_chat=bool(roles),
        is_answered=roles[-1:] == ["assistant"],
        has_system=roles[:1] == ["system"],
        is_math=bool(values) and all(ANSWER.search(value) for value in values),
    )


def _unseen(train: str, held_out: str | None, prompt: str | None, answer: str | None) -> Source:
    if train.endswith((*READERS,)) or train.startswith(("/", ".")):
        raise BadRequest(f"no data file at {train!r}")
    if (known := HUB.get(train)) and not (held_out or prompt or answer):
        return known
    return Source(train, held_out, _given(train, prompt, answer), {})


def _given(name: str, prompt: str | None, answer: str | None) -> Layout:
    if prompt is None:
        raise BadRequest(
            f"the columns of {name!r} cannot be looked at here; name the one with the prompt by "
            "--prompt, and the one with the right answer, if there is one, by --answer"
        )
    return Layout((prompt, *filter(None, [answer])), prompt, answer)


def _beside(train: Path) -> str | None:
    """Returns the file of held-out problems in the same folder, if one has the usual name."""
    other = train.with_stem(ENDING[train.stem]) if train.stem in ENDING else None
    return str(other) if other and other.is_file() else None


def _first(known: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in known if name in columns), None)


def _entry_point(row: Row) -> str | None:
    """Returns the column with the function's name, if the tests call their `check` with it."""
    is_check = any("def check(" in str(row.get(name)) for name in TESTS)
    return "entry_point" if is_check and "entry_point" in row else None


def _roles(value: Any) -> list[str]:
    """Returns the roles of chat messages; [] if the value is no list of messages."""
    if not isinstance(value, list):
        return []
    messages = cast(list[Any], value)
    return [str(cast(Row, one).get("role")) for one in messages if isinstance(one, dict)]


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(line, f"{str(path)!r}, line {number}")


def _json(path: Path) -> Iterator[Row]:
    """A list of rows, or a row per line."""
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    try:
        rows = cast(list[Any], json.loads(text))
    except ValueError as error:
        raise BadRequest(f"{str(path)!r} is not JSON: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadRequest(f"{str(path)!r}, row {number}: got {row!r:.80}; expected an object")
        yield cast(Row, row)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        for row in rows:
            if None in row:  # the key of what is beyond the header
                raise BadRequest(
                    f"{str(path)!r}, line {rows.line_num}: it has more values than the header has "
                    f"columns, {len(rows.fieldnames or ())}"
                )
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        needs = "Parquet needs `pip install pyarrow` here"
        raise BadRequest(f"{str(path)!r} cannot be read: {needs}, or save it as .jsonl") from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
    except arrow.ArrowException as error:
        raise BadRequest(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error


def _row(text: str, where: str) -> Row:
    try:
        row: Any = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRequest(f"{where}: got {row!r:.80}; expected an object")
    return cast(Row, row)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


# --- token lengths -------------------------------------------------------------------------------

STEP = 64
"""Bounds are multiples of this."""

MOST, USUAL = 4096, 512
"""Tokens of a completion: the most that is proposed, and the default if no answer was measured."""

LEAST_SHARE = 4
"""A completion gets at least a fourth of a small model's window; longer prompts are dropped."""


@dataclass(frozen=True)
class Lengths:
    """Bounds that fit: `num_overlong` of the `num_prompts` prompts are longer than they allow.
    `window` is the model's context, `answer` the longest right answer (0: none measured)."""

    window: int
    longest: int
    answer: int
    max_tokens: int
    max_model_len: int
    num_prompts: int
    num_overlong: int


def fitted(prompts: Sequence[int], answers: Sequence[int], window: int) -> Lengths:
    """Returns bounds for prompts and right answers of these lengths: a completion may be twice as
    long as the longest answer."""
    longest, answer = max(prompts), max(answers, default=0)
    wanted = min(_rounded_up(2 * answer), MOST) if answer else USUAL
    room = window - longest
    if room < min(wanted, window // LEAST_SHARE):
        room = max(window // LEAST_SHARE, 1)
    max_tokens = min(wanted, room)
    fitting = [length for length in prompts if length + max_tokens <= window]
    return Lengths(
        window=window,
        longest=longest,
        answer=answer,
        max_tokens=max_tokens,
        max_model_len=min(_rounded_up(max(fitting, default=0) + max_tokens), window),
        num_prompts=len(prompts),
        num_overlong=len(prompts) - len(fitting),
    )


def _rounded_up(length: int) -> int:
    return math.ceil(length / STEP) * STEP
