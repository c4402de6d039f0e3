"""The problems and where they come from: `[data]`, `[evaluation.sets.NAME]`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import Field, field_validator, model_validator

from shared.documented import Plain
from shared.job.section import MAX_ENTRIES, MAX_TEXT, Section, Text

UPLOADED = re.compile(r"file-[0-9a-f]{24}")
"""The id of an uploaded file."""

MAX_INLINE_ROWS = 1000
MAX_INLINE_BYTES = 1 << 18
"""Most bytes of rows inside the job: each answer about the job contains them."""

MAX_TEMPLATE_CHARS = 1 << 16

REASONING_GYM = "reasoning_gym:"
"""The beginning of the name of a source of the package reasoning-gym; the task follows."""

MAX_GENERATED = 100_000

MAX_COLUMNS = 1000

Source = (
    Text
    | Annotated[
        tuple[Annotated[dict[str, Plain], Field(max_length=MAX_COLUMNS)], ...],
        Field(max_length=MAX_INLINE_ROWS),
    ]
)
"""Where problems come from: the name of a file or data set, or the rows themselves."""


class TemplateMessage(Section):
    """A chat message, made from a row."""

    role: str = Field(min_length=1, max_length=MAX_TEXT)
    """The role: "system", "user", "assistant", or another role of the model's chat template."""

    content: str = Field(max_length=MAX_TEMPLATE_CHARS)
    """The content: a Jinja template over the row's columns, at most 65,536 characters."""


class ReasoningGymSpec(Section):
    """How problems of the package reasoning-gym are generated: task, options, levels, seed and
    number decide them."""

    options: dict[Text, Plain] = Field(default={}, max_length=MAX_ENTRIES)
    """Options of the task, such as `{ min_terms = 2 }`. Options that the task does not have, and
    values of other types, are refused. Empty: the task's own. An option holds at each level."""

    levels: tuple[Annotated[int, Field(ge=0, le=100)], ...] = Field(
        default=(), max_length=MAX_ENTRIES
    )
    """Levels of the task's curriculum, from 0 (the easiest). Each has an equal share of `size`, in
    this order, so it needs `data.shuffle = false`. Held-out problems take them in turn. Empty: the
    task's options alone."""

    size: int = Field(default=1000, ge=1, le=MAX_GENERATED)
    """How many training problems, from 1 to 100,000. With `levels` at least as many as the steps
    take."""

    eval_size: int = Field(default=100, ge=1, le=MAX_GENERATED)
    """How many problems a held-out source has, from 1 to 100,000. They are made with other seeds
    than the training problems; a task with few different problems may make some of these again."""

    seed: int | None = Field(default=None, ge=0)
    """Seeds the problems. None: the job's `seed`."""


class DataSpec(Section):
    """Training and held-out problems, one per row. The columns beside the prompt go to the
    graders."""

    train: Source | None = None
    """The training problems: a `.jsonl`, `.json`, `.csv` or `.parquet` file on the orchestrator's
    host, the id of an uploaded file ("file-..."), a Hugging Face dataset id, a task of the package
    reasoning-gym ("reasoning_gym:chain_sum"), or the rows themselves as a list of tables (up to
    1000, and 256 KiB). Only a job of 0 steps may have none; it does not read them."""

    train_split: Text = "train"
    """Split of a Hugging Face dataset to train on. Files have none."""

    eval: Source | None = None
    """The held-out problems, never trained on, in any form that `train` takes. None: the job does
    no evaluation."""

    eval_split: Text = "test"
    """Split of a Hugging Face dataset to evaluate on. Files have none."""

    config: Text | None = None
    """Configuration of a Hugging Face dataset that has several, for example "main" of
    openai/gsm8k. It counts for `train` and `eval`."""

    revision: Text | None = None
    """Commit, tag or branch of a Hugging Face dataset, for `train` and `eval`. None: the newest one
    when the job is submitted. The job's record has the commit, and the job uses that one to its
    end."""

    reasoning_gym: ReasoningGymSpec = ReasoningGymSpec()
    """How problems of the package reasoning-gym are generated, for `train` and `eval`."""

    columns: dict[Text, Text] = Field(default={}, max_length=MAX_COLUMNS)
    """Other names for columns: `{ prompt = "question" }` calls the column "question" `prompt`, for
    template, filter and graders alike. Columns that are not named keep their names. Empty: all
    do."""

    template: str | None = Field(default=None, min_length=1, max_length=MAX_TEMPLATE_CHARS)
    """How a row becomes a prompt: a Jinja template over its columns, whose text goes to the model
    unchanged. None: `messages` make the prompt; without these the prompt is the column `prompt`,
    text or a list of chat messages (`role`, `content`)."""

    messages: tuple[TemplateMessage, ...] | None = Field(
        default=None, min_length=1, max_length=MAX_ENTRIES
    )
    """How a row becomes a prompt of chat messages, each with a `role` and a Jinja template over the
    row's columns as `content`. They go through the model's chat template. None: see `template`."""

    answer: str | None = Field(default=None, min_length=1, max_length=MAX_TEMPLATE_CHARS)
    """How a row becomes the answer that supervised steps learn (`training.objective` "sft",
    `[warmup]`): a Jinja template over its columns. None: of a prompt that is a chat and ends with
    an assistant's message, each such message is an answer to the messages before it; of other rows
    the answer is the column `answer`."""

    system_prompt: str | None = Field(default=None, max_length=MAX_TEMPLATE_CHARS)
    """A system message before every prompt. Prompts that are text become a user message after it,
    so they go through the chat template too. None: no system message is added."""

    filter: str | None = Field(default=None, min_length=1, max_length=MAX_TEMPLATE_CHARS)
    """A Jinja expression over a row's columns, such as `answer | length < 200`. Rows where it is
    not true are left out, in training and evaluation. None: no row is."""

    max_samples: int | None = Field(default=None, ge=1)
    """Trains on no more than this many rows: the first ones that pass `filter`. None: all of them.
    How many are held out is `evaluation.num_prompts`."""

    epochs: float | None = Field(default=None, gt=0, le=1_000_000)
    """Passes over the training problems, in place of `steps`: the orchestrator computes `steps`
    when it accepts the job. Parts of a pass are allowed. With both, the fewer steps count. None:
    `steps` says it."""

    shuffle: bool = True
    """Each pass over the data takes the rows in another order. False: in the order of the file, for
    problems that are sorted from easy to hard."""

    shuffle_seed: int | None = Field(default=None, ge=0)
    """Seeds the order. None: the job's `seed`, so another seed is another order too."""

    streaming: bool = False
    """Reads the rows one after the other as they are needed, from file or hub, and holds no more
    than `shuffle_buffer` of them, for data that does not fit on the disk or takes long to fetch.
    The order is then a shuffle within that buffer. Off by default: a shuffle of all rows is better,
    and a resumed job need not read again the rows before."""

    shuffle_buffer: int = Field(default=10_000, ge=1, le=1_000_000)
    """Rows held in memory for the shuffle of `streaming`, from 1 to 1,000,000. More mix better, and
    take more memory and time before the first step."""

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _is_a_source(cls, value: Any) -> Any:
        return None if value is None else _source(value)

    @field_validator("columns")
    @classmethod
    def _each_column_once(cls, columns: dict[str, str]) -> dict[str, str]:
        times = Counter(columns.values())
        if twice := next((name for name in columns.values() if times[name] > 1), None):
            raise ValueError(f"expected one name for each column, and {twice!r} has two")
        return columns

    @model_validator(mode="after")
    def _one_way_to_make_prompts(self) -> DataSpec:
        if self.template is not None and self.messages is not None:
            raise ValueError("data.template and data.messages are both set; expected one of them")
        return self


class HeldOutSpec(Section):
    """A further held-out set, `[evaluation.sets.NAME]`, never trained on. Its problems are sampled
    and graded like `data.eval`."""

    source: Source
    """The problems, in any form that `data.train` takes."""

    split: Text = "test"
    """Split of a Hugging Face dataset. Files have none."""

    config: Text | None = None
    """Configuration of a Hugging Face dataset that has several."""

    revision: Text | None = None
    """Commit, tag or branch of a Hugging Face dataset. None: the newest one when the job is
    submitted; the job keeps to it."""

    reasoning_gym: ReasoningGymSpec | None = None
    """How problems of the package reasoning-gym are generated. None: `data.reasoning_gym`."""

    columns: dict[Text, Text] | None = Field(default=None, max_length=MAX_COLUMNS)
    """Other names for columns, as in `data.columns`. None: `data.columns` itself."""

    template: str | None = Field(default=None, min_length=1, max_length=MAX_TEMPLATE_CHARS)
    """How a row becomes a prompt, as in `data.template`. None: as a row of `[data]` does."""

    filter: str | None = Field(default=None, min_length=1, max_length=MAX_TEMPLATE_CHARS)
    """Which rows are kept, as in `data.filter`. None: `data.filter` itself."""

    num_prompts: int | None = Field(default=None, ge=1)
    """How many problems, from the first row on. None: `evaluation.num_prompts`."""

    @field_validator("source", mode="before")
    @classmethod
    def _is_a_source(cls, value: Any) -> Any:
        return _source(value)

    def within(self, data: DataSpec) -> DataSpec:
        """Returns the `[data]` section with this set's keys in place of its own. Keys that the set
        does not give are as in `[data]`."""
        own: dict[str, Any] = {"config": self.config, "revision": self.revision}
        if self.reasoning_gym is not None:
            own["reasoning_gym"] = self.reasoning_gym
        if self.template is not None:
            own |= {"template": self.template, "messages": None}
        if self.columns is not None:
            own["columns"] = self.columns
        if self.filter is not None:
            own["filter"] = self.filter
        return data.model_copy(update=own)


def _source(value: Any) -> Any:
    """Returns the value. Raises ValueError with one sentence for a value that is not a source;
    pydantic would raise one for each kind of source."""
    if isinstance(value, str):
        if value == "":
            raise ValueError("expected a file, a data set's id or a list of rows")
        if len(value) > MAX_TEXT:
            raise ValueError(f"expected at most {MAX_TEXT} characters, not {len(value)}")
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("expected the name of a file or data set, or a list of at least one row")
    _check_rows(cast(Sequence[Any], value))
    return cast(Any, value)


def _check_rows(rows: Sequence[Any]) -> None:
    if len(rows) > MAX_INLINE_ROWS:
        raise ValueError(
            f"expected at most {MAX_INLINE_ROWS} rows in the job itself, not {len(rows)}; put them "
            "into a file"
        )
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"expected tables, and row {number} is {row!r:.80}")
        if len(cast(dict[str, Any], row)) > MAX_COLUMNS:
            raise ValueError(f"expected at most {MAX_COLUMNS} columns, and row {number} has more")
    if (size := len(json.dumps(rows, default=str))) > MAX_INLINE_BYTES:
        raise ValueError(
            f"expected at most {MAX_INLINE_BYTES} bytes of rows in the job itself, not {size}; put "
            "them into a file"
        )
