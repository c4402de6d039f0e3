"""All settings together, and which of their values are secrets."""

from __future__ import annotations

import os
from urllib.parse import unquote

from shared.settings.base import split
from shared.settings.caller import CallerSettings
from shared.settings.modal import ModalSettings
from shared.settings.orchestrator import OrchestratorSettings
from shared.settings.reward import RewardSettings
from shared.settings.rollout import RolloutSettings
from shared.settings.trainer import TrainerSettings

OTEL_KINDS = ("", "TRACES_")
"""OpenTelemetry's variables for all that it exports, and for traces alone."""


# pydantic takes the fields of the last base first
class Settings(
    ModalSettings,
    RewardSettings,
    TrainerSettings,
    RolloutSettings,
    OrchestratorSettings,
    CallerSettings,
):
    """Every setting of every service, by the service that reads it. In the environment a setting is
    `HONE_` and its name in capitals. The text under a setting is its documentation, which `hone
    explain` shows."""

    def secrets(self) -> list[str]:
        """Returns the values that must never be logged, stored or sent."""
        named = [os.environ.get(name) for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")]
        own = [
            secret.get_secret_value()
            for secret in (self.token, self.redis_url, self.judge_api_key, self.modal_secret)
            if secret
        ]
        found = (*named, *own, *_otel_secrets(self.otel_endpoint))
        return [value for value in found if value and len(value) >= 6]


def _otel_secrets(endpoint: str | None) -> list[str]:
    """Returns the collector's secrets that OpenTelemetry's exporter may log: it shows headers that
    it cannot parse."""
    headers = [os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}HEADERS", "") for kind in OTEL_KINDS]
    parts = [part for text in headers for part in (text, *split(text))]
    values = [part.partition(mark)[2].strip() for part in parts for mark in "=:"]
    found = [*parts, *values, *map(unquote, (*parts, *values))]
    urls = [os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT", "") for kind in OTEL_KINDS]
    for url in (*urls, endpoint or ""):
        user, _, host = url.rpartition("@")
        password = user.partition("://")[2].partition(":")[2] if host else ""
        found += [password, unquote(password)]
    return sorted(found, key=len, reverse=True)  # the longest first: others are parts of it
