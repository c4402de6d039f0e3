"""An answer in lines of JSON, one a result, as results come; and work that ends when the client
that waits for it goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from shared import codec
from shared.errors import Failed, HoneError
from shared.logs import get_logger

LINES = "application/x-ndjson"


async def answer(
    results: AsyncGenerator[BaseModel], request: Request, name: str, deadline_s: float
) -> StreamingResponse:
    """Returns the response that streams `results`, which are those of the operation `name`.

    A client that goes away ends the work. Raises what fails before the first result, so that it has
    its own status; what fails after it is a problem document as the last line.
    """
    end = time.monotonic() + deadline_s

    async def next_line() -> bytes | None:
        try:
            async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                result = await anext(results, None)
        except TimeoutError as error:
            raise Failed(
                f"{name} was not done after {deadline_s:g} s (setting HONE_OPERATION_DEADLINE_S)"
            ) from error
        except HoneError:
            raise
        except Exception as error:
            get_logger().exception("stream failed", operation=name)
            raise Failed(f"{name}: {type(error).__name__}: {error}", code="bug") from error
        return None if result is None else codec.encode(result) + b"\n"

    begun = asyncio.create_task(next_line())
    await done_or_gone(begun, request)
    if begun.cancelled():
        raise Failed(f"{name} was ended: its client went away")
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


async def done_or_gone(work: asyncio.Task[Any], request: Request) -> None:
    """Waits until the work is done, or its client gone, which ends it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.create_task(gone())
    await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
