"""Secrets never reach the log."""

from __future__ import annotations

import json

import pytest
import structlog
from pydantic import SecretStr

from shared.host import logs
from shared.settings import Settings


def test_a_secret_in_any_field_is_masked(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", Settings(token=SecretStr("s3cr3t-token")))
    logs.get_logger().info("request", header="Bearer s3cr3t-token")
    line = json.loads(capfd.readouterr().err.strip().splitlines()[-1])
    assert (
        line["header"] == "Bearer ***"
        and line["service"] == "trainer"
        and line["event"] == "request"
    )


def test_a_commands_warnings_leave_stdout_to_what_it_was_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs.to_stderr()
    logs.get_logger().warning("waiting for a service", service="reward")
    logs.get_logger().info("not told")
    told = capfd.readouterr()
    assert told.out == "" and "waiting for a service" in told.err and "not told" not in told.err


def test_a_traceback_in_a_commands_log_shows_no_variables(
    capfd: pytest.CaptureFixture[str],
) -> None:
    structlog.reset_defaults()  # what tests set
    token = "s3cr3t-token"
    logs.to_stderr()
    try:
        raise RuntimeError(str(len(token)))
    except RuntimeError:
        logs.get_logger().warning("not expected", exc_info=True)
    told = capfd.readouterr().err
    assert "RuntimeError: 12" in told and token not in told
