"""Messages on a stream socket: four bytes of length (big endian), then the message: JSON, or bytes as they are."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import Any

HEADER = struct.Struct(">I")


def pack(message: Any) -> bytes:
    return pack_bytes(json.dumps(message).encode())


def pack_bytes(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def send(channel: socket.socket, message: Any) -> None:
    channel.sendall(pack(message))


def receive(channel: socket.socket) -> Any | None:
    """Returns the next message, or None once the other end is closed."""
    data = receive_bytes(channel)
    return json.loads(data) if data else None


def receive_bytes(channel: socket.socket) -> bytes | None:
    """Returns the next message as it is, or None once the other end is closed."""
    header = _exactly(channel, HEADER.size)
    return None if header is None else _exactly(channel, HEADER.unpack(header)[0])


def pour_into_pipe(channel: socket.socket, pipe: int) -> None:
    """Moves the next message into a pipe, inside the kernel: this process never has its bytes, so no child of it will find
    them. Raises OSError if either end is closed."""
    _splice(channel.fileno(), pipe, _size(channel))


def pour_into_file(channel: socket.socket, file: int) -> None:
    """Moves the next message into a file, as `pour_into_pipe` does."""
    left = _size(channel)
    with contextlib.ExitStack() as stack:
        reading, writing = os.pipe() if left else (-1, -1)
        for fd in (reading, writing) if left else ():
            stack.callback(os.close, fd)
        while left:
            part = min(left, 1 << 16)  # what a pipe holds
            _splice(channel.fileno(), writing, part)
            _splice(reading, file, part)
            left -= part


def send_file(channel: socket.socket, file: int, limit: int) -> None:
    """Sends the first `limit` bytes of a file as a message, inside the kernel as well."""
    size = min(os.fstat(file).st_size, limit)
    channel.sendall(HEADER.pack(size))
    sent = 0
    while sent < size:
        sent += os.sendfile(channel.fileno(), file, sent, size - sent)


def _size(channel: socket.socket) -> int:
    header = _exactly(channel, HEADER.size)
    if header is None:
        raise ConnectionResetError("the other end is closed")
    return HEADER.unpack(header)[0]


def _splice(source: int, target: int, size: int) -> None:
    while size:
        moved = os.splice(source, target, size)
        if not moved:
            raise ConnectionResetError("the other end is closed")
        size -= moved


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
