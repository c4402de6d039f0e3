"""`/api/v1`: what the `tinker` SDK asks for. Every operation is answered at once with the id of its
future, once it is on disk; `/retrieve_future` has the result, and 408 until it is there."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import zstandard
from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from services.orchestrator.api.checking import Checks
from services.orchestrator.api.jobs import check_job
from services.orchestrator.errors import PUT_AWAY
from services.orchestrator.programs.log import OperationLog
from services.orchestrator.programs.sampling import Runs
from services.orchestrator.programs.saved import Saved
from services.orchestrator.runs.writable import Writable
from services.orchestrator.store.lists import Wanted
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import accept, accepted
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import to_disk
from services.orchestrator.tinker import mapping, requests, results
from services.orchestrator.tinker.managing import Management, adapter_of, path_to, read_ttl
from shared.errors import BadRequest, Conflict, NotFound
from shared.http.gate import scoped
from shared.http.service import Service
from shared.http.streams import DownloadedFile
from shared.job import Job
from shared.job.file import parse_job
from shared.settings import Settings
from shared.wire import (
    TERMINAL,
    JobRecord,
    OperationOutcome,
    ProgramOperation,
    SampleOrder,
    SamplingSession,
    SavedKind,
)

ROOT = "/api/v1"

POLL_S = 0.05

WAIT_S = 20.0
"""Seconds that a question for a future's result waits for it; the SDK gives it 45."""

PROTOBUF = "application/x-protobuf"

SESSION = re.compile(r"[0-9]{1,12}|x[0-9a-f]{16}")
"""Name of a session of samples: the number of a snapshot without a name, or a digest."""

SAMPLE = re.compile(rf"({SESSION.pattern})--?[0-9]{{1,20}}")
"""Id of an order of samples: its session, and its number there."""

MAX_AHEAD = 1000
"""How far a number may be beyond the newest: the SDK sends a few at a time, in any order."""

NUMBER = re.compile(r"[0-9]{1,9}")
"""An operation's number in the id of its future."""

MAX_LISTED = 100
"""Jobs that are looked at for one that may sample for a session."""

NAME = re.compile(r"[\w.-]{1,100}")
"""Name of a checkpoint or snapshot."""

MAX_BODY_BYTES = 64 << 20
"""Most bytes of a `forward_backward`, unpacked: the SDK sends 5 MB at a time."""

MAX_JSON_BYTES = 8 << 20
"""Most bytes of any other body: a prompt of a million tokens."""

Limit = Annotated[int, Query(ge=1, le=1000)]

Offset = Annotated[int, Query(ge=0)]


class Programs:
    """The models of a store that programs drive."""

    def __init__(
        self, settings: Settings, store: Store, writable: Writable, checks: Checks, runs: Runs
    ) -> None:
        self._settings = settings
        self._store = store
        self._writable = writable
        self._checks = checks
        self._runs = runs
        secret = settings.token.get_secret_value() if settings.token else None
        self.management = Management(store, secret)

    async def create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the model as a job. The same model of a session is the same job."""
        return await self._created(body, mapping.job_document(body))

    async def load_weights(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        """Submits a model that begins with a checkpoint, as a job."""
        if body.get("session_id") is None:

            def refuse() -> ProgramOperation:
                raise BadRequest(
                    f"{body.get('path')!r:.200} cannot be loaded into an existing model; expected "
                    "a new model: create_training_client_from_state, or ..._with_optimizer"
                )

            if body.get("model_id") is None:
                refuse()
            return await self._numbered(body, digest, refuse)
        source, checkpoint = await self._checkpoint(body.get("path"))
        return await self._created(body, mapping.loaded_document(body, source.job, checkpoint))

    async def weights_info(self, body: dict[str, Any]) -> dict[str, Any]:
        record, _ = await self._checkpoint(body.get("tinker_path"))
        return {"base_model": record.job.model, **adapter_of(record.job)}

    async def _checkpoint(self, path: Any) -> tuple[JobRecord, str]:
        """Returns the model of a checkpoint's path, and the checkpoint's folder."""
        found = re.fullmatch(r"tinker://([\w:-]+)/weights/([\w.-]+)", str(path))
        if not found:
            raise BadRequest(f"'path': got {path!r:.200}; expected tinker://MODEL/weights/NAME")
        record = await self._model(found[1])
        saved = await asyncio.to_thread(Saved(Path(record.run_dir)).find, "checkpoint", found[2])
        if saved is None:
            raise NotFound(f"the model {record.id!r} has no checkpoint {found[2]!r}")
        return record, saved.path

    async def _created(self, body: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
        document = document | {"metadata": mapping.metadata(body)}
        job = parse_job(document, "the model asked for")
        key = f"tinker:{mapping.session_of(body, 'model_seq_id')}"
        record = await self._submitted(job, key)
        return {"request_id": f"{record.id}:0", "model_id": record.id}

    async def _submitted(self, job: Job, key: str) -> JobRecord:
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

    async def get_info(self, body: dict[str, Any]) -> dict[str, Any]:
        record = await self._model(body.get("model_id"))
        return {
            "type": "get_info",
            "model_id": record.id,
            "model_data": {"model_name": record.job.model, "tokenizer_id": record.job.model},
            "model_name": record.job.model,
            **adapter_of(record.job),
        }

    async def forward_backward(self, body: bytes) -> dict[str, Any]:
        message, digest = requests.read_message(body), requests.digest(body)

        def read() -> ProgramOperation:
            return requests.read_forward_backward(message, digest)

        return await self._accept(message.model_id, message.seq_id, digest, read)

    async def optim_step(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        return await self._numbered(body, digest, lambda: requests.read_optim_step(body, digest))

    async def save(self, body: dict[str, Any], digest: str, kind: SavedKind) -> dict[str, Any]:
        def read() -> ProgramOperation:
            is_unnamed = kind == "snapshot" and body.get("path") is None
            name = "" if is_unnamed else _name(body.get("path"))
            return ProgramOperation(kind=kind, digest=digest, name=name, ttl_s=read_ttl(body))

        return await self._numbered(body, digest, read)

    async def unload_model(self, body: dict[str, Any], digest: str) -> dict[str, Any]:
        record = await self._model(body.get("model_id"))
        log = OperationLog(Path(record.run_dir))
        number = await asyncio.to_thread(log.newest) + 1
        operation = ProgramOperation(kind="unload", digest=digest)
        return await self._accept(record.id, number, digest, lambda: operation)

    async def create_sampling_session(self, body: dict[str, Any]) -> dict[str, Any]:
        """Opens a session on a snapshot, by its path, or on a base model. The same number of the
        SDK's session is the same session."""
        number = mapping.session_of(body, "sampling_session_seq_id")
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
        id = "x" + requests.digest(number.encode())[:16]
        await to_disk(OperationLog(Path(sampler.run_dir)).open_session, id, session)
        return {"type": "create_sampling_session", "sampling_session_id": f"{sampler.id}:{id}"}

    async def _snapshot(self, path: Any) -> tuple[JobRecord, SamplingSession]:
        """Returns the model of a snapshot's path, and the session that samples the snapshot."""
        found = re.fullmatch(r"tinker://([\w:-]+)/sampler_weights/([\w.-]+)", str(path))
        if not found:
            raise BadRequest(
                f"'model_path': got {path!r:.200}; expected tinker://MODEL/sampler_weights/NAME"
            )
        record = await self._model(found[1])
        saved = await asyncio.to_thread(Saved(Path(record.run_dir)).find, "snapshot", found[2])
        if saved is None:
            raise NotFound(f"the model {record.id!r} has no snapshot {found[2]!r}")
        if record.status in TERMINAL and saved.adapter is None:
            raise Conflict(
                f"the model {record.id!r} is {record.status}, and its snapshot is no adapter that "
                "another model's samplers could take; expected a model that runs"
            )
        return record, SamplingSession(step=saved.step, adapter=saved.adapter, of_path=str(path))

    async def _sampler(
        self, body: dict[str, Any], document: dict[str, Any], rank: int
    ) -> JobRecord:
        """Returns a model whose samplers have the document's base model, and take adapters of the
        rank: one that runs, or is to run, or a new one."""
        wanted = parse_job(document, "the model asked for")
        for status in ("running", "queued"):
            listed = await self._store.list(None, MAX_LISTED, Wanted(status=status))
            for one in listed.jobs:
                record = await self._store.get(one.id)
                if _can_sample(record.job, wanted.model, rank):
                    return record
        key = f"tinker:{body.get('session_id')}:sampler:{requests.digest(repr(document).encode())}"
        while (found := await self._submitted(wanted, key)).status in TERMINAL:
            key = f"{key[:200]}:{found.id}"
        return found

    async def get_sampler(self, id: str) -> dict[str, Any]:
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
        record = await self._model(model_id)
        session = await asyncio.to_thread(_session, Path(record.run_dir), name)
        if session is None:
            raise _no_session(id)
        return record, session, name

    async def asample(self, body: dict[str, Any]) -> dict[str, Any]:
        """Orders samples. The same number in a session is the same order."""
        number = requests.field(body, "seq_id", int)
        if number is None:
            raise BadRequest("'seq_id' is missing; expected a whole number")
        record, session, name = await self._session(str(body.get("sampling_session_id")))
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
        await to_disk(log.order, id, order)
        self._runs.carry_out(record.id, id, log)
        return {
            "request_id": f"{record.id}:sample:{id}",
            "model_id": record.id,
            "sample_sequence_ids": [f"{record.id}:{id}:{each}" for each in range(sampling.n)],
        }

    async def retrieve(self, body: dict[str, Any]) -> Response:
        """Returns the result of a future, or 408 while there is none."""
        id = str(body.get("request_id"))
        model_id, _, rest = id.partition(":")
        record = await self._model(model_id)
        log, end = OperationLog(Path(record.run_dir)), time.monotonic() + WAIT_S
        while True:
            found = await self._result(record, log, rest)
            if found is not None:
                return found
            if time.monotonic() > end:
                return JSONResponse(
                    {"type": "try_again", "request_id": id, "queue_state": "active"}, 408
                )
            await asyncio.sleep(POLL_S)
            record = await self._model(model_id)

    async def _result(self, record: JobRecord, log: OperationLog, rest: str) -> Response | None:
        if rest == "0":
            kind = "load_weights" if record.job.training.start_from else "create_model"
            return JSONResponse({"type": kind, "model_id": record.id})
        kind, _, id = rest.rpartition(":")
        found: Response | None = None
        if kind == "sample" and SAMPLE.fullmatch(id):
            found = await self._samples(record, log, id)
        elif NUMBER.fullmatch(rest):
            found = await asyncio.to_thread(_outcome, record.id, log, int(rest))
        else:
            raise NotFound(f"there is no request {record.id}:{rest}")
        if found is None and _is_put_away(record):
            await self._store.resume(record.id)
        elif found is None and record.status in (*TERMINAL, "paused"):
            why = f"the model {record.id!r} is {record.status}: {record.error or 'it has ended'}"
            return _failed(why, user=False)
        return found

    async def _samples(self, record: JobRecord, log: OperationLog, id: str) -> Response | None:
        order = await asyncio.to_thread(log.ordered, id)
        if order is None:
            raise NotFound(f"the model {record.id!r} has no samples {id!r}")
        samples = await asyncio.to_thread(log.samples, id)
        if samples is None:
            self._runs.carry_out(record.id, id, log)
            return None
        if samples.group is None or samples.error:
            return _failed(samples.error or "there are no samples", user=True)
        return Response(results.sample_response(order, samples.group), media_type=PROTOBUF)

    async def _numbered(
        self, body: dict[str, Any], digest: str, read: Callable[[], ProgramOperation]
    ) -> dict[str, Any]:
        return await self._accept(str(body.get("model_id")), body.get("seq_id"), digest, read)

    async def _accept(
        self, model_id: str, number: Any, digest: str, read: Callable[[], ProgramOperation]
    ) -> dict[str, Any]:
        """Accepts the operation. If it cannot be read, its number is done with, and those after it
        need not wait for it."""
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise BadRequest(f"'seq_id': got {number!r:.40}; expected a whole number from 1 on")
        record = await self._model(model_id)
        if record.status in TERMINAL:
            raise Conflict(f"the model {model_id!r} is {record.status}; expected one that runs")
        log = OperationLog(Path(record.run_dir))
        await asyncio.to_thread(_check_near, log, number)
        try:
            operation = await asyncio.to_thread(read)
        except BadRequest as error:
            await to_disk(log.refuse, number, digest, error.detail)
            raise
        await to_disk(log.accept, number, operation)
        if _is_put_away(record):
            await self._store.resume(record.id)
        return {"request_id": f"{record.id}:{number}", "model_id": record.id}

    async def training_run(self, model_id: str) -> dict[str, Any]:
        return await self.management.training_run(await self._model(model_id))

    async def checkpoints(self, model_id: str) -> dict[str, Any]:
        return await self.management.checkpoints(await self._model(model_id))

    async def delete(self, model_id: str, id: str) -> None:
        await self.management.delete(await self._model(model_id), id)

    async def expire(self, model_id: str, id: str, body: dict[str, Any]) -> None:
        await self.management.expire(await self._model(model_id), id, read_ttl(body))

    async def urls(self, model_id: str, id: str, base_url: str) -> dict[str, Any]:
        return await self.management.urls(await self._model(model_id), id, base_url)

    async def capabilities(self) -> dict[str, Any]:
        """Returns the base models of the newest jobs: any other one may be named too."""
        names = {one.model: None for one in (await self._store.list(None, MAX_LISTED)).jobs}
        able = {"trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **able} for name in names]}

    async def _job_id(self, model_id: str) -> str:
        """Returns the job of a model's id, which the SDK may have made of the session's."""
        if ":train:" not in model_id:
            return model_id
        wanted = Wanted(metadata={mapping.MODEL: model_id})
        listed = (await self._store.list(None, 1, wanted)).jobs
        if not listed:
            raise NotFound(f"there is no model {model_id!r:.200}")
        return listed[0].id

    async def _model(self, model_id: Any) -> JobRecord:
        record = await self._store.get(await self._job_id(str(model_id)))
        if not record.job.is_program:
            raise NotFound(f"job {model_id!r} is no model of a program")
        return record


def _is_put_away(record: JobRecord) -> bool:
    """Whether the model made room for another job, and its next operation brings it back."""
    return record.status == "paused" and (record.error or "").startswith(PUT_AWAY)


def _can_sample(job: Job, base_model: str, rank: int) -> bool:
    """Whether the samplers of a program's model have the base model, and take adapters of the
    rank."""
    is_fit = job.is_program and job.model == base_model
    return is_fit and job.served_rank is not None and job.served_rank >= rank


def _check_near(log: OperationLog, number: int) -> None:
    """Raises BadRequest for a number far beyond all that have come."""
    if log.operation(number - 1) is None and number > (newest := log.newest()) + MAX_AHEAD:
        raise BadRequest(
            f"'seq_id': got {number}, and the model's newest operation is {newest}; expected at "
            f"most {newest + MAX_AHEAD}"
        )


def _session(run: Path, name: str) -> SamplingSession | None:
    """Returns the session of that name. The number of a snapshot is a session too."""
    if not name.isdecimal():
        return OperationLog(run).session(name)
    found = (one for one in Saved(run).all() if one.number == int(name) and one.kind == "snapshot")
    saved = next(found, None)
    return saved and SamplingSession(step=saved.step, adapter=saved.adapter)


def _no_session(id: str) -> BadRequest:
    return BadRequest(
        f"'sampling_session_id': got {id!r:.120}; expected a session of this server whose snapshot "
        "is there"
    )


def _name(path: Any) -> str:
    if not isinstance(path, str) or not NAME.fullmatch(path) or not path.strip("."):
        raise BadRequest(
            f"'path': got {path!r:.120}; expected a name of letters, digits, '.', '_' and '-', of "
            "at most 100 characters"
        )
    return path


def _outcome(model_id: str, log: OperationLog, number: int) -> Response | None:
    operation, outcome = log.operation(number), log.outcome(number)
    if operation is None:
        raise NotFound(f"the model {model_id!r} has no operation {number}, or not any more")
    if outcome is None:
        return None
    if outcome.error is not None:
        return _failed(outcome.error, user=True)
    if operation.kind in ("forward", "forward_backward"):
        found = results.forward_backward_output(operation, outcome)
        return Response(found, media_type=PROTOBUF)
    return JSONResponse(_told(model_id, number, operation, outcome))


def _told(
    model_id: str, number: int, operation: ProgramOperation, outcome: OperationOutcome
) -> dict[str, Any]:
    if operation.kind == "optim_step":
        return {"type": "optim_step", "metrics": {"grad_norm:mean": outcome.grad_norm}}
    if operation.saves and operation.name:
        path = path_to(model_id, operation.saves, operation.name)
        return {"type": SAVED[operation.saves], "path": path}
    if operation.kind == "unload":
        return {"type": "unload_model", "model_id": model_id}
    session = f"{model_id}:{number}"
    return {"type": "save_weights_for_sampler", "sampling_session_id": session}


def _failed(error: str, *, user: bool) -> Response:
    return JSONResponse({"error": error, "category": "user" if user else "server"})


SAVED: dict[SavedKind, str] = {
    "checkpoint": "save_weights",
    "snapshot": "save_weights_for_sampler",
    "export": "save_weights_external",
}
"""The operations that save something, as the SDK calls them."""

Answer = Callable[[dict[str, Any], str], Awaitable[Any]]


def add_routes(service: Service, programs: Programs) -> None:
    async def session(_: dict[str, Any], __: str) -> dict[str, Any]:
        return {"type": "create_session", "session_id": secrets.token_hex(16)}

    async def nothing(_: dict[str, Any], __: str) -> dict[str, Any]:
        return {}

    answers: dict[str, Answer] = {
        "client/config": nothing,
        "create_session": session,
        "session_heartbeat": lambda _, __: _constant({"type": "session_heartbeat"}),
        "telemetry": lambda _, __: _constant({"status": "accepted"}),
        "create_model": lambda body, _: programs.create_model(body),
        "get_info": lambda body, _: programs.get_info(body),
        "optim_step": programs.optim_step,
        **{path: _saving(programs, kind) for kind, path in SAVED.items()},
        "load_weights": programs.load_weights,
        "weights_info": lambda body, _: programs.weights_info(body),
        "unload_model": programs.unload_model,
        "create_sampling_session": lambda body, _: programs.create_sampling_session(body),
        "asample": lambda body, _: programs.asample(body),
        "retrieve_future": lambda body, _: programs.retrieve(body),
    }
    for path, answer in answers.items():
        _add(service, path, answer)

    async def forward_backward(request: Request) -> Response:
        return JSONResponse(await programs.forward_backward(await _body(request, MAX_BODY_BYTES)))

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def sampler(id: str) -> dict[str, Any]:
        return await programs.get_sampler(id)

    add = service.app.add_api_route
    for path in ("forward_backward", "forward"):
        add(f"{ROOT}/{path}", forward_backward, methods=["POST"], include_in_schema=False)
    add(f"{ROOT}/samplers/{{id}}", sampler, methods=["GET"], include_in_schema=False)
    add(f"{ROOT}/healthz", health, methods=["GET"], include_in_schema=False)
    _add_management(service, programs)


def _add_management(service: Service, programs: Programs) -> None:
    def add(method: str, path: str, route: Callable[..., Awaitable[Any]]) -> None:
        service.app.add_api_route(
            f"{ROOT}/{path}", route, methods=[method], include_in_schema=False, response_model=None
        )

    async def training_runs(limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        return await programs.management.training_runs(limit, offset)

    async def all_checkpoints(limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        return await programs.management.all_checkpoints(limit, offset)

    async def delete(id: str, checkpoint: str) -> Response:
        await programs.delete(id, checkpoint)
        return Response(status_code=204)

    async def expire(id: str, checkpoint: str, request: Request) -> Response:
        await programs.expire(id, checkpoint, _json(await _body(request, MAX_JSON_BYTES)))
        return Response(status_code=204)

    async def urls(id: str, checkpoint: str, request: Request) -> dict[str, Any]:
        return await programs.urls(id, checkpoint, f"{request.base_url}api/v1/files")

    async def file(sign: str, expires: int, job: str, number: int, name: str) -> Response:
        path = await programs.management.file(sign, expires, job, number, name)
        return DownloadedFile(path, path.name)

    async def finish(session: str) -> dict[str, Any]:
        return {}

    one = "training_runs/{id}/checkpoints/{checkpoint:path}"
    add("GET", "get_server_capabilities", programs.capabilities)
    add("GET", "training_runs", training_runs)
    add("GET", "training_runs/{model_id}", programs.training_run)
    add("GET", "training_runs/{model_id}/checkpoints", programs.checkpoints)
    add("GET", "checkpoints", all_checkpoints)
    add("GET", f"{one}/external_weights_urls", urls)
    add("PUT", f"{one}/ttl", expire)
    add("DELETE", one, delete)
    add("GET", "files/{sign}/{expires}/{job}/{number}/{name:path}", file)
    add("POST", "sessions/{session}/finish", finish)


def _saving(programs: Programs, kind: SavedKind) -> Answer:
    return lambda body, digest: programs.save(body, digest, kind)


def _add(service: Service, path: str, answer: Answer) -> None:
    async def route(request: Request) -> Response:
        body = await _body(request, MAX_JSON_BYTES)
        given = _json(body)
        found = await answer(given, requests.digest(body))
        return found if isinstance(found, Response) else JSONResponse(found)

    service.app.add_api_route(f"{ROOT}/{path}", route, methods=["POST"], include_in_schema=False)


def _json(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error!s:.200}") from error
    if not isinstance(given, dict):
        raise BadRequest("the body is no JSON object; expected one")
    return given


async def _constant(answer: dict[str, Any]) -> dict[str, Any]:
    return answer


async def _body(request: Request, most: int) -> bytes:
    """Returns the body, unpacked. Raises BadRequest for one of more than `most` bytes."""
    body = await request.body()
    if request.headers.get("content-encoding") == "zstd":
        try:
            body = zstandard.ZstdDecompressor().stream_reader(body).read(most + 1)
        except zstandard.ZstdError as error:
            raise BadRequest(f"the body is no zstd: {error}") from error
    if len(body) > most:
        raise BadRequest(f"the body has more than {most} bytes, expected at most that")
    return body
