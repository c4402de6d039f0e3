"""Answers in pieces: lines of JSON, one for each result as it comes, and files, whole or by range,
so that an interrupted download resumes where it broke off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import AsyncGenerator

from fastapi import Request
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from shared.errors import HoneError, Malformed, NotFound
from shared.http import codec, openapi
from shared.http.health import Draining
from shared.http.operations import client_went_away, done_or, failing_as

LINES = "application/x-ndjson"


async def answer(
    results: AsyncGenerator[BaseModel],
    request: Request,
    name: str,
    deadline_s: float,
    draining: Draining,
) -> StreamingResponse:
    """Returns the response that streams the `results` of the operation `name`.

    The work ends when the client goes away, or when the service ends and breaks the response off.
    Raises an error before the first result, so that it has its own status; a later error is a
    problem document as the last line.
    """
    end = time.monotonic() + deadline_s

    async def next_line() -> bytes | None:
        async with failing_as(name, deadline_s, end - time.monotonic()):
            result = await anext(results, None)
        return None if result is None else codec.encode(result) + b"\n"

    begun = asyncio.create_task(next_line())
    await done_or(begun, draining.wait(), client_gone(request))
    if not begun.done():
        begun.cancel()
        await asyncio.wait({begun})
        if draining.has_begun():
            raise draining.error()
        raise client_went_away(name)
    first = begun.result()

    async def lines() -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(results):
            try:
                line = first
                while line is not None:
                    yield line
                    line = await next_line()
            except HoneError as error:
                yield json.dumps(error.problem()).encode() + b"\n"

    return StreamingResponse(lines(), media_type=LINES)


async def client_gone(request: Request) -> None:
    """Returns once the client went away. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


BYTES = "application/octet-stream"

RANGE = re.compile(r"bytes=(?:(?P<first>\d{1,18})-(?P<last>\d{1,18})?|-\d{1,18})")
"""One range: from one byte to another, from a byte on, or the last so many bytes."""

DOWNLOADED: openapi.Responses = {
    200: openapi.without_model("the file", BYTES),
    206: openapi.without_model("the part of the file that `Range` asked for", BYTES),
    416: openapi.without_model("`Range` begins beyond the end of the file", "text/plain"),
}


class DownloadedFile(FileResponse):
    """The file at `path`, as `filename` if one is given. Raises NotFound for a file that was
    removed since, and Malformed for an invalid `Range`."""

    chunk_size = 1 << 20

    def __init__(
        self, path: os.PathLike[str], filename: str | None = None, status_code: int = 200
    ) -> None:
        # FastAPI reads the status that the OpenAPI document shows from these parameters.
        super().__init__(path, status_code, media_type=BYTES, filename=filename)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_range(Headers(scope=scope).get("range"))
        try:
            self.stat_result = await asyncio.to_thread(os.stat, self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{str(self.path)!r} is not there any more") from error
        self.set_stat_headers(self.stat_result)
        await super().__call__(scope, receive, send)


def _check_range(given: str | None) -> None:
    found = None if given is None else RANGE.fullmatch(given)
    is_backward = found and found["last"] and int(found["last"]) < int(found["first"])
    if given is not None and (found is None or is_backward):
        raise Malformed(
            f"the header Range is {given!r:.80}; expected one range of bytes, such as "
            "bytes=1000-1999 or bytes=1000-"
        )
