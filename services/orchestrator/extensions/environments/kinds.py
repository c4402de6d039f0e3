"""What each kind of `[environment]` is."""

from __future__ import annotations

from services.orchestrator.environment import Environment
from services.orchestrator.extensions.environments.openenv import OpenEnv
from services.orchestrator.extensions.environments.sandboxed import Sandboxed
from services.orchestrator.extensions.environments.tools import Tools
from shared.job import EnvironmentSpec
from shared.settings import Settings


def environment_of(spec: EnvironmentSpec, own: Sandboxed, settings: Settings) -> Environment | None:
    """Returns the environment of a job. `own` runs what the job brings along. None: agents that
    run elsewhere have their own."""
    if spec.kind == "openenv":
        return OpenEnv(spec, settings)
    mine = own if spec.has_file else None
    return Tools(spec, settings, mine) if spec.mcp else mine
