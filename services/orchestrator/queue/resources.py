"""What a lease is on: a service, by a name that is the same however its URL is spelt."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from shared.urls import REGISTERED, is_loopback

PORTS = {"http": 80, "https": 443}


def resource(url: str) -> str:
    """Returns `host:port` of the service at `url`. This machine's loopback is its host name: of two
    machines, each has its own. Samplers that registered themselves are one resource together."""
    if url == REGISTERED:
        return REGISTERED
    parts = urlsplit(url)
    host = parts.hostname or ""
    name = socket.gethostname().lower() if is_loopback(host) else host.rstrip(".")
    return f"{name}:{parts.port or PORTS.get(parts.scheme, '')}"
