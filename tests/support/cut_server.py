"""An HTTP server of files that takes ranges, cuts connections and misbehaves on demand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class CutServer:
    """`files` by path. The first answers end after as many bytes as `cuts` says, one per answer;
    `status`, if set, is every answer, with `headers`. `ranges` are the requested ones."""

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    takes_ranges: bool = True
    ranges: list[str | None] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    url: str = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[CutServer]:
        handler = type("Handler", (_Handler,), {"shared": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    shared: CutServer

    def do_GET(self) -> None:
        shared = self.shared
        asked = self.headers.get("range")
        shared.ranges.append(asked)
        shared.authorizations.append(self.headers.get("authorization"))
        data = shared.files.get(self.path)
        if shared.status or data is None:
            self._head(shared.status or 404, {"content-length": "0", **shared.headers})
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        partial = bool(asked) and shared.takes_ranges
        body = data[start:] if partial else data
        self._head(206 if partial else 200, {"content-length": str(len(body))})
        cut = shared.cuts.pop(0) if shared.cuts else len(body)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[:cut])
        self.close_connection = True

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
