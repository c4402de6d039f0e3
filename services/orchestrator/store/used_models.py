"""The models that jobs begin with: checkpoints of other jobs may be among them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.store.connection import Connection
from services.orchestrator.store.lua import SHARED

USED_MODELS = (
    SHARED
    + """
local found, known = {}, {}
for _, id in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
  local model = is_job(id) and field(id, 'model')
  if model and not known[model] and not has_ended(id) then
    known[model] = true
    found[#found + 1] = {model, id, field(id, 'status')}
  end
end
return cjson.encode(found)
"""
)
"""Returns a list of [model, id, status]: the models of all jobs that have not ended, each with the
oldest such job, as JSON."""


@dataclass(frozen=True)
class Use:
    """The folder of a model, with a job that begins with it and has not ended."""

    path: Path
    job_id: str
    status: str


class UsedModels:
    """Every method raises StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call
        self._find = connection.client.register_script(USED_MODELS)

    async def below(self, folder: Path) -> list[Use]:
        """Returns the models in `folder`, or below, of jobs that have not ended. Links are
        followed."""
        found: list[tuple[str, str, str]] = list(json.loads(await self._call(self._find)))
        return await asyncio.to_thread(_below, folder, found)


def _below(folder: Path, found: list[tuple[str, str, str]]) -> list[Use]:
    folder = folder.resolve()
    uses = [Use(Path(model).resolve(), job_id, status) for model, job_id, status in found]
    return [use for use in uses if use.path.is_relative_to(folder)]
