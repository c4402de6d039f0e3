"""The difference between two versions of a tensor, packed small: the positions and new values of
the elements whose bits changed.

    frame = zstd(count: u64 | gaps between positions | values)

Gaps and values are written byte plane by byte plane (all lowest bytes, then all second ones, ...):
a plane of zeros compresses to almost nothing, and the highest bytes of floats have few different
values. Values replace the old ones, so applying a frame twice is harmless.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from shared.errors import Failed
from shared.weights.folders import ITEM_BYTES

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

LEVEL = 1
"""zstd's fastest ordinary level: higher levels gain a few percent and take several times as
long."""

Array = np.ndarray[Any, Any]


def elements(data: bytes | bytearray, dtype: str) -> Array:
    """Returns the elements' bits `[N]` as unsigned integers; a view."""
    if dtype not in ITEM_BYTES:
        raise Failed(f"got a tensor of dtype {dtype!r}, expected one of {sorted(ITEM_BYTES)}")
    return np.frombuffer(data, UNSIGNED[ITEM_BYTES[dtype]])


def pack(old_N: Array, new_N: Array) -> tuple[bytes, int]:
    """Returns the frame that turns `old_N` into `new_N`, and how many elements it changes."""
    positions = np.flatnonzero(old_N != new_N)
    gaps = np.diff(positions, prepend=0).astype(_gap_type(len(new_N)))
    parts = (struct.pack("<Q", len(positions)), _planes(gaps), _planes(new_N[positions]))
    return zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(parts)), len(positions)


def apply(frame: bytes, into_N: Array) -> int:
    """Writes the frame's elements into `into_N`, and returns how many. Raises Failed, with `into_N`
    unchanged, for a frame that is damaged or belongs to another tensor."""
    gap_type, value_type = _gap_type(len(into_N)), into_N.dtype.type
    item_bytes = gap_type().itemsize + value_type().itemsize
    plain = _decompressed(frame, most_bytes=8 + len(into_N) * item_bytes)
    (count,) = struct.unpack("<Q", plain[:8])
    if len(plain) != 8 + count * item_bytes:
        raise Failed(f"a delta of {count} elements has {len(plain)} bytes")
    end = 8 + count * gap_type().itemsize
    positions = np.cumsum(_from_planes(plain[8:end], gap_type, count), dtype=np.uint64)
    if count and (positions[-1] >= len(into_N) or np.any(positions[1:] <= positions[:-1])):
        raise Failed(f"a delta changes element {positions[-1]} of {len(into_N)}")
    into_N[positions] = _from_planes(plain[end:], value_type, count)
    return count


def _gap_type(num_elements: int) -> Any:
    return np.uint32 if num_elements < 1 << 32 else np.uint64


def _planes(values_N: Array) -> bytes:
    return values_N.view(np.uint8).reshape(-1, values_N.dtype.itemsize).T.tobytes()


def _from_planes(data: bytes, dtype: Any, count: int) -> Array:
    planes = np.frombuffer(data, np.uint8).reshape(dtype().itemsize, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _decompressed(frame: bytes, *, most_bytes: int) -> bytes:
    """Returns the unpacked frame. A frame whose stated size exceeds `most_bytes` is refused before
    it is unpacked."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if not 8 <= size <= most_bytes:
            raise Failed(f"a delta of {size} bytes, expected 8 to {most_bytes}")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise Failed(f"a delta cannot be unpacked: {error}") from error
