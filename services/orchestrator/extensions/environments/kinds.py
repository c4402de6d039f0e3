"""Makes the `Environment` of each kind of `[environment]`. And the kinds "class" and "tools", whose
code comes from the job's own file and runs in the reward service's sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from services.orchestrator.extensions.environments.openenv import OpenEnv
from services.orchestrator.extensions.environments.tools import Tools
from services.orchestrator.seams import Environment
from shared.http.client import Client
from shared.job import EnvironmentSpec, Job
from shared.settings import Settings
from shared.wire import (
    CloseEpisode,
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOf,
    EpisodeOpened,
    EpisodeStepped,
    OpenEpisode,
    StepEpisode,
    ToolCall,
    ValidateEnvironment,
)

EPISODE_ROOM_S = 150.0
"""Seconds that a call of an environment may take beyond its own limit, in which its sandbox starts
and the job's file is loaded."""

R = TypeVar("R", bound=BaseModel)


@dataclass
class SandboxEnvironment:
    """Episodes of a job in the reward service. `client` waits for an unreachable service for
    `patience_s` seconds. `attributes`: reward functions need the environments' attributes."""

    client: Client
    job_id: str
    spec: EnvironmentSpec
    patience_s: float | None
    attributes: bool
    service: str = "reward"

    async def open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        body = OpenEpisode(**self._episode(id), row=dict(row))
        return await self._call("open", body, EpisodeOpened, self.spec.boot_s)

    async def step(self, id: str, turn: int, calls: tuple[ToolCall, ...]) -> EpisodeStepped:
        body = StepEpisode(**self._episode(id), turn=turn, calls=calls)
        return await self._call("step", body, EpisodeStepped, self.spec.step_s)

    async def close(self, id: str, *, rewarded: bool) -> EpisodeClosed:
        body = CloseEpisode(
            **self._episode(id), rewarded=rewarded, attributes=self.attributes and rewarded
        )
        return await self._call("close", body, EpisodeClosed, self.spec.step_s)

    def drop(self, id: str) -> None:
        """Does nothing: the service ends an episode that gets no request for `episode_s`."""

    async def validate(self, row: Mapping[str, Any]) -> EnvironmentValidated:
        return await self.client.call(
            "POST",
            "/episodes/validate",
            ValidateEnvironment(environment=self.spec, row=dict(row)),
            EnvironmentValidated,
            deadline_s=self.spec.boot_s + EPISODE_ROOM_S,
        )

    async def shut(self) -> None:
        """Does nothing: the service ends episodes automatically."""

    async def _call(self, verb: str, body: EpisodeOf, result: type[R], limit_s: float) -> R:
        return await self.client.call(
            "POST",
            f"/episodes/{verb}",
            body,
            result,
            deadline_s=limit_s + EPISODE_ROOM_S,
            patience_s=self.patience_s,
        )

    def _episode(self, id: str) -> dict[str, Any]:
        return {"job_id": self.job_id, "environment": self.spec, "id": id}


def environment_of(
    job: Job, job_id: str, reward: Client, patience_s: float | None, settings: Settings
) -> Environment | None:
    """Returns the environment of a job; None if its agents run elsewhere and have their own. The
    job's own code runs in the reward service, for which calls wait up to `patience_s` seconds."""
    spec = job.environment
    assert spec is not None
    if spec.kind == "openenv":
        return OpenEnv(spec, settings)
    attributes = any("environments" in (each.source or "") for each in job.rewards)
    own = SandboxEnvironment(reward, job_id, spec, patience_s, attributes)
    mine = own if spec.has_file else None
    return Tools(spec, settings, mine) if spec.mcp else mine
