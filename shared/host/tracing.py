"""Optional OpenTelemetry traces: one for each step of a job, with the work of the services below
it.

Without a collector (OTEL_EXPORTER_OTLP_ENDPOINT) OpenTelemetry is not imported. Spans are made only
inside a trace that was begun here, or by the caller of a service, whose requests carry its context
(W3C `traceparent`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from shared.errors import BadRequest, how_to_install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

COLLECTORS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's own variables, which its exporter reads."""

EXPORT_S = 5.0
"""Timeout of an export to the collector, in seconds."""

Value = str | int | float | bool

_provider: TracerProvider | None = None


def configure(service: str) -> None:
    """Begins to send this process's traces, if a collector is named. Raises BadRequest if
    OpenTelemetry is not installed."""
    global _provider
    if not any(map(os.environ.get, COLLECTORS)):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise BadRequest(
            f"a collector of traces is named, and OpenTelemetry cannot be imported ({error}); "
            f"{how_to_install('otel')}; or unset OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from error
    _provider = TracerProvider(resource=Resource.create({"service.name": f"hone-{service}"}))
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_S)))


def close() -> None:
    """Sends the remaining spans, within about EXPORT_S seconds, and stops tracing."""
    global _provider
    provider, _provider = _provider, None
    if provider:
        provider.shutdown()


class Trace:
    """A trace that is not bound to one block: it begins when it is made, contains the blocks of
    `within`, and ends with `end`. Without a span nothing is traced."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    @contextlib.contextmanager
    def within(self) -> Generator[None]:
        """Spans that begin in the block are below the trace's root. An exception in the block ends
        the trace."""
        if self._span is None:
            yield
            return
        from opentelemetry.trace import use_span

        try:
            with use_span(self._span):
                yield
        except BaseException:  # raised again; every kind of error ends the trace
            self.end()
            raise

    def end(self) -> None:
        """Ends the root. Doing it again changes nothing."""
        if self._span is not None and self._span.is_recording():
            self._span.end()


NONE = Trace()


def begin(name: str, **attributes: Value) -> Trace:
    """Returns a new trace whose root has this name."""
    if _provider is None:
        return NONE
    from opentelemetry.context import Context

    tracer = _provider.get_tracer("hone")
    return Trace(tracer.start_span(name, Context(), attributes=_named(attributes)))


@contextlib.contextmanager
def span(name: str, *, serves: bool = False, **attributes: Value) -> Generator[None]:
    """Makes a span of the block below the current span, if there is one. `serves`: the block
    answers a request to this service."""
    if _provider is None or not _is_traced():
        yield
        return
    from opentelemetry.trace import SpanKind

    tracer = _provider.get_tracer("hone")
    kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
    with tracer.start_as_current_span(name, kind=kind, attributes=_named(attributes)):
        yield


@contextlib.contextmanager
def detached() -> Generator[None]:
    """Within the block, spans that begin belong to no trace."""
    if _provider is None:
        yield
        return
    from opentelemetry import context

    token = context.attach(context.Context())
    try:
        yield
    finally:
        context.detach(token)


def note(**attributes: Value) -> None:
    """Adds attributes to the current span, with `hone.` before their names."""
    if _provider is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_named(attributes))


def headers() -> dict[str, str]:
    """Returns the headers with which a service continues the current trace."""
    carrier: dict[str, str] = {}
    if _provider is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier)
    return carrier


@contextlib.contextmanager
def continuing(given: Mapping[str, str]) -> Generator[None]:
    """Spans that begin in the block belong to the trace that a request's headers name."""
    if _provider is None or "traceparent" not in given:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(TraceContextTextMapPropagator().extract(given))
    try:
        yield
    finally:
        context.detach(token)


def stamp(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds the current trace to a log line; a processor of structlog."""
    if _provider is not None and _is_traced():
        from opentelemetry import trace

        event["trace_id"] = f"{trace.get_current_span().get_span_context().trace_id:032x}"
    return event


def _is_traced() -> bool:
    from opentelemetry import trace

    return trace.get_current_span().get_span_context().is_valid


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"hone.{name}": value for name, value in attributes.items()}
