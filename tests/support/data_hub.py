"""A Hugging Face Hub with one data set: HF_ENDPOINT of a test."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40


class DataHub:
    """Has `owner/data` at COMMIT: rows of `prompt` and `answer`, or the file `parquet`. Unless it
    `answers`, requests wait. `num_asked` counts the requests."""

    def __init__(self, num_rows: int = 20, parquet: bytes | None = None) -> None:
        self.name = "train.parquet" if parquet else "train.jsonl"
        rows = ({"prompt": f"{i}?", "answer": i} for i in range(num_rows))
        self.file = parquet or "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.answers = threading.Event()
        self.answers.set()
        self.num_asked = 0

    @contextlib.contextmanager
    def serving(self) -> Generator[str]:
        """Yields its URL."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.num_asked += 1
                hub.answers.wait()
                status, headers, body = hub._answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any, **__: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.answers.set()
            server.shutdown()
            server.server_close()

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        tag, known = hashlib.sha1(self.file).hexdigest(), {"x-repo-commit": COMMIT}
        entry = {"type": "file", "path": self.name, "size": len(self.file), "oid": tag}
        if re.search(rf"/resolve/[^/]+/{self.name}$", path):
            return 200, {**known, "etag": f'"{tag}"'}, self.file
        if "/resolve/" in path:
            return 404, {**known, "x-error-code": "EntryNotFound"}, b""
        if "/tree/" in path:
            return 200, {}, json.dumps([entry]).encode()
        info = {"id": "owner/data", "sha": COMMIT, "siblings": [], "private": False, "tags": []}
        return 200, {}, json.dumps(info).encode()
