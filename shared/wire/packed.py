"""Numbers kept as bytes: token ids and log-probs on their way from sampler to trainer.

A tuple of Python numbers takes some 30 bytes per entry and a conversion at every hop. These classes
are copied and compared as bytes. They become Python numbers only where code iterates over them.
"""

from __future__ import annotations

import array
import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, SerializationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

N = TypeVar("N", int, float)

NAMES = {"i": "int32", "f": "float32", "B": "uint8"}


class Packed(Sequence[N], Generic[N]):
    """An immutable sequence of numbers. `data` holds them as the machine does, little endian.

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
        self._view: memoryview[Any] = memoryview(self.data).cast(
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
        """Serializes to bytes if the context has `packed`, else to a list."""
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
            raise ValueError(
                f"{len(numbers)} bytes are not a whole number of entries of {size} bytes"
            )
        return numbers
    try:
        return array.array(code, numbers).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"expected numbers that fit into {NAMES[code]}: {error}") from error
