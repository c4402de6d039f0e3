"""What each kind of `[environment]` is."""

from __future__ import annotations

from services.orchestrator.extensions.environments.openenv import OpenEnv
from services.orchestrator.extensions.environments.sandboxed import Sandboxed
from services.orchestrator.extensions.environments.tools import Tools
from services.orchestrator.seams import Environment
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings


def environment_of(
    job: Job, job_id: str, reward: Client, patience_s: float | None, settings: Settings
) -> Environment | None:
    """Returns the environment of a job. What the job brings along runs in the reward service, which
    is waited for `patience_s` seconds. None: agents that run elsewhere have their own."""
    spec = job.environment
    assert spec is not None
    if spec.kind == "openenv":
        return OpenEnv(spec, settings)
    attributes = any("environments" in (each.source or "") for each in job.rewards)
    own = Sandboxed(reward, job_id, spec, patience_s, attributes=attributes)
    mine = own if spec.has_file else None
    return Tools(spec, settings, mine) if spec.mcp else mine
