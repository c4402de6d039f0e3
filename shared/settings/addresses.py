"""Settings that say where each service is: its URL for callers, its port for itself."""

from __future__ import annotations

from typing import Self

from pydantic import Field, ValidationInfo, field_validator

from shared.http.urls import (
    PORTS,
    check_samplers,
    check_trainers,
    check_url,
    sampler_places,
    trainer_urls,
)
from shared.settings.base import FromEnvironment


class Addresses(FromEnvironment):
    """Where each service is."""

    orchestrator_url: str = f"http://127.0.0.1:{PORTS['orchestrator']}"
    """Where `hone` finds the orchestrator. Not set: the stack that `hone up` started, if one
    runs."""

    trainer_url: str = f"http://127.0.0.1:{PORTS['trainer']}"
    """Where the orchestrator finds the trainer; a trainer of several nodes is at node 0. A sampler
    uses it for `weight_sync` "http", "delta", and "lora" on another machine. The orchestrator takes
    several trainers, with semicolons between them, each with samplers of its own (`rollout_url`):
    so many jobs run at once. Orchestrators that share Redis and a trainer on another machine must
    use the same host name for it, because a job's lease is on the host and port of its trainer and
    its samplers."""

    rollout_url: str = f"http://127.0.0.1:{PORTS['rollout']}"
    """Where the orchestrator finds the samplers, with commas between several places: a URL, or
    "registered", which is every sampler that has `rollout_advertise_url`. Several trainers have
    samplers each, in the order of `trainer_url`, with semicolons between them:
    "http://a:8001,http://b:8001;http://c:8001"."""

    reward_url: str = f"http://127.0.0.1:{PORTS['reward']}"
    """Where the orchestrator and `hone grade` find the reward service."""

    orchestrator_port: int = Field(default=PORTS["orchestrator"], ge=0, le=65535)
    """Port that the orchestrator listens on."""

    rollout_port: int = Field(default=PORTS["rollout"], ge=0, le=65535)
    """Port that the sampler listens on."""

    trainer_port: int = Field(default=PORTS["trainer"], ge=0, le=65535)
    """Port that the trainer listens on."""

    reward_port: int = Field(default=PORTS["reward"], ge=0, le=65535)
    """Port that the reward service listens on."""

    @field_validator("orchestrator_url", "reward_url")
    @classmethod
    def _one(cls, value: str, info: ValidationInfo) -> str:
        service = str(info.field_name).removesuffix("_url")
        check_url(value, f"http://host:{PORTS[service]}")
        return value

    @field_validator("trainer_url")
    @classmethod
    def _trainers(cls, value: str) -> str:
        check_trainers(value)
        return value

    @field_validator("rollout_url")
    @classmethod
    def _samplers(cls, value: str, info: ValidationInfo) -> str:
        if (trainers := info.data.get("trainer_url")) is not None:  # else that is wrong already
            check_samplers(value, trainers)
        return value

    @property
    def rollout_urls(self) -> tuple[str, ...]:
        """The places in `rollout_url`, one by one, of all trainers."""
        return tuple(place for places in sampler_places(self.rollout_url) for place in places)

    @property
    def trainer_urls(self) -> tuple[str, ...]:
        """The trainers in `trainer_url`, one by one."""
        return trainer_urls(self.trainer_url)

    @property
    def slots(self) -> tuple[Self, ...]:
        """A copy of these settings for each trainer, with only that trainer and its samplers."""
        if len(self.trainer_urls) == 1:
            return (self,)
        samplers = sampler_places(self.rollout_url)
        return tuple(
            self.model_copy(update={"trainer_url": trainer, "rollout_url": ",".join(places)})
            for trainer, places in zip(self.trainer_urls, samplers, strict=True)
        )
