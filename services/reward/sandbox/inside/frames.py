"""Messages on a stream socket, by its descriptor: four bytes of length (big endian), then the
message: JSON, or bytes as they are.

Not by Python's `socket`: that is 0.3 MB, which a slot would carry through every fork.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

HEADER = struct.Struct(">I")


def pack(message: Any) -> bytes:
    return pack_bytes(json.dumps(message).encode())


def pack_bytes(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def send(channel: int, message: Any) -> None:
    send_bytes(channel, pack(message))


def send_bytes(channel: int, data: bytes) -> None:
    """Sends bytes as they are, without a length."""
    while data:
        data = data[os.write(channel, data) :]


def receive(channel: int) -> Any | None:
    """Returns the next message, or None once the other end is closed."""
    header = exactly(channel, HEADER.size)
    data = header and exactly(channel, HEADER.unpack(header)[0])
    return json.loads(data) if data else None


def pour_into_pipe(channel: int, pipe: int, size: int) -> None:
    """Moves the next `size` bytes into a pipe, inside the kernel: this process never has them, so
    no child of it will find them. Raises OSError if either end is closed."""
    while size:
        size -= _moved(channel, pipe, size)


def pour_into_file(channel: int, file: int, size: int) -> None:
    """Moves the next `size` bytes into a file, as `pour_into_pipe` does."""
    reading, writing = os.pipe()
    try:
        while size:
            moved = _moved(channel, writing, size)  # as much as the pipe holds
            pour_into_pipe(reading, file, moved)
            size -= moved
    finally:
        os.close(reading)
        os.close(writing)


def send_file(channel: int, file: int, size: int) -> None:
    """Sends the first `size` bytes of a file, inside the kernel as well."""
    sent = 0
    while sent < size:
        moved = os.sendfile(channel, file, sent, size - sent)
        if not moved:
            raise OSError("a file became shorter while it was sent")
        sent += moved


def _moved(source: int, target: int, size: int) -> int:
    """Returns how many of up to `size` bytes were moved, which is at least one."""
    moved = os.splice(source, target, size)
    if not moved:
        raise ConnectionResetError("the other end is closed")
    return moved


def exactly(channel: int, size: int) -> bytes | None:
    """Returns the next `size` bytes, or None once the other end is closed."""
    parts: list[bytes] = []
    while size:
        part = os.read(channel, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
