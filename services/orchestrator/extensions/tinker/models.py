"""The models that programs drive: made, found by id, and described."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from services.orchestrator import errors
from services.orchestrator.api.checking import Checks
from services.orchestrator.api.jobs import check_job
from services.orchestrator.extensions.tinker import mapping
from services.orchestrator.extensions.tinker.mapping import adapter_of
from services.orchestrator.extensions.tinker.paths import future_of, read_path
from services.orchestrator.extensions.tinker.requests import id_of
from services.orchestrator.extensions.tinker.saved import Saved
from services.orchestrator.store.lists import Wanted
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import accept, accepted
from services.orchestrator.store.store import Store
from services.orchestrator.store.writable import Writable
from shared.errors import NotFound
from shared.http.gate import scoped
from shared.job import Job
from shared.job.file import parse_job
from shared.settings import Settings
from shared.wire import JobRecord, SavedKind, SavedWeights

MAX_LISTED = 100
"""How many of the newest jobs are looked at for base models, or for a model that may sample."""


class Models:
    """The models of a store. A model is a job of the objective "program"."""

    def __init__(
        self, settings: Settings, store: Store, writable: Writable, checks: Checks
    ) -> None:
        self._settings = settings
        self._store = store
        self._writable = writable
        self._checks = checks

    async def get(self, model_id: str) -> JobRecord:
        """Returns the model's record. Raises NotFound for any other id."""
        record = await self._store.get(await self._job_id(model_id))
        if not record.job.is_program:
            raise NotFound(
                f"job {record.id!r} has the objective {record.job.training.objective!r}; expected "
                "'program'"
            )
        return record

    async def _job_id(self, model_id: str) -> str:
        """Returns the job of a model's id, which the SDK may have made of the session's."""
        if ":train:" not in model_id:
            return model_id
        wanted = Wanted(metadata={mapping.MODEL: model_id})
        listed = (await self._store.list(None, 1, wanted)).jobs
        if not listed:
            raise NotFound(f"there is no model {model_id!r:.200}")
        return listed[0].id

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the model as a job. The same model of a session is the same job."""
        return await self._created(body, mapping.job_document(body))

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits a model that begins with a checkpoint, as a job."""
        source, checkpoint = await self.saved(body.get("path"), "checkpoint")
        return await self._created(body, mapping.loaded_document(body, source.job, checkpoint.path))

    async def _created(self, body: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
        document = document | {"metadata": mapping.metadata(body)}
        key = f"tinker:{mapping.creation_key(body, 'model_seq_id')}"
        record = await self.submitted(read_job(document), key)
        return {"request_id": future_of(record.id, 0), "model_id": record.id}

    async def submitted(self, job: Job, key: str) -> JobRecord:
        """Returns the job's record. The same key is the same job, of the caller's API key."""
        key = scoped(key)
        record = await accepted(self._store, job, key)
        if record is None:
            await self._writable.check()
            looked = await check_job(job, self._settings, self._checks)
            submission = Submission(
                job, self._settings.runs_dir, key, looked.versions, job, looked.warnings
            )
            record = await accept(self._store, submission)
        return record

    async def saved(self, path: Any, kind: SavedKind) -> tuple[JobRecord, SavedWeights]:
        """Returns the model of a path `tinker://MODEL/PART/NAME`, and what it saved under the
        name. Raises BadRequest for any other path, and NotFound."""
        model_id, name = read_path(path, kind)
        record = await self.get(model_id)
        saved = await asyncio.to_thread(Saved(Path(record.run_dir)).find, kind, name)
        if saved is None:
            raise NotFound(f"the model {record.id!r} has no {kind} {name!r}")
        return record, saved

    async def info(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns what the SDK asks of a model: its base model, tokenizer and adapter."""
        record = await self.get(id_of(body, "model_id"))
        return {
            "type": "get_info",
            "model_id": record.id,
            "model_data": {"model_name": record.job.model, "tokenizer_id": record.job.model},
            "model_name": record.job.model,
            **adapter_of(record.job),
        }

    async def weights_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns what a new model needs to begin with a checkpoint: base model and adapter."""
        record, _ = await self.saved(body.get("tinker_path"), "checkpoint")
        return {"base_model": record.job.model, **adapter_of(record.job)}

    async def capabilities(self) -> dict[str, Any]:
        """Returns the base models of the newest jobs: any other one may be named too."""
        names = {one.model: None for one in (await self._store.list(None, MAX_LISTED)).jobs}
        able = {"trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **able} for name in names]}


def read_job(document: dict[str, Any]) -> Job:
    return parse_job(document, "the model asked for")


def is_put_away(record: JobRecord) -> bool:
    """Whether the model made room for another job, and its next operation brings it back."""
    return record.status == "paused" and errors.is_put_away(record.error)
