"""An answer in lines of JSON, one per result, as results come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from shared.errors import HoneError
from shared.http import codec
from shared.http.draining import Draining
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
