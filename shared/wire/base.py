"""The base class of all bodies, and the bodies that every service has."""

from __future__ import annotations

import array
import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, cast, overload

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

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
"""A reward or metric from elsewhere. Sums and means of greater numbers would not be finite."""

Message = dict[str, Plain]
"""A chat message: at least `role` and `content`."""

JobId = Annotated[str, Field(pattern=JOB_ID)]

Fence = tuple[int, int]
"""`(attempt, epoch)`; the greater fence is newer."""


class Fencing(Wire):
    """How new the caller is. A caller that has been superseded is refused: Conflict, code "stale".

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
"""The attempts that had places on the trainer when an attempt got its lease: they stay."""


Weight = Annotated[float, Field(ge=0.01, le=100)]
"""A job's share of a trainer's tokens, in proportion to the weights of the others."""


class Fenced(Fencing):
    """A body that only the job's newest worker may send."""

    job_id: JobId


class Orchestrator(Wire):
    """An orchestrator, as a trainer or sampler knows it: by the `identity` of its Redis, and for
    people by its `place`, a host and port. Orchestrators that share a Redis have the same
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
    caller was told last; it is told again only after a change."""

    ids: tuple[str, ...] = Field(max_length=65_536)
    wait_s: float = Field(default=0.0, ge=0, le=60)
    busy_below: int | None = Field(default=None, ge=1)
    busy: int | None = None


class WaitResult(Wire):
    """Which operations have ended; an operation's own Location has its result, or says that it is
    unknown. `busy` is the service's current load, in its own unit (completions, in the sampler)."""

    ids: tuple[str, ...]
    busy: int = 0


N = TypeVar("N", int, float)

NAMES = {"i": "int32", "f": "float32", "B": "uint8"}


class Packed(Sequence[N], Generic[N]):
    """An immutable sequence of numbers. `data` holds them, little endian.

    Built from any iterable of numbers, or from such bytes. Equal to any list or tuple of the same
    numbers. Raises ValueError for a number that does not fit, and for bytes with an incomplete
    entry.
    """

    __slots__ = ("_view", "data")

    code: ClassVar[str]
    """The type of an entry, as `array` and `struct` name it."""
    item_schema: ClassVar[dict[str, Any]]

    def __init__(self, numbers: Iterable[N] | bytes = b"") -> None:
        self.data = _to_bytes(self.code, numbers)
        self._view: memoryview[Any] = memoryview(_native(self.code, self.data)).cast(
            self.code  # pyright: ignore[reportArgumentType, reportCallIssue]
        )

    def __len__(self) -> int:
        return len(self._view)

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[N, ...]: ...
    def __getitem__(self, index: int | slice) -> N | tuple[N, ...]:
        return tuple(self._view[index]) if isinstance(index, slice) else self._view[index]

    def __iter__(self) -> Iterator[N]:
        return iter(self._view)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed) and other.code == self.code:
            return self.data == other.data
        if isinstance(other, list | tuple):
            try:
                return self.data == _to_bytes(self.code, cast(Sequence[Any], other))
            except (TypeError, ValueError):
                return False
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._view.tolist()!r})"

    def __reduce__(self) -> tuple[type[Packed[N]], tuple[bytes]]:
        return type(self), (self.data,)

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Returns the numbers of a body's field: bytes, a list of numbers, or one of these. Raises
        ValueError for anything else, and for a listed number that is not finite."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, bytes | list | tuple):
            raise ValueError(f"expected a list of numbers, got {type(value).__name__}")
        numbers = cls(cast(bytes, value))
        if not isinstance(value, bytes) and (at := numbers.first_not_finite()) is not None:
            raise ValueError(f"got {numbers[at]} at index {at}, expected finite numbers only")
        return numbers

    def first_not_finite(self) -> int | None:
        """Returns the index of the first number that is NaN or infinite; None if there is none."""
        with contextlib.suppress(ValueError):  # both infinities
            if math.isfinite(math.fsum(self)):
                return None
        return next((at for at, number in enumerate(self) if not math.isfinite(number)), None)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Serializes to bytes if the context says `packed`, else to a list."""
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(_plain, info_arg=True),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "array", "items": dict(cls.item_schema)}


class TokenIds(Packed[int]):
    """Token ids, as int32."""

    __slots__ = ()
    code = "i"
    item_schema: ClassVar[dict[str, Any]] = {"type": "integer"}


class Logprobs(Packed[float]):
    """Log-probabilities in nats, one per token, as float32. Bytes may hold numbers that are not
    finite; lists may not."""

    __slots__ = ()
    code = "f"
    item_schema: ClassVar[dict[str, Any]] = {"type": "number"}


class Mask(Packed[int]):
    """One 0 or 1 per token, as uint8."""

    __slots__ = ()
    code = "B"
    item_schema: ClassVar[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": 255}


def _plain(value: Packed[Any], info: SerializationInfo) -> Any:
    packed = info.context and info.context.get("packed")
    return value.data if packed else list(value)


def _to_bytes(code: str, numbers: Iterable[Any] | bytes) -> bytes:
    if isinstance(numbers, Packed) and numbers.code == code:
        return numbers.data
    if isinstance(numbers, bytes):
        size = array.array(code).itemsize
        if len(numbers) % size:
            raise ValueError(f"{len(numbers)} bytes are no whole number of entries of {size} bytes")
        return numbers
    try:
        return _native(code, array.array(code, numbers).tobytes())
    except (OverflowError, TypeError) as error:
        raise ValueError(f"expected numbers that fit into {NAMES[code]}: {error}") from error


def _native(code: str, data: bytes) -> bytes:
    """Converts between little-endian and this machine's byte order, in both directions."""
    if sys.byteorder == "little":
        return data
    swapped = array.array(code, data)
    swapped.byteswap()
    return swapped.tobytes()
