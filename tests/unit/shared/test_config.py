"""Settings: refused when misspelt or unsafe."""

from __future__ import annotations

import pytest

from shared.config import load_settings
from shared.errors import BadRequest


def test_a_misspelt_setting_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_ROLOUT_PORT", "1")
    with pytest.raises(
        BadRequest,
        match=r"unknown setting 'HONE_ROLOUT_PORT' .*; did you mean 'HONE_ROLLOUT_PORT'",
    ):
        load_settings()


def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_TRAINER_RANKS", "none")
    with pytest.raises(
        BadRequest, match=r"'HONE_TRAINER_RANKS': got 'none'; input should be a valid integer"
    ):
        load_settings()


def test_no_deadline_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_LEASE_S", "inf")
    with pytest.raises(BadRequest, match=r"'HONE_LEASE_S': got 'inf'; .* a finite number"):
        load_settings()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::"])
def test_without_a_token_only_loopback_is_bound(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("HONE_HOST", host)
    with pytest.raises(BadRequest, match="HONE_TOKEN is not set"):
        load_settings()
    monkeypatch.setenv("HONE_TOKEN", "secret-token")
    assert load_settings().host == host


@pytest.mark.parametrize(
    "token", [" ", "shor7", "two words", "tab\tin-it", "schlüssel-wort", "x\n"]
)
def test_a_token_that_is_none_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HONE_TOKEN", token)
    with pytest.raises(BadRequest, match=r"HONE_TOKEN has .* expected at least 8") as raised:
        load_settings()
    assert token == " " or token not in str(raised.value)


def test_secrets_do_not_show_in_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_TOKEN", "secret-token")
    monkeypatch.setenv("HONE_REDIS_URL", "redis://:hidden-word@127.0.0.1/0")
    shown = repr(load_settings())
    assert "secret-token" not in shown and "hidden-word" not in shown
