"""Bodies of requests. Each is unpacked and read in a thread, one at a time for each API key: 2 KB
may unpack to `MAX_CALL_BYTES`."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from weakref import WeakValueDictionary

import zstandard
from fastapi import Request

from services.orchestrator.extensions.tinker import requests
from shared.errors import BadRequest
from shared.http.gate import caller

MAX_CALL_BYTES = 64 << 20
"""Most bytes of a `forward_backward`, unpacked: the SDK sends 5 MB at a time."""

MAX_SAMPLE_BYTES = 8 << 20
"""Most bytes of a request for samples: a prompt of a million tokens."""

MAX_JSON_BYTES = 256 << 10
"""Most bytes of any other body."""


class Bodies:
    """Reads the bodies of requests."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by API key

    async def message(self, request: Request) -> tuple[Any, str]:
        """Returns the message of a `forward_backward` or `forward`, and the digest of its unpacked
        body. Raises BadRequest."""
        packed, encoding = await request.body(), request.headers.get("content-encoding")

        def read() -> tuple[Any, str]:
            body = _unpacked(packed, encoding)
            return requests.read_message(body), requests.digest_of(body)

        async with self._lock():
            return await asyncio.to_thread(read)

    async def json(
        self, request: Request, max_bytes: int = MAX_JSON_BYTES
    ) -> tuple[dict[str, Any], str]:
        """Returns the object of a body of JSON, and the body's digest. Raises BadRequest."""
        if encoding := request.headers.get("content-encoding"):
            raise BadRequest(f"Content-Encoding is {encoding!r:.40}; expected none for JSON")
        body = await request.body()
        _check_length(body, max_bytes)

        def read() -> tuple[dict[str, Any], str]:
            return _json(body), requests.digest_of(body)

        async with self._lock():
            return await asyncio.to_thread(read)

    def _lock(self) -> asyncio.Lock:
        key = caller.get()
        return self._locks.setdefault(key.name if key else "", asyncio.Lock())


def _unpacked(body: bytes, encoding: str | None) -> bytes:
    if encoding == "zstd":
        try:
            body = zstandard.ZstdDecompressor().stream_reader(body).read(MAX_CALL_BYTES + 1)
        except zstandard.ZstdError as error:
            raise BadRequest(f"the body is no zstd: {error}") from error
    elif encoding:
        raise BadRequest(f"Content-Encoding is {encoding!r:.40}; expected 'zstd', or none")
    _check_length(body, MAX_CALL_BYTES)
    return body


def _check_length(body: bytes, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise BadRequest(f"the body has more than {max_bytes} bytes; expected at most {max_bytes}")


def _json(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error!s:.200}") from error
    if not isinstance(given, dict):
        raise BadRequest(f"the body is {given!r:.80}; expected a JSON object")
    return given
