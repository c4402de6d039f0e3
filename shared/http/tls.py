"""The certificates that clients of this process trust."""

from __future__ import annotations

import functools
import ssl

import httpx2 as httpx


@functools.cache
def trusted() -> ssl.SSLContext:
    """Returns one context for all clients. A context for each client would read every certificate
    again, 25 ms of CPU time."""
    return httpx.create_ssl_context()


def trusted_by(url: str) -> ssl.SSLContext:
    """Returns the context for a client of one service. If the service needs no certificates, the
    context has none and trusts nobody."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http:") else trusted()
