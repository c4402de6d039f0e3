"""Settings: what is refused and how it is said, deadlines that follow from others, secrets, and
settings of each trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.settings import Settings, load_settings


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("HONE_ROLOUT_PORT", "1", "unknown setting .*; did you mean 'HONE_ROLLOUT_PORT'"),
        ("HONE_RUNS_DIR_FILE", "/run/secrets/x", "unknown setting 'HONE_RUNS_DIR_FILE'"),
        ("HONE_TOKEN_FIL", "/run/secrets/x", "unknown setting 'HONE_TOKEN_FIL'"),
        ("HONE_TRAINER_RANKS", "none", "'HONE_TRAINER_RANKS': got 'none'; .* a valid integer"),
        ("HONE_WAIT_LIMIT_S", "soon", "'HONE_WAIT_LIMIT_S': got 'soon'; .*; expected seconds$"),
        ("HONE_LEASE_S", "inf", "'HONE_LEASE_S': got 'inf'; .* a finite number"),
    ],
)
def test_a_wrong_name_or_value_is_told_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=sentence):
        load_settings()


def test_each_unknown_setting_is_named_and_where_all_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HONE_GPU", "1")
    monkeypatch.setenv("HONE_FOO", "1")  # alike HONE_HOST in nothing but the prefix
    with pytest.raises(BadRequest) as raised:
        load_settings()
    assert raised.value.detail == (
        "unknown setting 'HONE_GPU' in the environment; did you mean 'HONE_GPUS'? "
        "unknown setting 'HONE_FOO' in the environment; `hone explain settings` lists all"
    )


def test_a_password_in_a_url_that_is_none_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_REWARD_URL", "http://me:s3cret@host:99999")
    with pytest.raises(
        BadRequest, match=r"'http://\*\*\*@host:99999' is no URL: port 99999 is beyond 65535;"
    ) as error:
        load_settings()
    assert "s3cret" not in str(error.value.errors)


def test_short_calls_have_a_sixth_of_the_deadline_and_at_least_300_s() -> None:
    assert Settings().short_deadline_s == 600
    assert Settings(operation_deadline_s=7200).short_deadline_s == 1200
    short = Settings(operation_deadline_s=600, generate_deadline_s=60)
    assert short.short_deadline_s == 300


def test_sampling_ends_before_the_samplers_work_on_it_does() -> None:
    with pytest.raises(ValueError, match="expected less than HONE_OPERATION_DEADLINE_S, 3600 s"):
        Settings(generate_deadline_s=3600)
    with pytest.raises(ValueError, match="expected less than HONE_OPERATION_DEADLINE_S, 900 s"):
        Settings(operation_deadline_s=900, generate_deadline_s=900)


def test_sampling_has_half_of_a_short_operation_deadline_by_default() -> None:
    found = [Settings(operation_deadline_s=s).generate_deadline_s for s in (600, 1800, 1801, 3600)]
    assert found == [300, 900, 1800, 1800]


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


@pytest.mark.parametrize("name", ["TOKEN", "REDIS_URL", "JUDGE_API_KEY", "TEACHER_API_KEY"])
def test_a_secret_may_be_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "secret"
    file.write_text("a-secret-word\n")
    monkeypatch.setenv(f"HONE_{name}_FILE", str(file))
    settings = load_settings()
    assert getattr(settings, name.lower()).get_secret_value() == "a-secret-word"
    assert "a-secret-word" in settings.secrets()


def test_a_secrets_file_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("HONE_TOKEN_FILE", str(file))
    with pytest.raises(BadRequest, match=r"HONE_TOKEN_FILE names '.*token', .* No such file"):
        load_settings()
    file.write_text("\n")
    with pytest.raises(BadRequest, match=r"token', which is empty; expected the secret"):
        load_settings()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match=r"token', which cannot be read: it is not text"):
        load_settings()
    file.write_text("secret-token")
    monkeypatch.setenv("HONE_TOKEN", "another-token")
    with pytest.raises(BadRequest, match="HONE_TOKEN and HONE_TOKEN_FILE are both set"):
        load_settings()


def test_secrets_do_not_show_in_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_TOKEN", "secret-token")
    monkeypatch.setenv("HONE_REDIS_URL", "redis://:hidden-word@127.0.0.1/0")
    shown = repr(load_settings())
    assert "secret-token" not in shown and "hidden-word" not in shown


def test_what_opens_the_collector_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue%2Dwhale,api-key: hidden-word")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "Authorization=Bearer%20other-word")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://me:pass%40word@host:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:own-password@host")
    found = Settings().secrets()
    assert {
        "x-team=blue%2Dwhale,api-key: hidden-word",
        "x-team=blue%2Dwhale",
        "blue%2Dwhale",
        "blue-whale",
        "api-key: hidden-word",
        "hidden-word",
        "Authorization=Bearer%20other-word",
        "Authorization=Bearer other-word",
        "Bearer other-word",
        "pass%40word",
        "pass@word",
        "own-password",
    } <= set(found)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://host:4318/a:b")
    assert "4318/a:b" not in Settings().secrets()


def test_each_trainer_has_settings_of_its_own() -> None:
    settings = Settings(
        trainer_url="http://a:1; http://b:2/",
        rollout_url="http://a:3,http://c:4;registered",
        lease_s=7,
    )
    assert [(slot.trainer_url, slot.rollout_urls) for slot in settings.per_trainer] == [
        ("http://a:1", ("http://a:3", "http://c:4")),
        ("http://b:2/", ("registered",)),
    ]
    assert settings.rollout_urls == ("http://a:3", "http://c:4", "registered")
    assert {slot.lease_s for slot in settings.per_trainer} == {7}
    alone = Settings(rollout_url="http://a:1,http://b:1")
    assert alone.per_trainer == (alone,)


@pytest.mark.parametrize(
    ("trainers", "samplers", "said"),
    [
        ("http://a:1;http://b:2", "http://c:3", r"the samplers of 1 trainer\(s\), .* names 2"),
        ("http://a:1", "http://c:3;http://d:4", r"the samplers of 2 trainer\(s\), .* names 1"),
        ("http://a:1;http://b:2", "http://c:3;http://C:3/", "'http://c:3' is there twice"),
        ("http://a:1;http://b:2", "registered;registered", "'registered' is there twice"),
        ("http://a:1;http://a:1/", "http://c:3;http://d:4", "'http://a:1' is there twice"),
        ("http://a:1,http://b:2", "http://c:3", "no URL; .* with semicolons between several"),
        ("http://a:1;http://b:2", "http://c:3;", "no URL; expected for example http://host:8001"),
        ("", "http://c:3", "'' is no URL"),
        ("http://a:x", "http://c:3", "'http://a:x' is no URL"),
    ],
)
def test_trainers_and_samplers_that_do_not_belong_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, trainers: str, samplers: str, said: str
) -> None:
    monkeypatch.setenv("HONE_TRAINER_URL", trainers)
    monkeypatch.setenv("HONE_ROLLOUT_URL", samplers)
    with pytest.raises(BadRequest, match=said):
        load_settings()


@pytest.mark.parametrize(("service", "port"), [("orchestrator", 8000), ("reward", 8003)])
@pytest.mark.parametrize("url", ["localhost:8000", "10.0.0.1:8000", "http://", ""])
def test_an_address_that_is_no_url_is_refused_with_an_example(
    monkeypatch: pytest.MonkeyPatch, service: str, port: int, url: str
) -> None:
    monkeypatch.setenv(f"HONE_{service.upper()}_URL", url)
    said = f"{url!r} is no URL; expected for example http://host:{port}"
    with pytest.raises(BadRequest, match=f"'HONE_{service.upper()}_URL': .*{said}"):
        load_settings()
