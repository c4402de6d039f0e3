"""Files as answers, whole or by range, so that an interrupted download resumes where it broke
off."""

from __future__ import annotations

import asyncio
import os
import re

from fastapi.responses import FileResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from shared.errors import Malformed, NotFound
from shared.http import openapi

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
