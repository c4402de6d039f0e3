"""The certificates that clients of this process trust."""

from __future__ import annotations

import functools
import ssl

import httpx2 as httpx


@functools.cache
def trusted() -> ssl.SSLContext:
    """Returns one context for all clients: each of its own would read every certificate again,
    25 ms of CPU time."""
    return httpx.create_ssl_context()
