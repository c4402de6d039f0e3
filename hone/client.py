"""The orchestrator as a Python object: `AsyncClient`, and for synchronous code `Client`, which has
the same methods. `shared/http/client.py` makes the calls, with its deadlines and retries."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import secrets
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from hone import following
from hone.background import Background
from shared import wire
from shared.errors import BadRequest, Failed, HoneError, NotFound, Unavailable, no_job
from shared.explain import sentences, shown
from shared.http import client as shared_client
from shared.http.urls import check_url
from shared.job import JOB_ID

if TYPE_CHECKING:  # imported where they are used, because most calls do not need them
    from hone.downloading import Downloaded, Progress
    from hone.resuming import Resumed
    from shared.job import EvaluatedModel, Job, RewardSpec

SUBMIT_DEADLINE_S = 1800.0
REGRADE_DEADLINE_S = 3600.0
UPLOAD_DEADLINE_S = 3600.0
DELETE_DEADLINE_S = 600.0
CHANGE_DEADLINE_S = 30.0
CHAT_DEADLINE_S = 600.0
PLAN_DEADLINE_S = 30.0
RECOVER_DEADLINE_S = 600.0
PING_DEADLINE_S = 10.0
WITHDRAW_DEADLINE_S = 10.0

URL = "http://127.0.0.1:8000"

_VISIBLE = re.compile(r"[!-~]+")

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
P = ParamSpec("P")


class NotEnded(HoneError):
    """The time that `wait` was given is over, and the job goes on."""


class AsyncClient:
    """Talks to an orchestrator at `url`. A job is named by its id, or by its name for the newest
    job of that name; one to submit is a `Job`, or a dict with the content of a job file. All errors
    are HoneErrors: BadRequest if the caller is wrong, Unavailable if nothing answers."""

    def __init__(self, url: str = URL, *, token: str | None = None) -> None:
        _check_text("the orchestrator's URL", url)
        if token is not None:
            _check_text("the token", token, secret=True)
        try:
            check_url(url, URL)
        except ValueError as error:
            raise BadRequest(f"the orchestrator's URL: {error}") from error
        self.url = url
        self._client = shared_client.Client("orchestrator", url, token=token)
        self._is_known = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def ping(self) -> None:
        """Raises Unavailable at once if nothing answers, and BadRequest if another program than an
        orchestrator answers."""
        await self._client.ping(PING_DEADLINE_S)
        self._is_known = True

    async def submit(
        self, job: Job | Mapping[str, Any], *, key: str | None = None
    ) -> wire.JobRecord:
        """Returns the accepted job's record; accepted, it is on disk. `key` is an idempotency key:
        the same key and job submit once, however often it is called. Without one, an interrupted or
        abandoned submission is withdrawn. Raises BadRequest with a sentence for each fault."""
        if key is not None:
            _check_text("the idempotency key", key)
        body, own = wire.SubmitRequest(job=_job(job)), key or secrets.token_hex(12)
        try:
            return await self._call(
                "POST", "/v1/jobs", body, wire.JobRecord, SUBMIT_DEADLINE_S, key=own
            )
        except (asyncio.CancelledError, Unavailable):
            if key is None:
                with contextlib.suppress(HoneError):  # the first error says more
                    await self.withdraw(own)
            raise

    async def withdraw(self, key: str) -> wire.Withdrawn:
        """Takes back the submission with the idempotency key `key`. A submission that is under way
        or has yet to arrive is refused. An accepted job is cancelled, and its state returned; a
        result without a job says that none was accepted, and none will be."""
        body = _body(wire.WithdrawRequest, key=key)
        path = "/v1/jobs/withdraw"
        call = self._client.call(
            "POST", path, body, wire.Withdrawn, deadline_s=WITHDRAW_DEADLINE_S, patience_s=0
        )
        return await self._checked(call)

    async def dry_run(self, job: Job | Mapping[str, Any]) -> wire.DryRun:
        """Checks a job as a submission does, and returns its first prompts; nothing is submitted.
        Raises BadRequest with a sentence for each fault."""
        body = wire.SubmitRequest(job=_job(job))
        return await self._call("POST", "/v1/jobs/dry_run", body, wire.DryRun, SUBMIT_DEADLINE_S)

    async def plan(self, job: Job | Mapping[str, Any]) -> wire.Plan:
        """Returns the orchestrator's plan of what the job needs and costs. Raises BadRequest for a
        model of unknown size."""
        body = wire.SubmitRequest(job=_job(job))
        return await self._call("POST", "/v1/jobs/plan", body, wire.Plan, PLAN_DEADLINE_S)

    async def get(self, job: str) -> wire.JobRecord:
        return await self._by_id_or_name(
            job, lambda job_id: self._get(f"/v1/jobs/{job_id}", wire.JobRecord)
        )

    async def list(
        self,
        limit: int = 1000,
        *,
        after: str | None = None,
        status: wire.JobStatus | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> wire.JobList:
        """Returns summaries of the newest `limit` jobs, newest first. Filters, as far as given:
        older than job `after`, this status, this name, this metadata."""
        given = {"after": after, "status": status, "name": name}
        query = {key: value for key, value in given.items() if value is not None}
        if not isinstance(metadata, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"metadata is {shown(metadata)}; expected a dict of texts")
        query |= {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        path = f"/v1/jobs?{urlencode({'limit': limit, **query})}"
        return await self._get(path, wire.JobList)

    async def cancel(self, job: str) -> wire.JobState:
        """Cancels a queued or paused job now, a running one within seconds."""
        return await self._post(job, "cancel")

    async def pause(self, job: str) -> wire.JobState:
        """Pauses a queued job now, a running one within seconds; another job may then run."""
        return await self._post(job, "pause")

    async def resume(self, job: str, changes: Sequence[str] = ()) -> wire.JobState:
        """Queues a paused job again; it goes on where it was, with `changes` such as
        "memory.micro_batch_tokens=4096". Raises BadRequest for a key that changes what is
        learned."""
        from shared.job.file import check_overrides

        check_overrides(changes)
        return await self._post(job, "resume", wire.ResumeRequest(set=tuple(changes)))

    async def resume_all(self) -> tuple[Resumed, ...]:
        """Queues every paused job again, oldest first, jobs that a person paused included. Returns
        the result for each: a job that cannot be resumed does not hold up the others."""
        from hone import resuming

        return await resuming.resume_all(self)

    async def delete(self, job: str, *, files: bool = False) -> wire.JobDeleted:
        """Forgets a job that has ended, with its events. `files` removes its run folder and the
        checkpoints in it as well. Raises Conflict for a job that has not ended."""
        query = f"files={str(files).lower()}"
        return await self._by_id_or_name(
            job,
            lambda job_id: self._call(
                "DELETE", f"/v1/jobs/{job_id}?{query}", None, wire.JobDeleted, DELETE_DEADLINE_S
            ),
        )

    async def recover(self) -> wire.Recovered:
        """Rebuilds the records of jobs from their run folders, after Redis lost its data. Doing it
        again changes nothing."""
        return await self._call("POST", "/v1/recover", None, wire.Recovered, RECOVER_DEADLINE_S)

    async def metrics(self, job: str, after_step: int = -1) -> wire.MetricsList:
        """Returns the metrics of all steps after `after_step`."""
        path = f"/v1/jobs/{(await self.get(job)).id}/metrics?after_step="
        rows: list[wire.MetricsRow] = []
        last: int | None = after_step
        while last is not None:
            page = await self._get(f"{path}{last}", wire.MetricsList)
            rows += page.rows
            last = page.next_after_step
        return wire.MetricsList(rows=tuple(rows))

    async def rollouts(self, job: str, step: int | None = None) -> wire.RolloutList:
        """Returns all graded rollouts of `step`, or of the newest step."""
        path = f"/v1/jobs/{(await self.get(job)).id}/rollouts"
        query = {} if step is None else {"step": step}
        found: list[wire.GradedRollout] = []
        after: int | None = 0
        while True:
            page = await self._get(
                f"{path}?{urlencode({**query, 'after': after})}", wire.RolloutList
            )
            found += page.rollouts
            query, after = {"step": page.step}, page.next_after
            if after is None:
                return wire.RolloutList(step=page.step, rollouts=tuple(found))

    async def regrade(
        self,
        job: str,
        first_step: int,
        last_step: int,
        rewards: Sequence[RewardSpec],
        examples: int = 10,
    ) -> wire.RegradeReport:
        """Returns how `rewards` would grade the stored rollouts of these steps, both included, with
        the `examples` rollouts whose reward differs most. Changes nothing."""
        body = _body(
            wire.RegradeRequest,
            first_step=first_step,
            last_step=last_step,
            rewards=rewards,
            num_examples=examples,
        )
        path = f"/v1/jobs/{(await self.get(job)).id}/regrade"
        return await self._call("POST", path, body, wire.RegradeReport, REGRADE_DEADLINE_S)

    async def evaluate(
        self,
        job: Job | Mapping[str, Any],
        models: Sequence[EvaluatedModel | Mapping[str, Any]],
        progress: Callable[[wire.JobProgress], None] = lambda _: None,
    ) -> wire.EvaluationReport:
        """Returns the scores of at least one model on the job's held-out problems, by its rewards
        and its `[evaluation]`. A model is a dict of `model` and perhaps `revision` and `name`, as
        in `evaluation.models` of a job. Submits a job of 0 steps, and waits for its end. `progress`
        is called every two seconds with the state. If the call is interrupted, the job is
        cancelled. Raises Failed if the job fails or is cancelled, and `hone.evaluating.Paused` if
        it is paused."""
        from hone import evaluating

        submitted = await self.submit(evaluating.evaluation_of(_job(job), models))
        return await evaluating.follow(self, submitted.id, progress)

    async def checkpoints(self, job: str) -> wire.CheckpointList:
        """Returns the checkpoints that the job has kept, oldest first."""
        return await self._get(
            f"/v1/jobs/{(await self.get(job)).id}/checkpoints", wire.CheckpointList
        )

    async def checkpoint_files(self, job: str, step: int) -> wire.CheckpointFiles:
        """Returns the files of the checkpoint of `step`, with their sizes and checksums."""
        path = f"/v1/jobs/{(await self.get(job)).id}/checkpoints/{step}"
        return await self._get(path, wire.CheckpointFiles)

    async def download(
        self,
        job: str,
        to: str | Path | None = None,
        *,
        step: int | None = None,
        state: bool = False,
        progress: Progress = lambda _name, _have, _size: None,
    ) -> Downloaded:
        """Downloads the checkpoint of `step`, or the newest, into the folder `to`, by default named
        after job and step: the files that plain `transformers` loads, and with `state` the training
        state. After an interruption another call resumes. `progress` is called with each file's
        bytes so far."""
        from hone.downloading import download
        from shared.weights.checkpoints import folder_name

        job_id = (await self.get(job)).id
        if step is None:
            kept = await self.checkpoints(job_id)
            if not kept:
                raise NotFound(f"job {job_id!r} has no checkpoint")
            step = kept[-1].step
        found = await self.checkpoint_files(job_id, step)
        folder = Path(to or f"{job_id}-{folder_name(step)}")
        return await download(self._client, job_id, found, folder, progress, state=state)

    async def upload(
        self, file: str | Path | IO[bytes], name: str | None = None, *, key: str | None = None
    ) -> wire.UploadedFile:
        """Stores a data file, which jobs name by its id. With `key`, an idempotency key, it is
        stored once. `name` ends in .jsonl, .json, .csv or .parquet; by default the file's own."""
        if key is not None:
            _check_text("the idempotency key", key)
        with contextlib.ExitStack() as opened:
            if isinstance(file, str | os.PathLike):
                name = name or Path(file).name
                try:
                    file = opened.enter_context(open(file, "rb"))  # noqa: PTH123
                except OSError as error:
                    raise BadRequest(f"{str(file)!r} cannot be read: {error.strerror}") from error
            call = self._client.upload(
                "/v1/files",
                file,
                name or "rows.jsonl",
                {"purpose": "fine-tune"},
                wire.UploadedFile,
                deadline_s=UPLOAD_DEADLINE_S,
                key=key or secrets.token_hex(12),
            )
            return await self._checked(call)

    async def events(
        self,
        job: str,
        *,
        after: str = "0",
        last: int | None = None,
        follow: bool = False,
        progress: Callable[[wire.JobProgress], None] | None = None,
    ) -> AsyncGenerator[wire.Event]:
        """Yields the events after event `after`, or only the newest `last` events; with `follow`
        also new events, until the job has ended or is paused. After a dropped connection it resumes
        where it broke. `progress` is called with the job's state every two seconds without an
        event."""
        job_id = (await self.get(job)).id
        if last is not None:
            for event in (page := await self._newest(job_id, last)):
                yield event
            after = page[-1].id if page else after
            if not follow:
                return
        goes_on = following.follow if follow else following.pages
        async with contextlib.aclosing(goes_on(self._client, job_id, after, progress)) as stream:
            async for event in stream:
                yield event

    async def _newest(self, job_id: str, number: int) -> wire.EventList:
        return await self._get(f"/v1/jobs/{job_id}/events?last={number}", wire.EventList)

    async def wait(self, job: str, *, timeout_s: float | None = None) -> wire.JobRecord:
        """Returns the record of the job once it has ended or is paused, as its `status` says. A
        paused job goes on once a person resumes it. Raises NotEnded after `timeout_s` seconds."""
        is_time = isinstance(timeout_s, int | float) and timeout_s >= 0
        if timeout_s is not None and not is_time:
            raise BadRequest(f"timeout_s is {shown(timeout_s)}; expected seconds, from 0 on")
        job_id = (await self.get(job)).id
        try:
            async with asyncio.timeout(timeout_s):
                return await self._at_rest(job_id)
        except TimeoutError as error:
            record = await self.get(job_id)
            if _is_at_rest(record):
                return record
            at = f" at step {record.step} of {record.steps}" if record.steps else ""
            raise NotEnded(
                f"job {job_id} is {record.status}{at} after {timeout_s:g} s, and goes on"
            ) from error

    async def models(self) -> Sequence[str]:
        """Returns the names of the models that can be called now: base models, "policy" (the
        weights that serve at present), trained models by their jobs' ids."""
        return [model.id for model in (await self._get("/v1/models", wire.ServedModelList)).data]

    async def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> str:
        """Returns the answer of one of `models` to a conversation. `sampling` are other parameters
        of OpenAI's chat completions."""
        body = _body(wire.CallRequest, model=model, messages=list(messages), **sampling)
        answer = await self._call(
            "POST", "/v1/chat/completions", body, wire.CallAnswer, CHAT_DEADLINE_S
        )
        return answer.root["choices"][0]["message"]["content"] or ""

    async def create_key(self, name: str, access: wire.Access = "full") -> wire.CreatedKey:
        """Returns a new API key with its secret, which is shown only this once. Raises Conflict if
        the name is taken. Needs HONE_TOKEN, as the other two methods for keys do."""
        body = _body(wire.CreateKey, name=name, access=access)
        return await self._call("POST", "/v1/keys", body, wire.CreatedKey, CHANGE_DEADLINE_S)

    async def keys(self) -> wire.KeyList:
        """Returns the API keys that are valid, by name."""
        return await self._get("/v1/keys", wire.KeyList)

    async def revoke_key(self, name: str) -> wire.KeyRevoked:
        """Revokes an API key: no request with it is answered any more."""
        _check_text("the key's name", name)
        path = f"/v1/keys/{quote(name, safe='')}"
        return await self._call("DELETE", path, None, wire.KeyRevoked, CHANGE_DEADLINE_S)

    async def _at_rest(self, job_id: str) -> wire.JobRecord:
        newest = await self._newest(job_id, 1)
        after = newest[-1].id if newest else "0"
        while not _is_at_rest(record := await self.get(job_id)):
            async with contextlib.aclosing(following.follow(self._client, job_id, after)) as stream:
                async for _ in stream:
                    pass
        return record

    async def _post(self, job: str, action: str, body: BaseModel | None = None) -> wire.JobState:
        return await self._by_id_or_name(
            job,
            lambda job_id: self._call(
                "POST", f"/v1/jobs/{job_id}/{action}", body, wire.JobState, CHANGE_DEADLINE_S
            ),
        )

    async def _get(self, path: str, answer: type[M]) -> M:
        return await self._checked(self._client.get(path, answer))

    async def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        answer: type[M],
        deadline_s: float,
        *,
        key: str | None = None,
    ) -> M:
        return await self._checked(
            self._client.call(method, path, body, answer, deadline_s=deadline_s, key=key)
        )

    async def _checked(self, call: Awaitable[M]) -> M:
        """Returns the call's result. If the URL is not an orchestrator's, the error says which
        program answers there."""
        try:
            return await call
        except (BadRequest, Failed):
            if not self._is_known:
                with contextlib.suppress(Unavailable):  # the first error says more
                    await self.ping()
            raise

    async def _by_id_or_name(self, job: str, call: Callable[[str], Awaitable[M]]) -> M:
        """Calls with `job` as an id, and if there is none as a name. Reads no record, so a job with
        an unreadable record can still be cancelled and removed."""
        if not isinstance(job, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"the job is {shown(job)}; expected its id or its name")
        if not re.fullmatch(JOB_ID, job):
            raise no_job(job)
        try:
            return await call(job)
        except NotFound:
            page = await self.list(1, name=job)
            ids = [*(summary.id for summary in page.jobs), *page.unreadable]
            if not ids:
                raise
            return await call(max(ids))  # ids of one name sort by time


def _is_at_rest(record: wire.JobRecord) -> bool:
    return record.status == "paused" or record.status in wire.TERMINAL


def _job(given: Job | Mapping[str, Any]) -> Job:
    """Returns the job; a dict is read like a job file in the working directory. Raises BadRequest
    with a sentence for each fault."""
    from copy import deepcopy

    from shared.job import Job
    from shared.job.file import make_job

    if isinstance(given, Job):
        return given
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(
            f"the job is {shown(given)}; expected a dict, or a Job, which hone.load_job reads from "
            "a file"
        )
    return make_job(deepcopy({**given}), (), "job")


def _check_text(what: str, value: Any, *, secret: bool = False) -> None:
    """Raises BadRequest unless `value` is text for a URL or a header. A secret value is not
    shown."""
    if isinstance(value, str) and _VISIBLE.fullmatch(value):
        return
    got = "" if secret else f"got {shown(value)}; "
    raise BadRequest(f"{what}: {got}expected text of visible ASCII characters")


def _body(kind: type[M], **fields: Any) -> M:
    """Returns the body with these fields. Raises BadRequest with a sentence for each fault."""
    try:
        return kind(**fields)
    except ValidationError as error:
        faults = sentences(error, kind)
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Returns the method of `Client` that waits for the result of `method`."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(lambda client: method(client, *args, **kwargs))

    return call


class Client:
    """As `AsyncClient`, but its methods wait for the result. Ctrl-C first ends the call in an
    orderly way, within seconds: a submission is withdrawn, an evaluation cancelled."""

    def __init__(self, url: str = URL, *, token: str | None = None) -> None:
        self._asynchronous = AsyncClient(url, token=token)
        self._background = Background()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._asynchronous.url

    def run(self, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `ask`, called with the asynchronous client."""
        return self._background.run(ask(self._asynchronous))

    def close(self) -> None:
        """Doing it again changes nothing."""
        if not self._background.is_closed:
            self._background.run(self._asynchronous.close())
            self._background.close()

    ping = _blocking(AsyncClient.ping)
    submit = _blocking(AsyncClient.submit)
    withdraw = _blocking(AsyncClient.withdraw)
    dry_run = _blocking(AsyncClient.dry_run)
    plan = _blocking(AsyncClient.plan)
    get = _blocking(AsyncClient.get)
    list = _blocking(AsyncClient.list)
    cancel = _blocking(AsyncClient.cancel)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    resume_all = _blocking(AsyncClient.resume_all)
    delete = _blocking(AsyncClient.delete)
    recover = _blocking(AsyncClient.recover)
    metrics = _blocking(AsyncClient.metrics)
    rollouts = _blocking(AsyncClient.rollouts)
    regrade = _blocking(AsyncClient.regrade)
    evaluate = _blocking(AsyncClient.evaluate)
    checkpoints = _blocking(AsyncClient.checkpoints)
    checkpoint_files = _blocking(AsyncClient.checkpoint_files)
    download = _blocking(AsyncClient.download)
    upload = _blocking(AsyncClient.upload)
    wait = _blocking(AsyncClient.wait)
    models = _blocking(AsyncClient.models)
    chat = _blocking(AsyncClient.chat)
    create_key = _blocking(AsyncClient.create_key)
    keys = _blocking(AsyncClient.keys)
    revoke_key = _blocking(AsyncClient.revoke_key)

    def events(
        self,
        job: str,
        *,
        after: str = "0",
        last: int | None = None,
        follow: bool = False,
        progress: Callable[[wire.JobProgress], None] | None = None,
    ) -> Iterator[wire.Event]:
        """As `AsyncClient.events`; `progress` is called by the thread that asks for events."""
        told = SimpleQueue[wire.Event | wire.JobProgress | None]()
        stream = self._asynchronous.events(
            job, after=after, last=last, follow=follow, progress=told.put if progress else None
        )
        for one in self._background.iterate(stream, told):
            if isinstance(one, wire.Event):
                yield one
            elif progress:
                progress(one)
