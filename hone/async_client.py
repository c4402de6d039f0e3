"""The orchestrator as a Python object: `AsyncClient`. `hone.Client` has the same methods for
synchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel

from hone import calling
from hone.calling import URL, Calls, ResumeResult, body_of, check_text, job_of
from shared import wire
from shared.errors import BadRequest, HoneError, NotFound, Unavailable
from shared.explain import elide
from shared.wire.pages import MAX_ROWS

if TYPE_CHECKING:  # imported where they are used, because most calls do not need them
    from hone.long_calls import CheckpointDownload, Progress
    from shared.job import EvaluatedModel, Job, RewardSpec

SUBMIT_DEADLINE_S = 1800.0
REGRADE_DEADLINE_S = 3600.0
UPLOAD_DEADLINE_S = 3600.0
PUSH_DEADLINE_S = 86_400.0
DELETE_DEADLINE_S = 600.0
CHAT_DEADLINE_S = 600.0
RECOVER_DEADLINE_S = 600.0
WITHDRAW_DEADLINE_S = 10.0
EPISODES_DEADLINE_S = 10.0

M = TypeVar("M", bound=BaseModel)


class NotEnded(HoneError):
    """The timeout of `wait` has passed; the job continues."""


class AsyncClient:
    """Talks to an orchestrator at `url`. A job is named by its id, or by its name for the newest
    job of that name; one to submit is a `Job`, or a dict with the content of a job file. All errors
    are HoneErrors: BadRequest if the caller is wrong, Unavailable if nothing answers."""

    def __init__(self, url: str = URL, *, token: str | None = None) -> None:
        self.url = url
        self._calls = Calls(url, token)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._calls.client.close()

    async def ping(self) -> None:
        """Raises Unavailable at once if nothing answers, and BadRequest if another program than an
        orchestrator answers."""
        await self._calls.ping()

    async def submit(
        self, job: Job | Mapping[str, Any], *, key: str | None = None
    ) -> wire.JobRecord:
        """Returns the accepted job's record; accepted, it is on disk. `key` is an idempotency key:
        the same key and job submit once, however often it is called. Without one, an interrupted or
        abandoned submission is withdrawn. Raises BadRequest with a sentence for each fault."""
        if key is not None:
            check_text("the idempotency key", key)
        body, own = wire.SubmitRequest(job=job_of(job)), key or secrets.token_hex(12)
        try:
            return await self._calls.post(
                "/v1/jobs", body, wire.JobRecord, deadline_s=SUBMIT_DEADLINE_S, key=own
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
        body = body_of(wire.WithdrawRequest, key=key)
        return await self._calls.post(
            "/v1/jobs/withdraw", body, wire.Withdrawn, deadline_s=WITHDRAW_DEADLINE_S, patience_s=0
        )

    async def dry_run(self, job: Job | Mapping[str, Any]) -> wire.DryRun:
        """Checks a job as a submission does, and returns its first prompts; nothing is submitted.
        Raises BadRequest with a sentence for each fault."""
        body = wire.SubmitRequest(job=job_of(job))
        return await self._calls.post(
            "/v1/jobs/dry_run", body, wire.DryRun, deadline_s=SUBMIT_DEADLINE_S
        )

    async def plan(self, job: Job | Mapping[str, Any]) -> wire.Plan:
        """Returns the orchestrator's plan of what the job needs and costs. Raises BadRequest for a
        model of unknown size."""
        body = wire.SubmitRequest(job=job_of(job))
        return await self._calls.post("/v1/jobs/plan", body, wire.Plan)

    async def get(self, job: str) -> wire.JobRecord:
        return await self._calls.by_id_or_name(
            job, lambda job_id: self._calls.get(f"/v1/jobs/{job_id}", wire.JobRecord)
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
            raise BadRequest(f"metadata is {elide(metadata)}; expected a dict of texts")
        query |= {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        path = f"/v1/jobs?{urlencode({'limit': limit, **query})}"
        return await self._calls.get(path, wire.JobList)

    async def cancel(self, job: str) -> wire.JobState:
        """Cancels a queued or paused job now, a running one within seconds."""
        return await self._post(job, "cancel")

    async def pause(self, job: str) -> wire.JobState:
        """Pauses a queued job now, a running one within seconds; another job may then run."""
        return await self._post(job, "pause")

    async def resume(self, job: str, changes: Sequence[str] = ()) -> wire.JobState:
        """Queues a paused job again; it continues where it stopped, with `changes` such as
        "memory.micro_batch_tokens=4096". Raises BadRequest for a key that changes what is
        learned."""
        from shared.job.file import check_overrides

        check_overrides(changes)
        return await self._post(job, "resume", wire.ResumeRequest(set=tuple(changes)))

    async def resume_all(self) -> tuple[ResumeResult, ...]:
        """Queues every paused job again, oldest first, jobs that a person paused included. Returns
        the result for each: a job that cannot be resumed does not hold up the others."""
        ids: list[str] = []
        after: str | None = None
        while True:
            page = await self.list(status="paused", after=after)
            ids += [*(job.id for job in page), *page.unreadable]
            if (after := page.next_after) is None:
                break
        return tuple([await self._resumed(id) for id in reversed(ids)])

    async def _resumed(self, id: str) -> ResumeResult:
        try:
            state = await self.resume(id)
        except Unavailable:
            raise
        except HoneError as error:
            return ResumeResult(id=id, problem=error.detail)
        return ResumeResult(id=id, status=state.status)

    async def delete(self, job: str, *, files: bool = False) -> wire.JobDeleted:
        """Forgets a job that has ended, with its events. `files` removes its run folder and the
        checkpoints in it as well. Raises Conflict for a job that has not ended."""
        query = f"files={str(files).lower()}"
        return await self._calls.by_id_or_name(
            job,
            lambda job_id: self._calls.delete(
                f"/v1/jobs/{job_id}?{query}", wire.JobDeleted, deadline_s=DELETE_DEADLINE_S
            ),
        )

    async def recover(self) -> wire.Recovered:
        """Rebuilds the records of jobs from their run folders, after Redis lost its data. Doing it
        again changes nothing."""
        return await self._calls.post(
            "/v1/recover", None, wire.Recovered, deadline_s=RECOVER_DEADLINE_S
        )

    async def metrics(self, job: str, after_step: int = -1) -> wire.MetricsList:
        """Returns the metrics of all steps after `after_step`."""
        path = f"/v1/jobs/{await self._id(job)}/metrics?after_step="
        rows: list[wire.MetricsRow] = []
        last: int | None = after_step
        while last is not None:
            page = await self._calls.get(f"{path}{last}", wire.MetricsList)
            rows += page.rows
            last = page.next_after_step
        return wire.MetricsList(rows=tuple(rows))

    async def findings(self, job: str) -> wire.FindingList:
        """Returns what is wrong with the job, or probably is, the worst first; empty if nothing
        is."""
        path = f"/v1/jobs/{await self._id(job)}/findings"
        return await self._calls.get(path, wire.FindingList)

    async def rollouts(
        self, job: str, step: int | None = None, *, limit: int | None = None
    ) -> wire.RolloutList:
        """Returns the first `limit` graded rollouts of `step`, or of the newest step; None: all."""
        return await self._rollouts(f"/v1/jobs/{await self._id(job)}/rollouts", step, {}, limit)

    async def _rollouts(
        self, path: str, step: int | None, named: Mapping[str, str], limit: int | None
    ) -> wire.RolloutList:
        query = dict[str, str | int](named) | ({} if step is None else {"step": step})
        found: list[wire.GradedRollout] = []
        after: int | None = 0
        while True:
            if limit is not None:
                query["limit"] = min(limit - len(found), MAX_ROWS)
            page = await self._calls.get(
                f"{path}?{urlencode(query | {'after': after})}", wire.RolloutList
            )
            found += page.rollouts
            query, after = query | {"step": page.step}, page.next_after
            if after is None or len(found) == limit:
                return wire.RolloutList(step=page.step, rollouts=tuple(found))

    async def held_out(
        self, job: str, step: int | None = None, name: str = "", *, limit: int | None = None
    ) -> wire.RolloutList:
        """Returns the first `limit` stored completions (None: all) of the evaluation after `step`,
        or of the newest one, with their rewards: of the first problems of `data.eval`, or of the
        held-out set `name`. In a job of 0 steps, `step` is the number of a model in its report,
        from 0."""
        path = f"/v1/jobs/{await self._id(job)}/held_out"
        return await self._rollouts(path, step, {"name": name}, limit)

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
        body = body_of(
            wire.RegradeRequest,
            first_step=first_step,
            last_step=last_step,
            rewards=rewards,
            num_examples=examples,
        )
        path = f"/v1/jobs/{await self._id(job)}/regrade"
        return await self._calls.post(path, body, wire.RegradeReport, deadline_s=REGRADE_DEADLINE_S)

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
        cancelled. Raises Failed if the job fails or is cancelled, and `hone.long_calls.Paused` if
        it is paused."""
        from hone import long_calls

        submitted = await self.submit(long_calls.evaluation_of(job_of(job), models))
        return await long_calls.follow(self, submitted.id, progress)

    async def push(
        self, job: str, rollouts: Sequence[Mapping[str, Any]], **group: Any
    ) -> wire.GroupAccepted:
        """Gives a job of kind "pushed" a group of rollouts that were sampled and scored elsewhere,
        and returns once it is on disk. `rollouts` and `group` (`prompt_token_ids`, `prompt`, `key`)
        are as in `wire.PushedGroup`. While the job has as many groups as it may have, waits for its
        steps. Pushing the same group again changes nothing."""
        body = body_of(wire.PushedGroup, rollouts=rollouts, **group)
        path = f"/v1/jobs/{await self._id(job)}/groups"
        return await self._calls.post(
            path, body, wire.GroupAccepted, deadline_s=PUSH_DEADLINE_S, patience_s=PUSH_DEADLINE_S
        )

    async def groups(self, job: str) -> wire.GroupCounts:
        """Returns how many pushed groups a job has, and for how many more it has room."""
        return await self._calls.get(f"/v1/jobs/{await self._id(job)}/groups", wire.GroupCounts)

    async def checkpoints(self, job: str) -> wire.CheckpointList:
        """Returns the checkpoints that the job has kept, oldest first."""
        path = f"/v1/jobs/{await self._id(job)}/checkpoints"
        return await self._calls.get(path, wire.CheckpointList)

    async def checkpoint_files(self, job: str, step: int) -> wire.CheckpointFiles:
        """Returns the files of the checkpoint of `step`, with their sizes and checksums."""
        path = f"/v1/jobs/{await self._id(job)}/checkpoints/{step}"
        return await self._calls.get(path, wire.CheckpointFiles)

    async def download(
        self,
        job: str,
        to: str | Path | None = None,
        *,
        step: int | None = None,
        state: bool = False,
        progress: Progress = lambda _name, _have, _size: None,
    ) -> CheckpointDownload:
        """Downloads the checkpoint of `step`, or the newest, into the folder `to`, by default named
        after job and step: the files that plain `transformers` loads, and with `state` the training
        state. After an interruption another call resumes. `progress` is called with each file's
        bytes so far."""
        from hone.long_calls import CheckpointDownload, Download
        from shared.weights.folders import STATE, folder_name

        job_id = await self._id(job)
        if step is None:
            kept = await self.checkpoints(job_id)
            if not kept:
                raise NotFound(f"job {job_id!r} has no checkpoint")
            step = kept[-1].step
        found = await self.checkpoint_files(job_id, step)
        files = tuple(file for file in found if state or not file.name.startswith(f"{STATE}/"))
        folder = Path(to or f"{job_id}-{folder_name(step)}")
        path = f"/v1/jobs/{job_id}/checkpoints/{step}/files"
        await Download(self._calls.client, path, folder, progress).all(files)
        return CheckpointDownload(step=step, folder=folder, files=files)

    async def upload(
        self, file: str | Path | IO[bytes], name: str | None = None, *, key: str | None = None
    ) -> wire.UploadedFile:
        """Stores a data file, which jobs name by its id. With `key`, an idempotency key, it is
        stored once. `name` ends in .jsonl, .json, .csv or .parquet; by default the file's own."""
        if key is not None:
            check_text("the idempotency key", key)
        with contextlib.ExitStack() as opened:
            if isinstance(file, str | os.PathLike):
                name = name or Path(file).name
                try:
                    file = opened.enter_context(open(file, "rb"))  # noqa: PTH123
                except OSError as error:
                    raise BadRequest(f"{str(file)!r} cannot be read: {error.strerror}") from error
            call = self._calls.client.upload(
                "/v1/files",
                file,
                name or "rows.jsonl",
                {"purpose": "fine-tune"},
                wire.UploadedFile,
                deadline_s=UPLOAD_DEADLINE_S,
                key=key or secrets.token_hex(12),
            )
            return await self._calls.checked(call)

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
        job_id = await self._id(job)
        if last is not None:
            for event in (page := await self._newest(job_id, last)):
                yield event
            after = page[-1].id if page else after
            if not follow:
                return
        read_events = calling.follow if follow else calling.pages
        async with contextlib.aclosing(
            read_events(self._calls.client, job_id, after, progress)
        ) as stream:
            async for event in stream:
                yield event

    async def lease_episodes(
        self, worker: str, num: int = 1, *, job: str | None = None, wait_s: float = 0.0
    ) -> tuple[wire.LeasedEpisode, ...]:
        """Leases up to `num` episodes for `worker`, of the job with the id `job` or of any; waits
        up to `wait_s` seconds if none is offered. `hone.work` does all that follows."""
        body = body_of(wire.LeaseEpisodes, worker=worker, num=num, job_id=job, wait_s=wait_s)
        found = await self._episodes("lease", body, wire.LeasedEpisodes, wait_s)
        return found.episodes

    async def renew_leases(
        self, worker: str, ids: Sequence[str], *, returned: Sequence[str] = ()
    ) -> wire.LeasesRenewed:
        """Renews leases, and gives back those `returned`. Returns which ones have ended."""
        body = body_of(wire.RenewLeases, worker=worker, ids=tuple(ids), returned=tuple(returned))
        return await self._episodes("renew", body, wire.LeasesRenewed)

    async def end_episode(self, id: str, result: wire.EpisodeResult) -> wire.ResultTaken:
        """Reports what an episode earned, or why its agent failed. Returns whether it counts."""
        return await self._episodes(f"{id}/result", result, wire.ResultTaken)

    async def _episodes(
        self, path: str, body: BaseModel, answer: type[M], wait_s: float = 0.0
    ) -> M:
        """Fails soon if nothing answers: a worker asks again itself."""
        return await self._calls.post(
            f"/v1/episodes/{path}",
            body,
            answer,
            deadline_s=wait_s + EPISODES_DEADLINE_S,
            patience_s=0,
        )

    async def _id(self, job: str) -> str:
        return (await self.get(job)).id

    async def _newest(self, job_id: str, number: int) -> wire.EventList:
        return await self._calls.get(f"/v1/jobs/{job_id}/events?last={number}", wire.EventList)

    async def wait(self, job: str, *, timeout_s: float | None = None) -> wire.JobRecord:
        """Returns the record of the job once it has ended or is paused, as its `status` says. A
        paused job continues once it is resumed. Raises NotEnded after `timeout_s` seconds."""
        is_time = isinstance(timeout_s, int | float) and timeout_s >= 0
        if timeout_s is not None and not is_time:
            raise BadRequest(f"timeout_s is {elide(timeout_s)}; expected seconds, from 0 on")
        job_id = await self._id(job)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._at_rest(job_id)
        except TimeoutError as error:
            record = await self.get(job_id)
            if _is_at_rest(record):
                return record
            at = f" at step {record.step} of {record.steps}" if record.steps else ""
            raise NotEnded(
                f"job {job_id} is {record.status}{at} after {timeout_s:g} s, and continues"
            ) from error

    async def models(self) -> Sequence[str]:
        """Returns the names of the models that can be called now: base models, "policy" (the
        weights that serve at present), trained models by their jobs' ids."""
        return [
            model.id for model in (await self._calls.get("/v1/models", wire.ServedModelList)).data
        ]

    async def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> str:
        """Returns the answer of one of `models` to a conversation. `sampling` are other parameters
        of OpenAI's chat completions."""
        body = body_of(wire.CallRequest, model=model, messages=list(messages), **sampling)
        answer = await self._calls.post(
            "/v1/chat/completions", body, wire.CallAnswer, deadline_s=CHAT_DEADLINE_S
        )
        return answer.root["choices"][0]["message"]["content"] or ""

    async def create_key(
        self, name: str, access: wire.Access = "full", weight: float = 1.0
    ) -> wire.CreatedKey:
        """Returns a new API key with its secret, which is shown only this once. Raises Conflict if
        the name is taken. Needs HONE_TOKEN, as the other two methods for keys do."""
        body = body_of(wire.CreateKey, name=name, access=access, weight=weight)
        return await self._calls.post("/v1/keys", body, wire.CreatedKey)

    async def keys(self) -> wire.KeyList:
        """Returns the API keys that are valid, by name."""
        return await self._calls.get("/v1/keys", wire.KeyList)

    async def revoke_key(self, name: str) -> wire.KeyRevoked:
        """Revokes an API key: no request with it is answered any more."""
        check_text("the key's name", name)
        path = f"/v1/keys/{quote(name, safe='')}"
        return await self._calls.delete(path, wire.KeyRevoked)

    async def _at_rest(self, job_id: str) -> wire.JobRecord:
        newest = await self._newest(job_id, 1)
        after = newest[-1].id if newest else "0"
        while not _is_at_rest(record := await self.get(job_id)):
            async with contextlib.aclosing(
                calling.follow(self._calls.client, job_id, after)
            ) as stream:
                async for _ in stream:
                    pass
        return record

    async def _post(self, job: str, action: str, body: BaseModel | None = None) -> wire.JobState:
        return await self._calls.by_id_or_name(
            job, lambda job_id: self._calls.post(f"/v1/jobs/{job_id}/{action}", body, wire.JobState)
        )


def _is_at_rest(record: wire.JobRecord) -> bool:
    return record.status == "paused" or record.status in wire.TERMINAL
