"""The resource of a lease: a service, by a name that does not depend on how its URL is spelt."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from shared.http.urls import REGISTERED, is_loopback

PORTS = {"http": 80, "https": 443}


def resource(url: str) -> str:
    """Returns `host:port` of the service at `url`. A loopback address becomes this machine's host
    name, because each machine has its own. All registered samplers together are one resource."""
    if url == REGISTERED:
        return REGISTERED
    parts = urlsplit(url)
    host = parts.hostname or ""
    name = socket.gethostname().lower() if is_loopback(host) else host.rstrip(".")
    return f"{name}:{parts.port or PORTS.get(parts.scheme, '')}"
