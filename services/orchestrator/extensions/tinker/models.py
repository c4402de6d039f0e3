"""The models of programs: creates, finds and describes them; accepts their operations, each on disk
before the id of its future is returned; returns the results; and opens sessions that sample saved
weights."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi.responses import JSONResponse, Response

from services.orchestrator.data.choosing import length_limit
from services.orchestrator.extensions.tinker import messages, requests
from services.orchestrator.extensions.tinker.driving import SampleOrders
from services.orchestrator.extensions.tinker.log import (
    MAX_OPERATIONS,
    NUMBER,
    SAMPLE,
    SESSION,
    OperationLog,
    PendingQuota,
    SavedFolder,
    future_of,
    read_name,
    read_path,
)
from services.orchestrator.extensions.tinker.requests import adapter_of, id_of
from services.orchestrator.jobs.preflight import Submissions
from services.orchestrator.store.lists import JobFilter
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import write_despite_cancel
from shared.errors import BadRequest, Busy, Conflict, NotFound
from shared.http.gate import caller_name, scope_key
from shared.job import Job
from shared.job.file import parse_job
from shared.wire import (
    TERMINAL,
    JobRecord,
    JobSummary,
    ProgramOperation,
    SampleOrder,
    SamplingSession,
    SavedKind,
    SavedWeights,
)

Scope = Literal["owned", "accessible"]
"""Which models are meant: the caller's own, or all that it may use."""

MAX_LISTED = 100
"""How many of the newest jobs are searched for base models, or for a model that may sample."""


class Models:
    """The models of a store. A model is a job with the objective "program"."""

    def __init__(self, store: Store, submissions: Submissions) -> None:
        self._store, self._submissions = store, submissions

    async def get(self, model_id: str, scope: Scope = "accessible") -> JobRecord:
        """Returns the model's record. Raises NotFound for any other id."""
        record = await self._store.get(await self._job_id(model_id))
        if scope == "owned" and (record.submitted_by or "") != caller_name():
            owner = record.submitted_by or "HONE_TOKEN"
            raise NotFound(
                f"the model {model_id!r:.200} belongs to {owner!r}; expected one of your own, or "
                "the access_scope 'accessible'"
            )
        if not record.job.is_program:
            raise NotFound(
                f"job {record.id!r} has the objective {record.job.training.objective!r}; expected "
                "'program'"
            )
        return record

    async def _job_id(self, model_id: str) -> str:
        """Returns the job of a model's id, which the SDK may have derived from the session's id."""
        if ":train:" not in model_id:
            return model_id
        wanted = JobFilter(metadata={requests.MODEL: model_id}, by_caller=True)
        listed = (await self._store.list(None, 1, wanted)).jobs
        if not listed:
            raise NotFound(f"there is no model {model_id!r:.200}")
        return listed[0].id

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the model as a job. The same model of a session gets the same job."""
        return await self._created(body, requests.job_document(body))

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits a model that begins with a checkpoint, as a job."""
        source, checkpoint = await self.saved(body.get("path"), "checkpoint")
        return await self._created(
            body, requests.loaded_document(body, source.job, checkpoint.path)
        )

    async def _created(self, body: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
        document = document | {"metadata": requests.metadata(body)}
        key = f"tinker:{requests.creation_key(body, 'model_seq_id')}"
        record = await self.submitted(read_job(document), key)
        return {"request_id": future_of(record.id, 0), "model_id": record.id}

    async def submitted(self, job: Job, key: str) -> JobRecord:
        """Returns the job's record. The same key is the same job, of the caller's API key."""
        record, _ = await self._submissions.submit(job, scope_key(key))
        return record

    async def saved(self, path: Any, kind: SavedKind) -> tuple[JobRecord, SavedWeights]:
        """Returns the model of a path `tinker://MODEL/PART/NAME`, and the weights that it saved
        under the name. Raises BadRequest for any other path, and NotFound."""
        model_id, name = read_path(path, kind)
        record = await self.get(model_id)
        saved = await asyncio.to_thread(SavedFolder(Path(record.run_dir)).find, kind, name)
        if saved is None:
            raise NotFound(f"the model {record.id!r} has no {kind} {name!r}")
        return record, saved

    async def info(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the SDK's description of a model: its base model, tokenizer and adapter."""
        record = await self.get(id_of(body, "model_id"))
        return {
            "type": "get_info",
            "model_id": record.id,
            "model_data": {"model_name": record.job.model, "tokenizer_id": record.job.model},
            "model_name": record.job.model,
            **adapter_of(record.job),
        }

    async def weights_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the base model and adapter that a model must have to begin with a checkpoint."""
        record, _ = await self.saved(body.get("tinker_path"), "checkpoint")
        return {"base_model": record.job.model, **adapter_of(record.job)}

    async def capabilities(self) -> dict[str, Any]:
        """Returns the base models of the newest jobs; a program may also name any other one."""
        names = {one.model: None for one in (await self._store.list(None, MAX_LISTED)).jobs}
        able = {"trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **able} for name in names]}


PAGE = 100


async def models_of(store: Store, scope: Scope = "accessible") -> AsyncIterator[JobSummary]:
    """Yields the models that programs made, newest first."""
    wanted, after = JobFilter(by_caller=scope == "owned"), None
    while True:
        page = await store.list(after, PAGE, wanted)
        for one in page.jobs:
            if requests.MODEL in one.metadata:
                yield one
        after = page.next_after
        if after is None:
            return


def read_job(document: dict[str, Any]) -> Job:
    return parse_job(document, "the model asked for")


def is_preempted_model(record: JobRecord) -> bool:
    """Whether the model was preempted by another job, and continues with its next operation."""
    return record.pause_reason == "preempted"


MAX_AHEAD = 1000
"""How far a number may be ahead of the newest: the SDK sends a few at a time, in any order."""

OperationReader = Callable[[Job], ProgramOperation]


class Operations:
    """Accepts operations of the models."""

    def __init__(self, store: Store, models: Models, quota: PendingQuota) -> None:
        self._store = store
        self._models = models
        self._quota = quota

    async def forward_backward(self, message: Any, digest: str) -> dict[str, Any]:
        """Accepts a call, and returns the id of its future. Raises BadRequest."""

        def read(job: Job) -> ProgramOperation:
            return requests.read_forward_backward(message, digest, length_limit(job))

        return await self._accept(message.model_id, message.seq_id, digest, read)

    async def optim_step(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        """Accepts an optimizer step, and returns the id of its future. Raises BadRequest."""
        return await self._numbered(body, digest, lambda _: requests.read_optim_step(body, digest))

    async def save(self, body: dict[str, Any], digest: str, kind: SavedKind) -> dict[str, Any]:
        """Accepts a request to save weights. Returns the id of its future. Raises BadRequest."""

        def read(_: Job) -> ProgramOperation:
            is_unnamed = kind == "snapshot" and body.get("path") is None
            name = "" if is_unnamed else read_name(body.get("path"))
            return ProgramOperation(
                kind=kind, digest=digest, name=name, ttl_s=requests.read_ttl(body)
            )

        return await self._numbered(body, digest, read)

    async def refuse_load(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        """Refuses to load a checkpoint into an existing model. Raises BadRequest."""

        def refuse(_: Job | None = None) -> ProgramOperation:
            raise BadRequest(
                f"{body.get('path')!r:.200} cannot be loaded into an existing model; expected "
                "a new model: create_training_client_from_state, or ..._with_optimizer"
            )

        if body.get("model_id") is None:
            refuse()
        return await self._numbered(body, digest, refuse)

    async def unload(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        """Accepts the operation that ends the model, after all operations so far, and returns the
        id of its future. A repeated request gets the same future."""
        record = await self._models.get(requests.id_of(body, "model_id"))
        log = OperationLog(Path(record.run_dir))
        operation = ProgramOperation(kind="unload", digest=digest)
        while True:
            if (end := await asyncio.to_thread(log.end)) is not None:
                return {"request_id": future_of(record.id, end), "model_id": record.id}
            newest = await asyncio.to_thread(log.newest)
            try:
                return await self._accept(record.id, newest + 1, digest, lambda _: operation)
            except Conflict as error:
                if error.code != "body_differs":
                    # otherwise another operation has arrived meanwhile
                    raise

    async def _numbered(
        self, body: dict[str, Any], digest: str, read: OperationReader
    ) -> dict[str, Any]:
        model_id = requests.id_of(body, "model_id")
        return await self._accept(model_id, body.get("seq_id"), digest, read)

    async def _accept(
        self, model_id: str, number: Any, digest: str, read: OperationReader
    ) -> dict[str, Any]:
        """Accepts the operation. If it cannot be read, its number is recorded as refused, so that
        later operations do not wait for it."""
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if not is_whole or not 1 <= number <= MAX_OPERATIONS:
            raise BadRequest(
                f"'seq_id': got {number!r:.40}; expected a whole number from 1 to {MAX_OPERATIONS}"
            )
        record = await self._models.get(model_id)
        if record.status in TERMINAL:
            raise Conflict(f"the model {model_id!r} is {record.status}; expected one that runs")
        log = OperationLog(Path(record.run_dir))
        await asyncio.to_thread(_check_near, log, number)
        await asyncio.to_thread(self._quota.check, caller_name(), log, f"{number:08}")
        try:
            operation = await asyncio.to_thread(read, record.job)
        except BadRequest as error:
            await write_despite_cancel(log.refuse, number, digest, error.detail)
            raise
        await write_despite_cancel(log.accept, number, operation)
        await asyncio.to_thread(self._quota.note, caller_name(), log, f"{number:08}")
        if is_preempted_model(record):
            await self._store.resume_preempted(record.id)
        return {"request_id": future_of(record.id, number), "model_id": record.id}


def _check_near(log: OperationLog, number: int) -> None:
    """Raises BadRequest for a number far ahead of all that have arrived."""
    if log.operation(number - 1) is None and number > (newest := log.newest()) + MAX_AHEAD:
        raise BadRequest(
            f"'seq_id': got {number}, and the model's newest operation is {newest}; expected at "
            f"most {newest + MAX_AHEAD}"
        )


POLL_S = 0.05
"""Seconds between two checks for a result."""

WAIT_S = 20.0
"""Seconds that a request for a future's result waits for it; the SDK's deadline is 45."""

PROTOBUF = "application/x-protobuf"


MAX_WAITING = 2048
"""Most requests of one API key that wait for futures at a time."""

MAX_LOOKS_PER_S = 500
"""Most checks for results per second of all watchers together: each takes a thread. All API keys
that wait for futures have the same share."""

RECORD_S = 0.5
"""Seconds between two reads of the model's record by a watcher."""


@dataclass
class Watch:
    """The task that checks for the result of one future, and how many requests wait for it."""

    task: asyncio.Task[Response]
    num_waiting: int = 0


class Futures:
    """The futures of the models' accepted operations and orders."""

    def __init__(self, store: Store, models: Models, orders: SampleOrders) -> None:
        self._store = store
        self._models = models
        self._orders = orders
        self._watches: dict[str, Watch] = {}
        self._waiting: Counter[str] = Counter()
        self._watching: Counter[str] = Counter()  # watched futures, by API key

    async def retrieve(self, body: dict[str, Any]) -> Response:
        """Returns the result of a future, or 408 while there is none. All requests for one future
        share one watcher."""
        id, who = requests.id_of(body, "request_id"), caller_name()
        if self._waiting[who] >= MAX_WAITING:
            raise Busy(
                f"{self._waiting[who]} requests wait for futures already; expected at most "
                f"{MAX_WAITING} at a time: ask again"
            )
        self._waiting[who] += 1
        try:
            return await self._awaited(id, await self._models.get(id.partition(":")[0]))
        finally:
            self._waiting -= Counter([who])

    async def _awaited(self, id: str, record: JobRecord) -> Response:
        watch = self._watches.get(id)
        if watch is None:
            watch = self._watches[id] = Watch(asyncio.create_task(self._watched(id, record)))
            self._watching[who := caller_name()] += 1
            watch.task.add_done_callback(lambda _: self._watching.subtract([who]))
        watch.num_waiting += 1
        try:
            await asyncio.wait({watch.task}, timeout=WAIT_S)
        finally:
            watch.num_waiting -= 1
            if not watch.num_waiting:
                watch.task.cancel()
            if self._watches.get(id) is watch and not watch.num_waiting:
                del self._watches[id]
        if watch.task.done():
            found = watch.task.result()
            return Response(found.body, found.status_code, media_type=found.media_type)
        record = await self._models.get(record.id)
        state = {"type": "try_again", "request_id": id, **_queue_state(record)}
        return JSONResponse(state, 408)

    async def _watched(self, id: str, record: JobRecord) -> Response:
        """Returns the result of a future once there is one."""
        model_id, _, rest = id.partition(":")
        log, record_due_at = OperationLog(Path(record.run_dir)), time.monotonic() + RECORD_S
        while (found := await self._result(record, log, rest)) is None:
            await asyncio.sleep(self._pause_s(caller_name()))
            if time.monotonic() > record_due_at:
                record = await self._models.get(model_id)
                record_due_at = time.monotonic() + RECORD_S
        return found

    def _pause_s(self, who: str) -> float:
        """Returns the seconds between two checks of a future of an API key."""
        num_keys = sum(num > 0 for num in self._watching.values())
        return max(POLL_S, self._watching[who] * num_keys / MAX_LOOKS_PER_S)

    async def _result(self, record: JobRecord, log: OperationLog, rest: str) -> Response | None:
        if rest == "0":
            kind = "load_weights" if record.job.training.start_from else "create_model"
            return JSONResponse({"type": kind, "model_id": record.id})
        found: Response | None = None
        if order := SAMPLE.fullmatch(rest):
            found = await self._sample_result(record, log, order[1])
        elif NUMBER.fullmatch(rest):
            found = await asyncio.to_thread(_operation_result, record.id, log, int(rest))
        else:
            raise NotFound(f"there is no request {record.id}:{rest}")
        if found is None and is_preempted_model(record):
            await self._store.resume_preempted(record.id)
        elif found is None and _is_over(record):
            why = f"the model {record.id!r} is {record.status}: {record.error or 'it has ended'}"
            return _failed(why, user=False)
        return found

    async def _sample_result(
        self, record: JobRecord, log: OperationLog, id: str
    ) -> Response | None:
        order = await asyncio.to_thread(log.ordered, id)
        if order is None:
            raise NotFound(f"the model {record.id!r} has no samples {id!r}")
        samples = await asyncio.to_thread(log.samples, id)
        if samples is None:
            self._orders.carry_out(record.id, id, log)
            return None
        if samples.group is None or samples.error:
            return _failed(samples.error or "there are no samples", user=True)
        return Response(messages.sample_response(order, samples.group), media_type=PROTOBUF)


def _is_over(record: JobRecord) -> bool:
    """Whether the model has ended, or is paused for an error that needs operator action."""
    return record.pause_reason == "error" or record.status in TERMINAL


def _queue_state(record: JobRecord) -> dict[str, Any]:
    """Returns the state that the SDK logs for a model that waits for long."""
    if record.status == "running":
        return {"queue_state": "active"}
    if record.status == "paused" and not is_preempted_model(record):
        reason = f"it was paused on request; `hone resume {record.id}` continues it"
    else:
        reason = "it waits for a place on the trainer"
    return {"queue_state": "paused_capacity", "queue_state_reason": reason}


def _operation_result(model_id: str, log: OperationLog, number: int) -> Response | None:
    operation, outcome = log.operation(number), log.outcome(number)
    if operation is None:
        raise NotFound(f"the model {model_id!r} has no operation {number}, or no longer has it")
    if outcome is None:
        return None
    if outcome.error is not None:
        return _failed(outcome.error, user=True)
    if operation.kind in ("forward", "forward_backward"):
        found = messages.forward_backward_output(operation, outcome)
        return Response(found, media_type=PROTOBUF)
    return JSONResponse(messages.json_result(model_id, number, operation, outcome))


def _failed(error: str, *, user: bool) -> Response:
    return JSONResponse({"error": error, "category": "user" if user else "server"})


class SamplingSessions:
    """Sessions of samples, each stored in the run folder of the model that samples for it."""

    def __init__(
        self, store: Store, models: Models, orders: SampleOrders, quota: PendingQuota
    ) -> None:
        self._store = store
        self._models = models
        self._orders = orders
        self._quota = quota

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Opens a session on a snapshot, by its path, or on a base model. The same number in the
        SDK's session gets the same session."""
        key = requests.creation_key(body, "sampling_session_seq_id")
        path, base = requests.field(body, "model_path", str), body.get("base_model")
        if path:
            source, session = await self._snapshot(path)
            if base is not None and base != source.job.model:
                raise BadRequest(
                    f"'base_model': got {base!r:.200}, expected {source.job.model!r}, the "
                    "snapshot's base model"
                )
            sampler = source
            if source.status in TERMINAL:
                document = requests.sampler_document(body, source.job)
                rank = source.job.lora.rank if source.job.lora else 0
                sampler = await self._sampler(body, document, rank)
        else:
            session = SamplingSession(own_weights=True)
            sampler = await self._sampler(body, requests.sampler_document(body), 0)
        id = "x" + requests.digest_of(key.encode())[:16]
        await write_despite_cancel(OperationLog(Path(sampler.run_dir)).open_session, id, session)
        return {"type": "create_sampling_session", "sampling_session_id": f"{sampler.id}:{id}"}

    async def _snapshot(self, path: str) -> tuple[JobRecord, SamplingSession]:
        """Returns the model of a snapshot's path, and the session that samples the snapshot."""
        record, saved = await self._models.saved(path, "snapshot")
        if record.status in TERMINAL and saved.adapter is None:
            raise Conflict(
                f"the model {record.id!r} is {record.status}, and its snapshot is not an adapter, "
                "so samplers of another model cannot serve it; expected a model that runs"
            )
        return record, SamplingSession(step=saved.step, adapter=saved.adapter, of_path=path)

    async def _sampler(
        self, body: dict[str, Any], document: dict[str, Any], rank: int
    ) -> JobRecord:
        """Returns a model whose samplers have the document's base model, and serve adapters of the
        rank: one that the same program has created and not ended, or a new one. Not a model of
        another program, which may end it at any time, and its folder would contain this program's
        prompts."""
        wanted, program = read_job(document), body["session_id"]
        for status in ("running", "queued", "paused"):
            listed = await self._store.list(
                None, MAX_LISTED, JobFilter(status=status, by_caller=True)
            )
            for one in listed.jobs:
                if requests.program_of(one.metadata) != program:
                    continue
                record = await self._store.get(one.id)
                may_run = status != "paused" or is_preempted_model(record)
                if may_run and _can_sample(record.job, wanted.model, rank):
                    return record
        key = f"tinker:{program}:sampler:{requests.digest_of(repr(document).encode())}"
        while (found := await self._models.submitted(wanted, key)).status in TERMINAL:
            key = f"{key[:200]}:{found.id}"
        return found

    async def get(self, id: str) -> dict[str, Any]:
        """Returns the weights that a session samples."""
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
        """Orders samples. The same number in a session gets the same order. Raises Conflict for a
        new order of a model that has ended."""
        number = requests.field(body, "seq_id", int)
        if number is None:
            raise BadRequest("'seq_id' is missing; expected a whole number")
        record, session, name = await self._session(requests.id_of(body, "sampling_session_id"))
        sampling = requests.read_sampling(body)
        limit = await asyncio.to_thread(length_limit, record.job)
        order = SampleOrder(
            session=session,
            prompt_token_ids=requests.check_prompt(requests.read_prompt(body), limit),
            sampling=sampling,
            prompt_logprobs=requests.read_prompt_logprobs(body),
            top_prompt_logprobs=requests.read_top(body, "topk_prompt_logprobs"),
            top_logprobs=requests.read_top(body, "topk_sample_logprobs"),
        )
        if name.isdecimal():
            await write_despite_cancel(SavedFolder(Path(record.run_dir)).use, int(name))
        log, id = OperationLog(Path(record.run_dir)), f"{name}-{number}"
        if record.status in TERMINAL and await asyncio.to_thread(log.ordered, id) is None:
            raise Conflict(
                f"the model {record.id!r}, which samples for this session, is {record.status}; "
                "expected a session on a model that has not ended: create a new sampling client"
            )
        await asyncio.to_thread(self._quota.check, caller_name(), log, f"sample-{id}")
        await write_despite_cancel(log.order, id, order)
        await asyncio.to_thread(self._quota.note, caller_name(), log, f"sample-{id}")
        self._orders.carry_out(record.id, id, log)
        return {
            "request_id": f"{record.id}:sample:{id}",
            "model_id": record.id,
            "sample_sequence_ids": [f"{record.id}:{id}:{each}" for each in range(sampling.n)],
        }


def _can_sample(job: Job, base_model: str, rank: int) -> bool:
    """Whether the samplers of a program's model have the base model, and serve adapters of the
    rank."""
    is_fit = job.is_program and job.model == base_model
    return is_fit and job.served_rank is not None and job.served_rank >= rank


def _stored_session(run: Path, name: str) -> SamplingSession | None:
    """Returns the session of that name. The number of a snapshot is a session too."""
    if not name.isdecimal():
        return OperationLog(run).session(name)
    saved = SavedFolder(run).all()
    found = (one for one in saved if one.number == int(name) and one.kind == "snapshot")
    saved = next(found, None)
    return saved and SamplingSession(step=saved.step, adapter=saved.adapter)


def _no_session(id: str) -> BadRequest:
    return BadRequest(
        f"'sampling_session_id': got {id!r:.120}; expected a session of this server whose snapshot "
        "still exists"
    )
