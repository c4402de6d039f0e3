"""How sentences call the Hub."""

from __future__ import annotations

import pytest

from services.orchestrator.data.hub import hub_url


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://me:secret@mirror.lan:8443/hf/", "https://mirror.lan:8443/hf"),
        ("https://mirror.lan/a@b", "https://mirror.lan/a@b"),
    ],
)
def test_a_mirror_of_the_hub_is_named_without_its_password(
    endpoint: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert hub_url() == shown
