"""Graders by name. A new one is a file in `graders/` with a decorated class; nothing else knows
about it.

    @grader("matches")
    class Matches(ItemGrader[MatchesParams]):    # MatchesParams: a pydantic model of its `params`
        \"""What it rewards, for listings.\"""

        async def grade_item(self, item):        # it has `self.params` and `self.tools` too
            return right_or_wrong(item.completion.isupper())

A grader says of itself how it wants to be called (`Grader`): with how many items at a time, how
many calls at once, how long one may take, whether equal items have one verdict. What it raises
while grading is never a reward of 0: the items of that call have no value, and the reason is kept
(`scoring.py`). A param of type `Column` names a column of the dataset, which is then checked to
exist. A grader's value is without the reward's weight, which is applied where the parts are summed.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import ConfigDict, ValidationError

from services.reward.grading.limited.pool import LimitedPool, NoValue
from services.reward.grading.reasoning import strip_reasoning
from services.reward.job_code.functions import FunctionWorkers
from services.reward.sandbox.base import Sandbox, waiting
from shared.documented import Documented
from shared.errors import BadRequest
from shared.explain import closest, nearest, sentences
from shared.job import RewardSpec
from shared.settings import Settings
from shared.wire import GraderInfo, Part, ScoreItem

LONG_CHARS = 10_000
"""Longer completions are read in a thread: 260,000 characters take as much as 0.1 s."""

REFERENCES = (
    *("canonical_solution", "reference_solution", "solution", "solutions", "code"),
    *("completion", "output", "response", "answer"),
)
"""Columns that may hold a row's own answer, the most likely first."""


def reference_text(row: Mapping[str, Any]) -> str | None:
    """Returns the row's answer in the first of `REFERENCES` that it has as text, None if it has
    none."""
    for name in REFERENCES:
        value = row.get(name)
        found = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(found, str) and found.strip():
            return found
    return None


class Params(Documented):
    """Base of a grader's params. Without fields of its own: the grader takes none. `GET /graders`
    shows the docstrings of class and fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _ColumnMark:
    pass


Column = Annotated[str, _ColumnMark()]
"""The name of a dataset column that every row must have."""

P = TypeVar("P", bound=Params)
T = TypeVar("T")


@dataclass(frozen=True)
class GraderTools:
    """What graders may use. `job_id` is the job that asks, None if the request names no job."""

    settings: Settings
    sandbox: Sandbox
    functions: FunctionWorkers
    limited: LimitedPool
    job_id: str | None = None

    @property
    def run_folder(self) -> Path | None:
        """Returns the job's run folder, which may not exist yet."""
        return self.settings.runs_dir / self.job_id if self.job_id else None


class Grader(ABC, Generic[P]):
    """One reward of a job, bound to its params. `description` in listings is the class's docstring.

    It is kept, with whatever it opens, from request to request while its job runs, and then
    closed. The class attributes below say how it is called; where they follow from params,
    `__init__` may set them.
    """

    name: ClassVar[str]
    params_type: ClassVar[type[Params]] = Params

    pure: bool = False
    """The verdict follows from the params and `content(item)` alone, so equal items of a request
    are graded once. Say so where grading costs more than comparing."""

    remembers: bool = False
    """It may keep what it was given, so each job, and each request that names no job, has a grader
    of its own."""

    items_per_call: int | None = None
    """At most how many items one call of `grade` takes; None: all of a request."""

    max_concurrency: int = 8
    """How many calls of `grade` may run at once, over all requests."""

    has_full_mark: bool = False
    """A right completion earns 1, and no completion earns more."""

    whole_text: bool = False
    """It grades all of a completion, its reasoning part too; else what follows that."""

    asks_models: bool = False
    """It asks a language model, which costs, so it grades only what it has to."""

    deadline_s: float = 300.0
    """How long one call may take, its wait for a free sandbox not included: a guard against
    hanging, above any limit in params."""

    def __init__(self, spec: RewardSpec, params: P, tools: GraderTools) -> None:
        self.spec = spec
        self.params = params
        self.tools = tools

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "params_type" in cls.__dict__:
            return
        for base in getattr(cls, "__orig_bases__", ()):
            for argument in typing.get_args(base):
                if isinstance(argument, type) and issubclass(argument, Params):
                    cls.params_type = argument

    async def check(self, columns: Sequence[str]) -> None:
        """Raises BadRequest if this reward cannot work on rows with these columns."""
        for field, info in self.params_type.model_fields.items():
            column = getattr(self.params, field)
            if (
                any(isinstance(mark, _ColumnMark) for mark in info.metadata)
                and column is not None
                and column not in columns
            ):
                raise BadRequest(
                    f"reward {self.spec.label!r}: {no_column(column, columns)} (param {field!r})"
                )

    async def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises GradingFailed if no completion can be graded by this row, which has all
        columns."""

    def subject(self, item: ScoreItem) -> ScoreItem:
        """Returns the item with the text to grade as its completion. For a long completion this
        takes as much as 0.1 s; `subjects` does it in a thread."""
        return item if self.whole_text else strip_reasoning(item, self.spec.reasoning)

    async def subjects(self, items: Sequence[ScoreItem]) -> list[ScoreItem]:
        """Returns each item's `subject`; other requests are answered meanwhile."""
        return [await in_thread_if_long(self.subject, item) for item in items]

    @abstractmethod
    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        """Returns one part per item, in order. What it raises makes the parts of all these items
        missing."""

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """Returns a completion that should earn the full mark by this row; None if none is known.
        Raises GradingFailed as `check_row` does."""
        return None

    def content(self, item: ScoreItem) -> Any:
        """Returns the plain data on which, with the params, the verdict on a `subject` depends
        (only if `pure`)."""
        return item.model_dump()

    async def close(self) -> None:
        """Closes what it holds open. It is not called again."""


class ItemGrader(Grader[P]):
    """A grader of one item at a time: each item has a deadline of its own, and fails alone."""

    items_per_call = 1

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [await self._graded(item) for item in await self.subjects(items)]

    @abstractmethod
    async def grade_item(self, item: ScoreItem) -> Part:
        """Returns the part of an item's `subject`. NoValue makes it 0, and any other error makes it
        missing."""

    async def _graded(self, item: ScoreItem) -> Part:
        try:
            return await self.grade_item(item)
        except NoValue as error:
            return error.part()


async def in_thread_if_long(read: Callable[[ScoreItem], T], item: ScoreItem) -> T:
    """Returns `read(item)`, computed in a thread if the item's completion is long. A call's
    deadline stops there: that threads are busy, or wait for a disk, is no text's doing."""
    if len(item.completion) < LONG_CHARS:
        return read(item)
    with waiting.get()():
        return await asyncio.to_thread(read, item)


def right_or_wrong(right: bool, detail: str = "", stdout: str = "") -> Part:
    """Returns 1 for a right completion, else 0 with the verdict "wrong"."""
    verdict = "ok" if right else "wrong"
    return Part(value=float(right), verdict=verdict, detail=detail, stdout=stdout)


def no_column(column: str, columns: Sequence[str], others: Sequence[str] = ()) -> str:
    """Returns the sentence about a missing column. `others` are names that may be meant and are no
    columns."""
    there = f"columns are {', '.join(sorted(columns))}" if columns else "there are no columns"
    known = f"no column {column!r}; {there}"
    meant = closest(column, (*columns, *others))
    return f"{known}; did you mean {meant!r}?" if meant else known


_graders: dict[str, type[Grader[Any]]] = {}

K = TypeVar("K", bound=type[Grader[Any]])


def grader(name: str) -> Callable[[K], K]:
    """Registers a Grader class."""

    def register(kind: K) -> K:
        if name in _graders:
            raise ValueError(f"two graders are called {name!r}")
        _graders[name] = kind
        kind.name = name
        return kind

    return register


def kind_of(name: str) -> type[Grader[Any]]:
    """Returns the grader of that name. Raises BadRequest naming the nearest one."""
    if kind := _graders.get(name):
        return kind
    raise BadRequest(f"no grader {name!r}; {nearest(name, list(_graders), 'graders')}")


def bind(spec: RewardSpec, tools: GraderTools) -> Grader[Any]:
    """Returns the reward that `spec` names. Raises BadRequest naming an unknown grader or param and
    the nearest valid one."""
    return kind_of(spec.grader)(spec, params_of(spec), tools)


def params_of(spec: RewardSpec) -> Params:
    """Returns the reward's params. Raises BadRequest as `bind` does."""
    kind = kind_of(spec.grader)
    try:
        return kind.params_type.model_validate(spec.params)
    except ValidationError as error:
        faults = sentences(error, kind.params_type, f"params of reward {spec.label!r}")
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


def infos() -> tuple[GraderInfo, ...]:
    return tuple(
        GraderInfo(
            name=name,
            description=inspect.getdoc(kind) or "",
            params=kind.params_type.model_json_schema(),
        )
        for name, kind in sorted(_graders.items())
    )
