"""JSON for people, msgpack for the services among themselves; the same pydantic models both
ways."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from pydantic import BaseModel, ValidationError

from shared.documented import BINARY
from shared.errors import BadRequest, TooLarge
from shared.explain import sentences

JSON = "application/json"
MSGPACK = "application/msgpack"

_msgpack: Any = msgpack

M = TypeVar("M", bound=BaseModel)


def encode(body: BaseModel, media_type: str = JSON) -> bytes:
    """Returns the body's bytes. In msgpack, token ids are int32 bytes and log-probs float32 bytes.
    Raises BadRequest for data nested too deep, and in msgpack for a whole number beyond 64 bits, a
    value that is no plain data, and text that is no Unicode."""
    if media_type != JSON:
        return bytes(pack(body))
    try:
        return body.model_dump_json().encode()
    except ValueError as error:
        raise _unwritable(body, error) from error


def pack(body: BaseModel) -> memoryview:
    """Returns the body in msgpack as `encode` does, but as a view of the buffer it was written to.
    Bytes would be a copy as large as the body."""
    packer = _msgpack.Packer(use_bin_type=True, autoreset=False)
    try:
        packer.pack(body.model_dump(context={"packed": True}))
        return memoryview(packer.getbuffer())
    except TypeError as error:
        raise BadRequest(
            f"{type(body).__name__}: {error}; expected text, numbers, lists and tables of them"
        ) from error
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{type(body).__name__} holds {error.object[error.start]!r}, half of a surrogate pair; "
            "expected text that UTF-8 has"
        ) from error
    except ValueError as error:  # of pydantic or of msgpack, each with a depth of its own
        raise _unwritable(body, error) from error
    except OverflowError as error:
        raise BadRequest(
            f"{type(body).__name__} holds a whole number beyond 64 bits, which {MSGPACK} cannot "
            "carry"
        ) from error


def _unwritable(body: BaseModel, error: ValueError) -> BadRequest:
    return BadRequest(
        f"{type(body).__name__} cannot be sent, perhaps because it is nested too deep: {error}; "
        "expected at most 250 lists and tables in each other"
    )


BRACKET_WEIGHT = 8
"""A list or a table takes as long to read as eight numbers, and more memory."""


def json_weight(data: bytes | str, start: int = 0, end: int | None = None) -> int:
    """Returns how much reading `data` as JSON will take, as if it were so many numbers. Reading
    holds Python's lock from beginning to end, and so everything else in the process. Commas and
    brackets within texts count too, as telling them apart would take as long as reading."""
    comma, square, curly = (",", "[", "{") if isinstance(data, str) else (b",", b"[", b"{")
    given: Any = data
    brackets = given.count(square, start, end) + given.count(curly, start, end)
    return given.count(comma, start, end) + BRACKET_WEIGHT * brackets


def check_weight(weight: int, most: int) -> None:
    """Raises TooLarge for more than `most`."""
    if weight > most:
        raise TooLarge(
            f"the body has more than {most} numbers, lists and tables (a list or a table counts as "
            f"{BRACKET_WEIGHT}, commas and brackets in texts count too); expected at most {most}"
        )


MAX_NUMBER = 2**63
"""Bound of whole numbers in JSON: msgpack, Redis and numpy carry 64 bits."""

_SUSPECT = re.compile(rb"[0-9]{19}|\\u[dD]")
"""What may be a whole number beyond 64 bits, which pydantic takes, or half of a surrogate pair."""


def read_json(data: bytes) -> Any:
    """Returns the value. Raises ValueError for what is no JSON, for text that UTF-8 lacks (half of
    a surrogate pair), and for a whole number beyond 64 bits."""
    try:
        value = json.loads(data, parse_int=_whole, parse_constant=_no_constant)
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text holds {error.object[error.start]!r}, half of a surrogate pair; expected text "
            "that UTF-8 has"
        ) from error
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= MAX_NUMBER:
        raise ValueError(f"{digits:.40} is a whole number beyond 64 bits")
    return int(digits)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def decode(
    model: type[M], data: bytes, media_type: str = JSON, most_weight: int | None = None
) -> M:
    """Returns the model that `data` holds; raises BadRequest with one sentence per fault, and
    TooLarge for msgpack of more than `most_weight` (`json_weight`)."""
    return _validated(model, data, media_type, tolerant=False, most_weight=most_weight)


def decode_tolerantly(model: type[M], data: bytes, media_type: str = JSON) -> M:
    """Returns the model that stored `data`, or a service's answer, holds. Unknown keys are ignored,
    for a newer version of Hone may have written them. Raises BadRequest as `decode` does."""
    return _validated(model, data, media_type, tolerant=True)


def _validated(
    model: type[M],
    data: bytes,
    media_type: str,
    *,
    tolerant: bool,
    most_weight: int | None = None,
) -> M:
    is_closed = model.model_config.get("extra") == "forbid"
    extra = "ignore" if tolerant and is_closed else None  # an open model keeps its extra fields
    try:
        if media_type != MSGPACK:
            if not tolerant and _SUSPECT.search(data):
                read_json(data)
            return model.model_validate_json(data or b"{}", extra=extra)
        return model.model_validate(
            _unpacked(data, most_weight), extra=extra, context={BINARY: True}
        )
    except ValidationError as error:
        faults = sentences(error, model)
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error
    except (ValueError, _msgpack.exceptions.UnpackException) as error:
        raise BadRequest(
            f"a body of {len(data)} bytes is not valid {media_type}: "
            f"{str(error) or type(error).__name__}"
        ) from error


def _unpacked(data: bytes, most_weight: int | None) -> Any:
    """Raises ValueError for a table with a list or a table as a key, which Python cannot hold."""
    limits = {} if most_weight is None else _Scale(most_weight).limits()
    try:
        return _msgpack.unpackb(data, raw=False, strict_map_key=False, **limits)
    except TypeError as error:
        raise ValueError(f"a key of a table is a list or a table ({error})") from error


class _Scale:
    """Weighs lists and tables as msgpack makes them. Raises TooLarge beyond `most`."""

    def __init__(self, most: int) -> None:
        self._most, self._weight = most, 0

    def limits(self) -> dict[str, Any]:
        """Returns arguments of msgpack."""
        one = {"max_array_len": self._most, "max_map_len": self._most}
        return one | {"list_hook": self._weigh, "object_hook": self._weigh}

    def _weigh(self, made: Any) -> Any:
        self._weight += BRACKET_WEIGHT + len(made)
        check_weight(self._weight, self._most)
        return made
