"""The page: static files at `/` and below `/page/`. It reads the same API as every client, so the
files hold no data and no secret, and need no token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

from shared.errors import NotFound
from shared.http.rendering import GZIP_BYTES, compress
from shared.http.service import Service

FOLDER = Path(__file__).parent

INDEX = "index.html"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The media types of the files that are served; files of other kinds are not."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
"""The Content-Security-Policy. No inline script or style runs, so a model's text that is rendered
as HTML by mistake does no harm."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
"""The headers of every file. With `no-cache` a browser checks each time whether its copy is
current, so that after an update it never mixes old and new modules."""


@dataclass(frozen=True)
class PageFile:
    """A file of the page: its bytes, also compressed, and its ETag."""

    media_type: str
    data: bytes
    zipped: bytes
    etag: str


def is_public(path: str) -> bool:
    """Returns whether the path belongs to the page's files, which need no token."""
    return path == "/" or path.startswith("/page/")


def add_routes(service: Service) -> None:
    async def index(request: Request) -> Response:
        """The page, for browsers."""
        return _answer(request, INDEX)

    async def file(request: Request, name: str) -> Response:
        """A file of the page."""
        return _answer(request, name)

    for path, handler in (("/", index), ("/page/{name:path}", file)):
        service.app.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)


def _answer(request: Request, name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise NotFound(f"no file {name!r:.200} of the page")
    headers = {**HEADERS, "etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    data = found.data
    if found.zipped and "gzip" in request.headers.get("accept-encoding", ""):
        data, headers["content-encoding"] = found.zipped, "gzip"
    headers |= {"content-type": found.media_type, "content-length": str(len(data))}
    return Response(b"" if request.method == "HEAD" else data, headers=headers)


@cache
def _files() -> dict[str, PageFile]:
    """Returns the files by name, read once: some 150 kB."""
    return {
        path.relative_to(FOLDER).as_posix(): _read(path)
        for path in FOLDER.rglob("*")
        if path.suffix in TYPES
    }


def _read(path: Path) -> PageFile:
    data = path.read_bytes()
    zipped = compress(data) if len(data) >= GZIP_BYTES else b""
    etag = f'W/"{hashlib.sha256(data).hexdigest()[:32]}"'
    return PageFile(TYPES[path.suffix], data, zipped, etag)
