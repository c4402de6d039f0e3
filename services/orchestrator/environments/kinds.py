"""What each kind of `[environment]` is."""

from __future__ import annotations

from services.orchestrator.environments.environment import Environment
from services.orchestrator.environments.images import Containers
from services.orchestrator.environments.openenv import OpenEnv
from services.orchestrator.environments.sandboxed import Sandboxed
from services.orchestrator.environments.tools import Tools
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import Fenced


def environment_of(
    spec: EnvironmentSpec, own: Sandboxed, settings: Settings, who: Fenced, identity: str | None
) -> Environment | None:
    """Returns the environment of an attempt, `who`, in the Redis with `identity`. `own` runs what
    the job brings along. None: agents that run elsewhere have their own."""
    if spec.kind == "openenv":
        containers = Containers(spec, settings, who, identity) if spec.image else None
        return OpenEnv(spec, settings, containers)
    mine = own if spec.has_file else None
    return Tools(spec, settings, mine) if spec.mcp else mine
