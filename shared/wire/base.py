"""What all bodies have in common, and those that every service takes and gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Generic, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field

from shared.job import JOB_ID
from shared.plain import Plain


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


T_co = TypeVar("T_co", covariant=True)


class Listing(Wire, Generic[T_co]):
    """A body of one list, which is that list to whoever iterates, counts or indexes it."""

    def listed(self) -> Sequence[T_co]:
        """Returns the list."""
        raise NotImplementedError

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


Message = dict[str, Plain]
"""A chat message: at least `role` and `content`."""

JobId = Annotated[str, Field(pattern=JOB_ID)]

Fence = tuple[int, int]
"""`(attempt, epoch)`; the greater one is the newer one."""


class Fencing(Wire):
    """How new the caller is. A caller that has been superseded is refused: Conflict, code "stale".

    `attempt` is the number of the worker's lease, from one counter for all jobs, so it only grows.
    `epoch` counts, within the attempt, how often the job was loaded into trainer and sampler: each
    time is another life of its weights, in which versions may go back to that of a checkpoint.
    """

    attempt: int = Field(default=0, ge=0)
    epoch: int = Field(default=0, ge=0)

    @property
    def fence(self) -> Fence:
        return self.attempt, self.epoch


class Fenced(Fencing):
    """A body that only the job's newest worker may send."""

    job_id: JobId


class Orchestrator(Wire):
    """An orchestrator, as a trainer or sampler knows it: by the `identity` of its Redis, which
    those that share one have in common, and for people by its `place`, a host and port."""

    identity: str
    place: str


class NoBody(Wire):
    """The empty body of a POST that needs none."""


class Health(Wire):
    """`GET /healthz`: the process lives."""

    status: Literal["ok"] = "ok"
    service: str


class Dependency(Wire):
    """Whether what a service needs is there; `detail` says why not. `starting`: it will be, by
    itself."""

    ok: bool
    detail: str
    starting: bool = False


class Readiness(Wire):
    """`GET /readyz`: whether the service can be used (200) or not yet (503), and each of its
    dependencies by name."""

    ready: bool
    dependencies: dict[str, Dependency]


class VersionInfo(BaseModel):
    """`GET /version`: the service, Hone's version, and whatever else the service says of the engine
    inside."""

    model_config = ConfigDict(frozen=True, extra="allow")

    service: str
    hone: str


WAIT_PATH = "/operations/wait"


class WaitRequest(Wire):
    """`POST /operations/wait`: wait until one of the operations `ids` has ended, or fewer than
    `busy_below` pieces of work are under way, at most `wait_s` seconds. Of `busy`, which the caller
    was told last, it is not told again before that changes."""

    ids: tuple[str, ...] = Field(max_length=65_536)
    wait_s: float = Field(default=0.0, ge=0, le=60)
    busy_below: int | None = Field(default=None, ge=1)
    busy: int | None = None


class WaitResult(Wire):
    """Which operations have ended: their results, or that they are unknown, is at each one's own
    Location. `busy` is how much the service has under way, in its own unit (completions, in the
    sampler)."""

    ids: tuple[str, ...]
    busy: int = 0
