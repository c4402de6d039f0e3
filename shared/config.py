"""Settings: where the services run, and secrets. From the environment, `HONE_*`, and never sent
over the API.

`load_settings` is called by each process's entry point, never at import. A `HONE_*` variable that
no setting has is an error that names the nearest one, so a misspelt setting cannot be silently
ignored.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.errors import BadRequest
from shared.explain import nearest, sentences

PREFIX = "HONE_"
PORTS = {"orchestrator": 8000, "rollout": 8001, "trainer": 8002, "reward": 8003, "redis": 6379}


class Settings(BaseSettings):
    """Every setting of every service, by the service that reads it. Seconds, MiB and GiB as the
    names say."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    # every service
    host: str = "127.0.0.1"
    token: SecretStr | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    max_body_mib: int = Field(default=1024, gt=0)
    operation_deadline_s: float = Field(default=3600.0, gt=0)
    runs_dir: Path = Path("runs")

    # where each service is, for those that call it and for itself (its port)
    orchestrator_url: str = f"http://127.0.0.1:{PORTS['orchestrator']}"
    rollout_url: str = f"http://127.0.0.1:{PORTS['rollout']}"
    trainer_url: str = f"http://127.0.0.1:{PORTS['trainer']}"
    reward_url: str = f"http://127.0.0.1:{PORTS['reward']}"
    orchestrator_port: int = Field(default=PORTS["orchestrator"], ge=0, le=65535)
    rollout_port: int = Field(default=PORTS["rollout"], ge=0, le=65535)
    trainer_port: int = Field(default=PORTS["trainer"], ge=0, le=65535)
    reward_port: int = Field(default=PORTS["reward"], ge=0, le=65535)

    # orchestrator
    redis_url: SecretStr | None = None
    lease_s: float = Field(default=30.0, gt=0)
    patience_s: float = Field(default=90.0, gt=0)
    generate_deadline_s: float = Field(default=1800.0, gt=0)
    score_deadline_s: float = Field(default=600.0, gt=0)
    train_deadline_s: float = Field(default=3600.0, gt=0)
    sync_deadline_s: float = Field(default=600.0, gt=0)
    start_deadline_s: float = Field(default=1800.0, gt=0)
    max_missing_rewards: float = Field(default=0.5, ge=0, le=1)

    # rollout
    rollout_model: str | None = None
    kv_cache_gib: int = Field(default=1, gt=0)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    shm_dir: Path = Path(f"/dev/shm/hone-{os.getuid()}")

    # trainer: `trainer_ranks` processes on each node (one a GPU), of `trainer_threads` threads.
    # Ranks that die are started again, at most `trainer_restarts` times in ten minutes. On
    # `trainer_nodes` machines this is number `trainer_node_rank`, from 0; they meet at
    # `trainer_rendezvous`, <host>:<port> of node 0, speak over the network `trainer_interface` (a
    # private one: nothing on it is encrypted or asks for a token), and share `runs_dir`. HTTP is on
    # node 0
    trainer_ranks: int = Field(default=1, ge=1)
    trainer_threads: int | None = Field(default=None, ge=1)
    trainer_restarts: int = Field(default=3, ge=0)
    trainer_nodes: int = Field(default=1, ge=1)
    trainer_node_rank: int = Field(default=0, ge=0)
    trainer_rendezvous: str | None = None
    trainer_interface: str | None = None

    # reward
    sandbox: Literal["auto", "local", "modal", "unsafe"] = "auto"
    sandbox_slots: int | None = Field(default=None, ge=1)
    sandbox_packages: Annotated[tuple[str, ...], NoDecode] = ()
    sandbox_image: str | None = None
    allow_job_code: bool = True
    reward_cache_mib: int = Field(default=64, ge=0)
    max_queued_completions: int = Field(default=32_768, ge=1)
    max_queued_programs: int = Field(default=4096, ge=1)
    judge_url: str | None = None
    judge_api_key: SecretStr | None = None

    @field_validator("sandbox_packages", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """In the environment they are one text: "numpy,sympy"."""
        return (
            tuple(name.strip() for name in value.split(",") if name.strip())
            if isinstance(value, str)
            else value
        )

    def bearer(self) -> str | None:
        return self.token.get_secret_value() if self.token else None

    def secrets(self) -> list[str]:
        """Returns the values that must never be logged, stored or sent."""
        named = [os.environ.get(name) for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")]
        own = [
            secret.get_secret_value()
            for secret in (self.token, self.redis_url, self.judge_api_key)
            if secret
        ]
        return [value for value in (*named, *own) if value and len(value) >= 6]


def load_settings() -> Settings:
    """Returns the settings in the environment. Raises BadRequest for an unknown `HONE_*` variable
    or a bad value, and for a host beyond loopback without a token."""
    valid = [PREFIX + name.upper() for name in Settings.model_fields]
    for name in os.environ:
        if name.startswith(PREFIX) and name not in valid:
            raise BadRequest(f"unknown setting {name!r} in the environment; {nearest(name, valid)}")
    try:
        settings = Settings()
    except ValidationError as error:
        faults = sentences(error, Settings, "setting HONE_*")
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error
    if not settings.token and not is_loopback(settings.host):
        raise BadRequest(
            f"HONE_HOST is {settings.host!r} and HONE_TOKEN is not set: without a token a service "
            "listens on this machine only; "
            "set HONE_TOKEN, or HONE_HOST=127.0.0.1"
        )
    return settings


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
