"""The models that jobs begin with or evaluate: checkpoints of other jobs may be among them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.store.connection import Connection


@dataclass(frozen=True)
class Use:
    """The folder of a model, with a job that uses it and has not ended."""

    path: Path
    job_id: str
    status: str


class UsedModels:
    """Every method raises StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def below(self, folder: Path) -> list[Use]:
        """Returns the models in `folder`, or below, of jobs that have not ended. Links are
        followed."""
        found: list[tuple[str, str, str]] = list(json.loads(await self._call("used_models")))
        return await asyncio.to_thread(_below, folder, found)


def _below(folder: Path, found: list[tuple[str, str, str]]) -> list[Use]:
    folder = folder.resolve()
    uses = [Use(Path(model).resolve(), job_id, status) for model, job_id, status in found]
    return [use for use in uses if use.path.is_relative_to(folder)]
