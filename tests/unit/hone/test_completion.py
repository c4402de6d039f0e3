"""What Tab offers for the job of a command, as bash asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shared.wire import JobList, VersionInfo
from tests.support.job_records import record


class Orchestrator(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        listed = JobList(jobs=(record("paused"),))
        body = listed if "jobs" in self.path else VersionInfo(service="orchestrator", hone="1")
        data = body.model_dump_json().encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Orchestrator) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def offered(url: str, line: str) -> list[str]:
    asked = {"_HONE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['hone']; import hone.cli as c; c.main()"],
        env=os.environ | asked | {"HONE_ORCHESTRATOR_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    return ended.stdout.split()


def test_tab_offers_jobs_by_name_and_id_and_nothing_without_a_stack(url: str) -> None:
    assert offered(url, "hone ls de") == ["demo", "demo-1"]
    assert offered(url, "hone logs demo-") == ["demo-1"]
    assert offered("http://127.0.0.1:9", "hone ls de") == []
    assert offered("http://127.0.0.1:9", "hone get de") == []
