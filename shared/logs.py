"""Structured logs: a constant message, with fields beside it (`job`, `step`, `service`,
`request_id`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from shared import tracing
from shared.config import Settings

Logger = structlog.stdlib.BoundLogger


def configure(service: str, settings: Settings) -> None:
    """Sends all logs of this process, the libraries' warnings included, to stderr, one JSON object
    (or console line) each."""
    secrets = settings.secrets()

    def redact(
        _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {key: _without(value, secrets) for key, value in event.items()}

    render = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer()
    )
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
    """Sends a command's warnings to stderr, as lines for people: its stdout is for what it was
    asked for."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def get_logger() -> Logger:
    return structlog.get_logger()


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
    return value
