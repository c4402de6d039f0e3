"""Sessions that sample a snapshot or a base model, and the orders of samples in them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from services.orchestrator.extensions.tinker import mapping, requests
from services.orchestrator.extensions.tinker.log import OperationLog
from services.orchestrator.extensions.tinker.models import MAX_LISTED, Models, is_put_away, read_job
from services.orchestrator.extensions.tinker.paths import SESSION, future_of_samples
from services.orchestrator.extensions.tinker.sampling import SampleOrders
from services.orchestrator.extensions.tinker.saved import Saved
from services.orchestrator.store.lists import Wanted
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import to_disk
from shared.errors import BadRequest, Conflict
from shared.job import Job
from shared.wire import TERMINAL, JobRecord, SampleOrder, SamplingSession


class SamplingSessions:
    """The sessions of samples. Each lies in the run folder of the model that samples for it."""

    def __init__(self, store: Store, models: Models, orders: SampleOrders) -> None:
        self._store = store
        self._models = models
        self._orders = orders

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Opens a session on a snapshot, by its path, or on a base model. The same number of the
        SDK's session is the same session."""
        key = mapping.creation_key(body, "sampling_session_seq_id")
        path, base = requests.field(body, "model_path", str), body.get("base_model")
        if path:
            source, session = await self._snapshot(path)
            if base is not None and base != source.job.model:
                raise BadRequest(
                    f"'base_model': got {base!r:.200}, expected {source.job.model!r}, which the "
                    "snapshot is of"
                )
            sampler = source
            if source.status in TERMINAL:
                document = mapping.sampler_document(body, source.job)
                rank = source.job.lora.rank if source.job.lora else 0
                sampler = await self._sampler(body, document, rank)
        else:
            session = SamplingSession(own_weights=True)
            sampler = await self._sampler(body, mapping.sampler_document(body), 0)
        id = "x" + requests.digest_of(key.encode())[:16]
        await to_disk(OperationLog(Path(sampler.run_dir)).open_session, id, session)
        return {"type": "create_sampling_session", "sampling_session_id": f"{sampler.id}:{id}"}

    async def _snapshot(self, path: str) -> tuple[JobRecord, SamplingSession]:
        """Returns the model of a snapshot's path, and the session that samples the snapshot."""
        record, saved = await self._models.saved(path, "snapshot")
        if record.status in TERMINAL and saved.adapter is None:
            raise Conflict(
                f"the model {record.id!r} is {record.status}, and its snapshot is no adapter that "
                "another model's samplers could take; expected a model that runs"
            )
        return record, SamplingSession(step=saved.step, adapter=saved.adapter, of_path=path)

    async def _sampler(
        self, body: dict[str, Any], document: dict[str, Any], rank: int
    ) -> JobRecord:
        """Returns a model whose samplers have the document's base model, and take adapters of the
        rank: one that the same program has made and not ended, or a new one. A model of another
        program would end when that program likes, and have this one's prompts in its folder."""
        wanted, program = read_job(document), body["session_id"]
        for status in ("running", "queued", "paused"):
            listed = await self._store.list(None, MAX_LISTED, Wanted(status=status))
            for one in listed.jobs:
                if mapping.program_of(one.metadata) != program:
                    continue
                record = await self._store.get(one.id)
                may_run = status != "paused" or is_put_away(record)
                if may_run and _can_sample(record.job, wanted.model, rank):
                    return record
        key = f"tinker:{program}:sampler:{requests.digest_of(repr(document).encode())}"
        while (found := await self._models.submitted(wanted, key)).status in TERMINAL:
            key = f"{key[:200]}:{found.id}"
        return found

    async def get(self, id: str) -> dict[str, Any]:
        """Returns which weights a session samples."""
        record, session, _ = await self._session(id)
        return {
            "sampler_id": id,
            "base_model": record.job.model,
            "model_path": session.of_path,
        }

    async def _session(self, id: str) -> tuple[JobRecord, SamplingSession, str]:
        """Returns the model that samples for a session, the session, and its name there."""
        model_id, _, name = id.rpartition(":")
        if not SESSION.fullmatch(name):
            raise _no_session(id)
        record = await self._models.get(model_id)
        session = await asyncio.to_thread(_stored_session, Path(record.run_dir), name)
        if session is None:
            raise _no_session(id)
        return record, session, name

    async def order(self, body: dict[str, Any]) -> dict[str, Any]:
        """Orders samples. The same number in a session is the same order. Raises Conflict for a
        new order of a model that has ended."""
        number = requests.field(body, "seq_id", int)
        if number is None:
            raise BadRequest("'seq_id' is missing; expected a whole number")
        record, session, name = await self._session(requests.id_of(body, "sampling_session_id"))
        sampling = requests.read_sampling(body)
        order = SampleOrder(
            session=session,
            prompt_token_ids=requests.read_prompt(body),
            sampling=sampling,
            prompt_logprobs=requests.read_prompt_logprobs(body),
            top_prompt_logprobs=requests.read_top(body, "topk_prompt_logprobs"),
            top_logprobs=requests.read_top(body, "topk_sample_logprobs"),
        )
        if name.isdecimal():
            await to_disk(Saved(Path(record.run_dir)).use, int(name))
        log, id = OperationLog(Path(record.run_dir)), f"{name}-{number}"
        if record.status in TERMINAL and await asyncio.to_thread(log.ordered, id) is None:
            raise Conflict(
                f"the model {record.id!r}, which samples for this session, is {record.status}; "
                "expected a session on a model that has not ended: create a new sampling client"
            )
        await to_disk(log.order, id, order)
        self._orders.carry_out(record.id, id, log)
        return {
            "request_id": future_of_samples(record.id, id),
            "model_id": record.id,
            "sample_sequence_ids": [f"{record.id}:{id}:{each}" for each in range(sampling.n)],
        }


def _can_sample(job: Job, base_model: str, rank: int) -> bool:
    """Whether the samplers of a program's model have the base model, and take adapters of the
    rank."""
    is_fit = job.is_program and job.model == base_model
    return is_fit and job.served_rank is not None and job.served_rank >= rank


def _stored_session(run: Path, name: str) -> SamplingSession | None:
    """Returns the session of that name. The number of a snapshot is a session too."""
    if not name.isdecimal():
        return OperationLog(run).session(name)
    found = (one for one in Saved(run).all() if one.number == int(name) and one.kind == "snapshot")
    saved = next(found, None)
    return saved and SamplingSession(step=saved.step, adapter=saved.adapter)


def _no_session(id: str) -> BadRequest:
    return BadRequest(
        f"'sampling_session_id': got {id!r:.120}; expected a session of this server whose snapshot "
        "still exists"
    )
