"""The base class of all bodies, and the bodies that every service has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, overload

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
)

from shared.documented import Plain
from shared.job import JOB_ID


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


T_co = TypeVar("T_co", covariant=True)


class Listing(Wire, Generic[T_co]):
    """A body of one list. It can be iterated, counted and indexed like the list."""

    def listed(self) -> Sequence[T_co]:
        """Returns the list: the body's first field that is one."""
        values: list[Any] = [getattr(self, name) for name in type(self).model_fields]
        return next(cast(Sequence[T_co], value) for value in values if isinstance(value, tuple))

    def __iter__(self) -> Iterator[T_co]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.listed())

    def __len__(self) -> int:
        return len(self.listed())

    @overload
    def __getitem__(self, at: int) -> T_co: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T_co]: ...
    def __getitem__(self, at: int | slice) -> T_co | Sequence[T_co]:
        return self.listed()[at]


Reported = Annotated[float, Field(ge=-1e30, le=1e30)]
"""A reward or metric from outside. Sums and means of greater numbers would not be finite."""

Message = dict[str, Plain]
"""A chat message: at least `role` and `content`."""

JobId = Annotated[str, Field(pattern=JOB_ID)]

Fence = tuple[int, int]
"""`(attempt, epoch)`; the greater fence is newer."""


class Fencing(Wire):
    """The fence of a caller, by which superseded callers are refused: Conflict, code "stale".

    `attempt` is the number of the worker's lease, from one counter for all jobs, so it only grows.
    `epoch` counts, within the attempt, how often the job was loaded into trainer and sampler: each
    load begins a new history of its weights, in which the version may go back to a checkpoint's.
    """

    attempt: int = Field(default=0, ge=0)
    epoch: int = Field(default=0, ge=0)

    @property
    def fence(self) -> Fence:
        return self.attempt, self.epoch


Beside = tuple[Annotated[int, Field(ge=0)], ...]
"""The attempts that had places on the trainer when an attempt got its lease, and keep these."""


Weight = Annotated[float, Field(ge=0.01, le=100)]
"""A job's share of a trainer's tokens, in proportion to the weights of the others."""


class Fenced(Fencing):
    """A body that only the job's newest worker may send."""

    job_id: JobId


class Orchestrator(Wire):
    """An orchestrator, as a trainer or sampler identifies it: by the `identity` of its Redis, and
    in messages by its `place`, a host and port. Orchestrators that share a Redis have the same
    identity."""

    identity: str
    place: str


class NoBody(Wire):
    """The empty body of a POST that needs none."""


class Health(Wire):
    """`GET /healthz`: the process lives."""

    status: Literal["ok"] = "ok"
    service: str


class Dependency(Wire):
    """Whether a dependency of a service is ready; `detail` says why not. `starting`: it only needs
    time."""

    ok: bool
    detail: str
    starting: bool = False


class Readiness(Wire):
    """`GET /readyz`: whether the service can be used (200) or not yet (503), and each of its
    dependencies by name."""

    ready: bool
    dependencies: dict[str, Dependency]


class VersionInfo(BaseModel):
    """`GET /version`: the service, Hone's version, and the service's own fields about its
    engine."""

    model_config = ConfigDict(frozen=True, extra="allow")

    service: str
    hone: str


WAIT_PATH = "/operations/wait"


class WaitRequest(Wire):
    """`POST /operations/wait`: wait until one of the operations `ids` has ended, or fewer than
    `busy_below` pieces of work are under way, at most `wait_s` seconds. `busy` is the load that the
    caller received last; a changed load is another reason to answer."""

    ids: tuple[str, ...] = Field(max_length=65_536)
    wait_s: float = Field(default=0.0, ge=0, le=60)
    busy_below: int | None = Field(default=None, ge=1)
    busy: int | None = None


class WaitResult(Wire):
    """Which operations have ended; an operation's own Location has its result, or says that it is
    unknown. `busy` is the service's current load, in its own unit (completions, in the sampler)."""

    ids: tuple[str, ...]
    busy: int = 0
