"""Structured logs: a constant message, with fields beside it (`job`, `step`, `service`,
`request_id`)."""

from __future__ import annotations

import logging
import re
import secrets
import sys
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shared.host import tracing

if TYPE_CHECKING:  # imported where it is used, so a command that logs nothing skips it
    import structlog

    from shared.settings import Settings

    Logger = structlog.stdlib.BoundLogger

API_KEY = re.compile(r"hone_(?P<name>[a-z0-9-]{1,40})_[A-Za-z0-9_-]{43}")
"""The secret of a named API key. Logs show only its name."""

SESSION_KEY = re.compile(r"sk-hone-[A-Za-z0-9_-]{43}")
"""The key of an agent's session."""

_at_first: list[Callable[[], None]] = []
"""Called before the first line is logged."""


def configure(service: str, settings: Settings) -> None:
    """Sends all logs of this process, the libraries' warnings included, to stderr, one JSON object
    (or console line) each."""
    import structlog

    hidden = settings.secrets()

    def redact(
        _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {key: _without(value, hidden) for key, value in event.items()}

    render = structlog.processors.JSONRenderer() if settings.log_format == "json" else _console()
    chain: list[Any] = [
        structlog.contextvars.merge_contextvars,
        tracing.stamp,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        redact,
    ]
    structlog.configure(
        processors=[*chain, render],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    formatter = structlog.stdlib.ProcessorFormatter
    handler.setFormatter(
        formatter(processors=[formatter.remove_processors_meta, render], foreign_pre_chain=chain)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)


def to_stderr() -> None:
    """Sends a command's warnings to stderr, as lines for people, because stdout is for the
    command's result."""
    _at_first.append(_lines_on_stderr)


def _lines_on_stderr() -> None:
    import structlog

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S", utc=False),
            _console(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _console() -> Any:
    """Returns the renderer of lines for people. It writes tracebacks as Python does: rich by
    default shows all local variables, which may hold secrets, and takes seconds."""
    import structlog

    return structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)


def get_logger() -> Logger:
    import structlog

    while _at_first:
        _at_first.pop()()
    return structlog.get_logger()


def request_id() -> str:
    """Returns the id of the request that is being answered. Without one returns a new id, for a
    request to be sent. It contains the current job's id, if any, so that one search finds a job in
    the logs of all services."""
    if "structlog" not in sys.modules:  # no id is bound
        return secrets.token_hex(8)
    import structlog

    bound = structlog.contextvars.get_contextvars()
    job = f"{bound['job']}." if "job" in bound else ""
    return bound.get("request_id") or job + secrets.token_hex(8)


def of_request(id: str) -> AbstractContextManager[None]:
    """Adds the request id to every log line in the block."""
    import structlog

    return structlog.contextvars.bound_contextvars(request_id=id)


def bind(**values: str) -> None:
    """Adds the values, such as the job's id, to every later log line of this task."""
    import structlog

    structlog.contextvars.bind_contextvars(**values)


def _without(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, "***")
        return SESSION_KEY.sub("sk-hone-***", API_KEY.sub(r"hone_\g<name>_***", value))
    return value
