"""A collector of traces, which takes OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Received:
    """A span as it was sent, ids in hexadecimal; `parent` "": it is a root."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    attributes: dict[str, Any]
    failed: bool


@dataclass
class Collector:
    url: str
    spans: list[Received] = field(default_factory=list[Received])

    def roots(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name and not span.parent]

    def below(self, parent: Received) -> list[Received]:
        """Returns the spans right below another, in the order of their names."""
        found = [span for span in self.spans if span.parent == parent.id]
        assert all(span.trace == parent.trace for span in found)
        return sorted(found, key=lambda span: span.name)

    def one_below(self, parent: Received, name: str) -> Received:
        (found,) = [span for span in self.below(parent) if span.name == name]
        return found


@contextlib.contextmanager
def collecting() -> Generator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: Any) -> list[Received]:
    return [
        Received(
            service=_values(sent.resource.attributes)["service.name"],
            name=span.name,
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            kind=span.kind,
            attributes=_values(span.attributes),
            failed=span.status.code == span.status.STATUS_CODE_ERROR,
        )
        for sent in request.resource_spans
        for scope in sent.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        found[each.key] = getattr(each.value, each.value.WhichOneof("value"))
    return found
