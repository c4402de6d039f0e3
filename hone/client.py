"""The orchestrator as a Python object. Synchronous; the calls, deadlines and retries are those of
`shared/client.py`."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from hone import evaluating, following
from hone.background import Background
from hone.downloading import Download, Downloaded, Progress
from shared import client as shared_client
from shared.checkpoints import STATE
from shared.errors import BadRequest, HoneError, NotFound
from shared.explain import sentences
from shared.job import JOB_ID, Job, RewardSpec
from shared.wire import (
    TERMINAL,
    Access,
    CheckpointFiles,
    CheckpointList,
    CreatedKey,
    CreateKey,
    DryRun,
    EvaluatedModel,
    EvaluationReport,
    EvaluationRequest,
    EvaluationState,
    Event,
    EventList,
    GradedRollout,
    JobDeleted,
    JobList,
    JobProgress,
    JobRecord,
    JobState,
    JobStatus,
    KeyList,
    KeyRevoked,
    MetricsList,
    MetricsRow,
    Plan,
    Recovered,
    RegradeReport,
    RegradeRequest,
    ResumeRequest,
    RolloutList,
    SubmitRequest,
    VersionInfo,
)

SUBMIT_DEADLINE_S = 1800.0
REGRADE_DEADLINE_S = 3600.0
DELETE_DEADLINE_S = 600.0
CHANGE_DEADLINE_S = 30.0
PLAN_DEADLINE_S = 30.0
RECOVER_DEADLINE_S = 600.0
PING_DEADLINE_S = 1.0

M = TypeVar("M", bound=BaseModel)


class Client:
    """Talks to an orchestrator at `url`. A job is named by its id, or by its name for the newest
    job of that name."""

    def __init__(self, url: str = "http://127.0.0.1:8000", *, token: str | None = None) -> None:
        self.url = url
        self._client = shared_client.Client("orchestrator", url, token=token)
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

    def close(self) -> None:
        self._background.run(self._client.close())
        self._background.close()

    def ping(self) -> None:
        """Raises Unavailable at once if nothing answers."""
        self._background.run(self._client.get("/version", VersionInfo, deadline_s=PING_DEADLINE_S))

    def submit(self, job: Job, *, key: str | None = None) -> JobRecord:
        """Returns the accepted job's record; accepted, it is on disk. `key` is an idempotency key:
        the same key and job submit once, however often it is called. Raises BadRequest with a
        sentence for each fault."""
        body = SubmitRequest(job=job)
        return self._call("POST", "/v1/jobs", body, JobRecord, SUBMIT_DEADLINE_S, key=key)

    def dry_run(self, job: Job) -> DryRun:
        """Checks a job as a submission does, and returns what it would send; nothing is submitted.
        Raises BadRequest with a sentence for each fault."""
        body = SubmitRequest(job=job)
        return self._call("POST", "/v1/jobs/dry_run", body, DryRun, SUBMIT_DEADLINE_S)

    def plan(self, job: Job) -> Plan:
        """Returns what the orchestrator works out that a job will need and cost. Raises BadRequest
        for a model whose sizes are not known."""
        body = SubmitRequest(job=job)
        return self._call("POST", "/v1/jobs/plan", body, Plan, PLAN_DEADLINE_S)

    def get(self, job: str) -> JobRecord:
        return self._by_id_or_name(job, lambda job_id: self._get(f"/v1/jobs/{job_id}", JobRecord))

    def list(
        self,
        limit: int = 1000,
        *,
        after: str | None = None,
        status: JobStatus | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> JobList:
        """Returns summaries of the newest `limit` jobs, newest first: those older than job `after`,
        of this status and name, and with this metadata, as far as given."""
        given = {"after": after, "status": status, "name": name}
        query = {key: value for key, value in given.items() if value is not None}
        query |= {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        path = f"/v1/jobs?{urlencode({'limit': limit, **query})}"
        return self._get(path, JobList)

    def cancel(self, job: str) -> JobState:
        """Cancels a queued or paused job now, a running one within seconds."""
        return self._post(job, "cancel")

    def pause(self, job: str) -> JobState:
        """Pauses a queued job now, a running one within seconds; another job may then run."""
        return self._post(job, "pause")

    def resume(self, job: str, changes: Sequence[str] = ()) -> JobState:
        """Queues a paused job again; it goes on where it was, with `changes` such as
        "memory.micro_batch_tokens=4096". Raises BadRequest for one that says what is learned."""
        return self._post(job, "resume", ResumeRequest(set=tuple(changes)))

    def delete(self, job: str, *, files: bool = False) -> JobDeleted:
        """Forgets a job that has ended, with its events. `files` removes its run folder and the
        checkpoints in it as well. Raises Conflict for a job that has not ended."""
        query = f"files={str(files).lower()}"
        return self._by_id_or_name(
            job,
            lambda job_id: self._call(
                "DELETE", f"/v1/jobs/{job_id}?{query}", None, JobDeleted, DELETE_DEADLINE_S
            ),
        )

    def recover(self) -> Recovered:
        """Rebuilds the records of jobs from their run folders, after Redis lost its data. Doing it
        again changes nothing."""
        return self._call("POST", "/v1/recover", None, Recovered, RECOVER_DEADLINE_S)

    def metrics(self, job: str, after_step: int = -1) -> MetricsList:
        """Returns the metrics of all steps after `after_step`."""
        path = f"/v1/jobs/{self.get(job).id}/metrics?after_step="
        rows: list[MetricsRow] = []
        last: int | None = after_step
        while last is not None:
            page = self._get(f"{path}{last}", MetricsList)
            rows += page.rows
            last = page.next_after_step
        return MetricsList(rows=tuple(rows))

    def rollouts(self, job: str, step: int | None = None) -> RolloutList:
        """Returns all graded rollouts of `step`, or of the newest step."""
        path = f"/v1/jobs/{self.get(job).id}/rollouts"
        query = {} if step is None else {"step": step}
        found: list[GradedRollout] = []
        after: int | None = 0
        while True:
            page = self._get(f"{path}?{urlencode({**query, 'after': after})}", RolloutList)
            found += page.rollouts
            query, after = {"step": page.step}, page.next_after
            if after is None:
                return RolloutList(step=page.step, rollouts=tuple(found))

    def regrade(
        self,
        job: str,
        first_step: int,
        last_step: int,
        rewards: tuple[RewardSpec, ...],
        examples: int,
    ) -> RegradeReport:
        """Returns what `rewards` would say of the stored rollouts of these steps, both included,
        with the `examples` rollouts whose reward differs most. Changes nothing."""
        body = RegradeRequest(
            first_step=first_step, last_step=last_step, rewards=rewards, num_examples=examples
        )
        path = f"/v1/jobs/{self.get(job).id}/regrade"
        return self._call("POST", path, body, RegradeReport, REGRADE_DEADLINE_S)

    def evaluate(
        self,
        job: Job,
        models: Sequence[EvaluatedModel],
        progress: Callable[[EvaluationState], None] = lambda _: None,
    ) -> EvaluationReport:
        """Returns what each model gets on the job's held-out problems, by its rewards and its
        `[evaluation]`; no job is submitted. `progress` hears every second how far it is.
        Interrupted, the evaluation ends. Raises Conflict while a job has the samplers."""
        id = f"eval-{secrets.token_hex(6)}"
        body = EvaluationRequest(id=id, models=tuple(models), job=job)
        try:
            return self._background.run(evaluating.evaluate(self._client, body, progress))
        except BaseException:  # also Ctrl-C; raised again once the services are free
            with contextlib.suppress(HoneError):  # the first error says more
                self._background.run(evaluating.end(self._client, body.id))
            raise

    def checkpoints(self, job: str) -> CheckpointList:
        return self._get(f"/v1/jobs/{self.get(job).id}/checkpoints", CheckpointList)

    def checkpoint_files(self, job: str, step: int) -> CheckpointFiles:
        """Returns the files of the checkpoint of `step`, with their sizes and checksums."""
        path = f"/v1/jobs/{self.get(job).id}/checkpoints/{step}"
        return self._get(path, CheckpointFiles)

    def download(
        self,
        job: str,
        to: Path | None = None,
        *,
        step: int | None = None,
        state: bool = False,
        progress: Progress = lambda _name, _have, _size: None,
    ) -> Downloaded:
        """Puts the checkpoint of `step`, or the newest one, into the folder `to`, or one that is
        named after it: what plain `transformers` loads, and with `state` what training goes on
        from. One that was cut goes on where it was when it is called again; `progress` hears of
        each file how many of its bytes there are."""
        job_id = self.get(job).id
        if step is None:
            found = self.checkpoints(job_id).checkpoints
            if not found:
                raise NotFound(f"job {job_id!r} has no checkpoint")
            step = found[-1].step
        files = self.checkpoint_files(job_id, step).files
        folder = to or Path(f"{job_id}-step-{step:06d}")
        path = f"/v1/jobs/{job_id}/checkpoints/{step}/files"
        wanted = tuple(file for file in files if state or not file.name.startswith(f"{STATE}/"))
        self._background.run(Download(self._client, path, folder, progress).all(wanted))
        return Downloaded(step=step, folder=folder, files=wanted)

    def events(
        self,
        job: str,
        *,
        after: str = "0",
        follow: bool = False,
        progress: Callable[[JobProgress], None] | None = None,
    ) -> Iterator[Event]:
        """Yields what happened after event `after`; with `follow`, until the job has ended. A
        dropped connection is taken up again where it broke. `progress` hears every two seconds in
        which nothing happens what the job is at."""
        job_id = self.get(job).id
        if follow:
            yield from following.follow(self._client, self._background, job_id, after, progress)
            return
        while page := self._get(f"/v1/jobs/{job_id}/events?after={after}", EventList).events:
            yield from page
            after = page[-1].id

    def wait(self, job: str, *, paused: bool = False) -> JobRecord:
        """Returns the record of the job once it has ended; with `paused`, also once it is paused
        and waits for a person."""
        record = self.get(job)
        ends = TERMINAL | ({"paused"} if paused else set[str]())
        if record.status in ends:
            return record
        for event in self.events(record.id, follow=True):
            if event.data.get("status") == "paused" and paused:
                record = self.get(record.id)  # an older pause may have ended since
                if record.status in ends:
                    return record
        return self.get(record.id)

    def create_key(self, name: str, access: Access = "full") -> CreatedKey:
        """Returns a new API key with its secret, which is shown only this once. Raises Conflict if
        there is one of the name. Needs HONE_TOKEN, as do the other two."""
        try:
            body = CreateKey(name=name, access=access)
        except ValidationError as error:
            faults = sentences(error, CreateKey)
            raise BadRequest("; ".join(fault["detail"] for fault in faults)) from error
        return self._call("POST", "/v1/keys", body, CreatedKey, CHANGE_DEADLINE_S)

    def keys(self) -> KeyList:
        """Returns the API keys that are valid, by name."""
        return self._get("/v1/keys", KeyList)

    def revoke_key(self, name: str) -> KeyRevoked:
        """Revokes an API key: no request with it is answered any more."""
        path = f"/v1/keys/{quote(name, safe='')}"
        return self._call("DELETE", path, None, KeyRevoked, CHANGE_DEADLINE_S)

    def _post(self, job: str, action: str, body: BaseModel | None = None) -> JobState:
        return self._by_id_or_name(
            job,
            lambda job_id: self._call(
                "POST", f"/v1/jobs/{job_id}/{action}", body, JobState, CHANGE_DEADLINE_S
            ),
        )

    def _get(self, path: str, answer: type[M]) -> M:
        return self._background.run(self._client.get(path, answer))

    def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        answer: type[M],
        deadline_s: float,
        *,
        key: str | None = None,
    ) -> M:
        call = self._client.call(method, path, body, answer, deadline_s=deadline_s, key=key)
        return self._background.run(call)

    def _by_id_or_name(self, job: str, call: Callable[[str], M]) -> M:
        """Takes `job` for an id, and if there is none for a name. Reads no record for that, so a
        job whose record cannot be read can be cancelled and removed."""
        if not re.fullmatch(JOB_ID, job):
            raise NotFound(f"no job {job!r}; `hone ls` lists them")
        try:
            return call(job)
        except NotFound:
            page = self.list(1, name=job)
            ids = [*(summary.id for summary in page.jobs), *page.unreadable]
            if not ids:
                raise
            return call(max(ids))  # ids of one name sort by time
