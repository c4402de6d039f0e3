"""Messages on a stream socket: four bytes of length (big endian), then JSON."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct(">I")


def pack(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return HEADER.pack(len(data)) + data


def send(channel: socket.socket, message: Any) -> None:
    channel.sendall(pack(message))


def receive(channel: socket.socket) -> Any | None:
    """Returns the next message, or None once the other end is closed."""
    header = _exactly(channel, HEADER.size)
    data = _exactly(channel, HEADER.unpack(header)[0]) if header else None
    return json.loads(data) if data else None


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
