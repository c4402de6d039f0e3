"""Secrets never reach the log."""

from __future__ import annotations

import json

import pytest
from pydantic import SecretStr

from shared import logs
from shared.config import Settings


def test_a_secret_in_any_field_is_masked(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", Settings(token=SecretStr("s3cr3t-token")))
    logs.get_logger().info("request", header="Bearer s3cr3t-token")
    line = json.loads(capfd.readouterr().err.strip().splitlines()[-1])
    assert line["header"] == "Bearer ***" and line["service"] == "trainer" and line["event"] == "request"
