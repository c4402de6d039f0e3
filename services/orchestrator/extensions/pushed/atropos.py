"""Atropos' trajectory API for a job with `[environment] kind = "pushed"`, below
`/v1/jobs/{job_id}/atropos`: an environment takes this URL as its `rollout_server_url`. Hone is the
trainer, so `/register` and `/batch` are refused.

An environment drops a group that is refused (4xx), so a group without room waits here, up to a
limit on the waiting bytes. After a lost connection or a 503 the environment sends the group again,
and it is stored once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from services.orchestrator.api.access import Shares
from services.orchestrator.extensions.pushed.groups import MAX_BODY_BYTES, CheckedGroup, GroupIntake
from services.orchestrator.store.folder import RunFolder
from shared.errors import BadRequest, Busy, Conflict, TooLarge, Unavailable
from shared.http import codec, rendering
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    TERMINAL,
    AtroposInfo,
    AtroposStatus,
    AtroposWandb,
    DataReceived,
    EnvId,
    EnvRegistered,
    EnvStatus,
    JobRecord,
    Logprobs,
    Mask,
    Message,
    NoBody,
    PushedGroup,
    PushedRollout,
    RegisterEnv,
    ScoredData,
    ScoredDataList,
    TokenIds,
)

PREFIX = "/v1/jobs/{job_id}/atropos"

WAITS = "wait for trainer to start"
"""Atropos' answer that makes an environment ask again in a second."""

HOLD_S = 240.0
"""Seconds that a group without room waits. An environment's client waits for 300."""

LOOK_S = 0.5

MAX_WAITING_BYTES = 1 << 28
"""Bytes of the bodies whose groups wait for room, of all API keys together."""

LEAST_BYTES = 1 << 16
"""Least bytes that a waiting body counts as, since a request itself takes memory."""

MAX_ENVIRONMENTS = 256
"""Environments of a job at a time."""

FULL_S = 10
"""Retry-After of an environment that was not registered."""

MAX_JOBS = 64
"""The number of jobs for which the times of environments' last requests are kept."""

NOT_SAMPLED = -100

UNSUPPORTED = ("images", "distill_token_ids", "distill_logprobs")

PART_BYTES = 1 << 20

T = TypeVar("T")

Converted = tuple[int | None, PushedGroup]
"""A group, and the number of the environment that sent it."""


def add_routes(service: Service, settings: Settings, pushing: GroupIntake) -> None:
    api = Atropos(pushing)
    limit_bytes = min(settings.max_body_mib << 20, MAX_BODY_BYTES)

    async def register_env(job_id: str, request: Request) -> Response:
        """Registers an environment; its number is on disk."""
        asked = codec.decode(RegisterEnv, await _body(request, limit_bytes))
        return await rendering.render(await api.register(job_id, asked), request)

    async def scored_data(job_id: str, request: Request) -> Response:
        """Stores a group before it answers. Waits while the job has no room for it."""
        sent, num_bytes = await _sent(request, ScoredData, limit_bytes)
        return await rendering.render(await api.push(job_id, sent, num_bytes), request)

    async def scored_data_list(job_id: str, request: Request) -> Response:
        """Stores groups, each as `/scored_data` does."""
        sent, num_bytes = await _sent(request, ScoredDataList, limit_bytes)
        return await rendering.render(await api.push(job_id, sent, num_bytes), request)

    async def status_env(job_id: str, request: Request) -> Response:
        """The job's progress, for the environment that the body names."""
        asked = codec.decode(EnvId, await _body(request, limit_bytes))
        return await rendering.render(await api.status_of(job_id, asked.env_id), request)

    async def refused(job_id: str, request: Request) -> Response:
        """Hone is the trainer of the job: refused."""
        await pushing.record(job_id)
        raise Conflict(
            f"{request.method} {request.url.path} is a route for a trainer, and Hone is the "
            f"trainer of job {job_id!r}; expected a route for environments"
        )

    for method, path, handler, body, answer in (
        ("POST", "/register-env", register_env, RegisterEnv, EnvRegistered),
        ("POST", "/scored_data", scored_data, ScoredData, DataReceived),
        ("POST", "/scored_data_list", scored_data_list, ScoredDataList, DataReceived),
        ("GET", "/status-env", status_env, EnvId, EnvStatus),
        ("POST", "/register", refused, NoBody, NoBody),
        ("GET", "/batch", refused, None, NoBody),
    ):
        if body and method == "POST":
            service.body(body, method, PREFIX + path)
        service.app.add_api_route(
            PREFIX + path, handler, methods=[method], responses=rendering.answers(answer)
        )

    for path, read in (
        ("/status", api.status),
        ("/info", api.info),
        ("/wandb_info", api.wandb_info),
    ):
        service.app.get(PREFIX + path)(read)


def _too_much_waits(held: int, left: int) -> Unavailable:
    return Unavailable(
        f"{held} bytes of the API key's groups wait for room in their jobs, and {left} are left "
        "for all; expected at most as many with this body: push it again when a step is done",
        retry_after_s=FULL_S,
    )


@dataclass
class WaitQueue:
    """The requests that wait for room in a job, in the order in which they came."""

    first: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class Atropos:
    """`_heard` has, by job and environment, the time of the last request (time.monotonic). An
    environment that is silent for `environment.episode_s` has no share until its next request."""

    def __init__(self, pushing: GroupIntake) -> None:
        self._pushing = pushing
        self._heard: dict[str, dict[int, float]] = {}
        self._registering = asyncio.Lock()
        self._waiting = Shares()
        self._queues: dict[str, WaitQueue] = {}

    async def register(self, job_id: str, asked: RegisterEnv) -> EnvRegistered:
        """Returns the environment's number. An environment of a job that does not run yet is told
        to ask again. Raises Busy if the job has as many as it may."""
        record = await self._pushing.record(job_id)
        if record.status in TERMINAL:
            raise Conflict(f"job {record.id!r} is {record.status}; expected one that runs")
        if asked.min_batch_allocation is not None:
            raise BadRequest(
                f"'min_batch_allocation': got {asked.min_batch_allocation:g}, expected none: a "
                "step takes groups in the order in which they arrived"
            )
        if record.status != "running":
            return EnvRegistered(status=WAITS)
        async with self._registering:
            self._check_number(record, await self._pushing.registered(record))
            queue = self._pushing.queue(record)
            number, name = await asyncio.to_thread(queue.register, asked.model_dump())
            self._of_job(record.id)[number] = time.monotonic()
        return EnvRegistered(
            status="success",
            env_id=number,
            wandb_name=name,
            checkpoint_dir=str(RunFolder(Path(record.run_dir)).checkpoints),
            starting_step=record.step,
            checkpoint_interval=record.job.checkpoints.every or -1,
            num_steps=record.job.steps,
        )

    async def push(
        self, job_id: str, sent: Sequence[Converted], num_bytes: int = 0
    ) -> DataReceived:
        """Returns once all groups are on disk. Raises Unavailable if there was no room for a group
        within HOLD_S, or if its body of `num_bytes` would exceed the limit on waiting bytes."""
        end = time.monotonic() + HOLD_S
        heard = self._heard.get(job_id, {})
        for number in heard.keys() & {env_id for env_id, _ in sent}:
            heard[number] = time.monotonic()
        with contextlib.ExitStack() as waiting:
            for _, group in sent:
                checked = await self._pushing.checked(job_id, group)
                if job_id not in self._queues and await self._stored(job_id, checked):
                    continue
                if num_bytes:
                    size = max(num_bytes, LEAST_BYTES)
                    held = self._waiting.hold(size, MAX_WAITING_BYTES, _too_much_waits)
                    waiting.enter_context(held)
                    num_bytes = 0  # a body counts once, for all of its groups
                await self._store_in_turn(job_id, checked, end)
        return DataReceived(groups_processed=len(sent))

    async def _store_in_turn(self, job_id: str, checked: CheckedGroup, end: float) -> None:
        """Stores the group once there is room for it, in order of arrival: only the first in the
        queue checks for room."""
        queue = self._queues.setdefault(job_id, WaitQueue())
        queue.num_waiting += 1
        try:
            async with asyncio.timeout(end - time.monotonic()), queue.first:
                while not await self._stored(job_id, checked):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise Unavailable(
                f"job {job_id!r} had no room for the group in {HOLD_S:g} s: it has as many as "
                "max_staleness allows; push it again when a step is done",
                retry_after_s=FULL_S,
            ) from error
        finally:
            queue.num_waiting -= 1
            if not queue.num_waiting:
                self._queues.pop(job_id, None)

    async def _stored(self, job_id: str, checked: CheckedGroup) -> bool:
        """Stores the group; returns False while the job has no room for it."""
        try:
            await self._pushing.store(job_id, checked)
        except Busy:
            return False
        return True

    async def status(self, job_id: str) -> AtroposStatus:
        """The job's progress; of a job that has ended, one step beyond its last, at which
        environments stop."""
        record = await self._pushing.record(job_id)
        counts = await self._pushing.counts(job_id)
        step = record.job.steps + 1 if record.status in TERMINAL else record.step
        return AtroposStatus(current_step=step, queue_size=counts.waiting)

    async def status_of(self, job_id: str, env_id: int) -> EnvStatus:
        """Returns as `status`, for one environment, with its share of the samplers by weight."""
        record, status = await self._pushing.record(job_id), await self.status(job_id)
        found = await self._pushing.registered(record)
        if not 0 <= env_id < len(found):
            raise BadRequest(
                f"'env_id': got {env_id}; expected one of the {len(found)} that /register-env gave"
            )
        self._of_job(record.id)[env_id] = time.monotonic()
        shares = [each["max_token_length"] * each["weight"] for each in found]
        total = sum(shares[number] for number in self._active(record, len(found)))
        return EnvStatus(
            **status.model_dump(),
            env_weight=max(shares[env_id] / (total or 1.0), 0.01),
            self_queue_size=status.queue_size,
            max_group_size=found[env_id]["group_size"],
        )

    def _check_number(self, record: JobRecord, found: Sequence[Any]) -> None:
        num = len(self._active(record, len(found)))
        if num >= MAX_ENVIRONMENTS:
            raise Busy(
                f"job {record.id!r} has {num} environments, expected fewer than "
                f"{MAX_ENVIRONMENTS} for another one; an environment without a request for "
                f"{_idle_s(record):g} s (environment.episode_s) does not count",
                retry_after_s=FULL_S,
            )

    def _active(self, record: JobRecord, num: int) -> list[int]:
        """Returns which of `num` environments are active. An environment that is new to this
        process counts as active from now."""
        heard, now = self._of_job(record.id), time.monotonic()
        return [
            number for number in range(num) if now - heard.setdefault(number, now) < _idle_s(record)
        ]

    def _of_job(self, job_id: str) -> dict[int, float]:
        heard = self._heard[job_id] = self._heard.pop(job_id, None) or {}
        while len(self._heard) > MAX_JOBS:
            del self._heard[next(iter(self._heard))]
        return heard

    async def info(self, job_id: str) -> AtroposInfo:
        """The number of completions of a step, and their maximum length."""
        job = (await self._pushing.record(job_id)).job
        window = (await asyncio.to_thread(self._pushing.model, job)).window
        return AtroposInfo(
            batch_size=job.sampling.prompts_per_step * job.sampling.group_size,
            max_token_len=-1 if window is None else window,
        )

    async def wandb_info(self, job_id: str) -> AtroposWandb:
        """The project of Weights & Biases, if the job has one."""
        job = (await self._pushing.record(job_id)).job
        return AtroposWandb(group=job.name, project=job.wandb.project if job.wandb else None)


def _idle_s(record: JobRecord) -> float:
    assert record.job.environment is not None, "a job of kind pushed has one"
    return record.job.environment.episode_s


def pushed_group(data: ScoredData) -> PushedGroup:
    """Returns the group in Hone's form. Its prompt is the common beginning of all sequences, up to
    the first token that the policy sampled; the rest of each sequence is a rollout."""
    _check(data)
    num_prompt = _num_prompt(data)
    return PushedGroup(
        prompt=tuple(_asked(data)) or None,
        prompt_token_ids=TokenIds(data.tokens[0][:num_prompt]),
        rollouts=tuple(_rollout(data, at, num_prompt) for at in range(len(data.tokens))),
    )


def _rollout(data: ScoredData, at: int, num_prompt: int) -> PushedRollout:
    tokens = data.tokens[at][num_prompt:]
    advantages = _column(data.advantages, at, num_prompt)
    if data.overrides and (data.overrides[at] or {}).get("set_advantage_to_zero"):
        advantages = Logprobs([0.0] * len(tokens))
    messages = data.messages[at][len(_asked(data)) :] if data.messages else ()
    return PushedRollout(
        token_ids=TokenIds(tokens),
        sampled=Mask([int(id != NOT_SAMPLED) for id in data.masks[at][num_prompt:]]),
        logprobs=_column(data.inference_logprobs, at, num_prompt),
        reward=data.scores[at],
        advantages=advantages,
        messages=tuple(messages),
    )


def _asked(data: ScoredData) -> list[Message]:
    """Returns the prompt: the common beginning of all conversations before their last messages."""
    return _common([messages[:-1] for messages in data.messages or ((),)])


def _column(columns: tuple[Logprobs, ...] | None, at: int, num_prompt: int) -> Logprobs:
    return Logprobs(columns[at][num_prompt:]) if columns else Logprobs()


def _num_prompt(data: ScoredData) -> int:
    first = min(
        next((at for at, id in enumerate(mask) if id != NOT_SAMPLED), len(mask))
        for mask in data.masks
    )
    return len(_common([tokens[:first] for tokens in data.tokens]))


def _common(sequences: Sequence[Sequence[T]]) -> list[T]:
    """Returns the common beginning of the sequences."""
    columns = zip(*sequences, strict=False)
    return [each[0] for each in itertools.takewhile(lambda c: all(x == c[0] for x in c), columns)]


def _check(data: ScoredData) -> None:
    """Raises BadRequest for columns of different lengths, and for fields that are unsupported."""
    for name in UNSUPPORTED:
        if getattr(data, name) is not None:
            raise BadRequest(f"{name!r} is set; expected none: Hone does not train on it")
    size = len(data.tokens)
    for name in ("masks", "scores", "advantages", "inference_logprobs", "messages", "overrides"):
        column: Sequence[Any] | None = getattr(data, name)
        if column is not None and len(column) != size:
            raise BadRequest(f"{name!r}: got {len(column)}; expected {size}, as many as tokens")
    for name in ("masks", "advantages", "inference_logprobs"):
        for at, each in enumerate(getattr(data, name) or ()):
            if len(each) != len(data.tokens[at]):
                raise BadRequest(
                    f"{name!r} of sequence {at}: got {len(each)}; expected "
                    f"{len(data.tokens[at])}, one for each token"
                )


async def _sent(
    request: Request, kind: type[ScoredData | ScoredDataList], limit_bytes: int
) -> tuple[list[Converted], int]:
    """Returns the groups of a body in Hone's form, and the bytes of the body."""
    data = await _body(request, limit_bytes)

    def read() -> list[Converted]:
        sent = codec.decode(kind, data)
        groups = sent.root if isinstance(sent, ScoredDataList) else (sent,)
        return [(each.env_id, pushed_group(each)) for each in groups]

    return await rendering.parse_body(len(data), read), len(data)


async def _body(request: Request, limit_bytes: int) -> bytes:
    """Returns the body, which an environment may compress by gzip."""
    data = await request.body()
    if request.headers.get("content-encoding", "identity") != "gzip":
        rendering.media_type(request, data)
        return data
    unzip = zlib.decompressobj(wbits=31)
    try:
        found = await asyncio.to_thread(unzip.decompress, data, limit_bytes)
    except zlib.error as error:
        raise BadRequest(f"the body is no gzip: {error}") from error
    if unzip.unconsumed_tail:
        raise TooLarge(f"the body has more than {limit_bytes} bytes; expected at most as many")
    if (most := rendering.most_weight(request)) is not None:
        codec.check_weight(await asyncio.to_thread(_weight, found), most)
    return found


def _weight(data: bytes) -> int:
    """Returns `codec.json_weight`, and yields to other tasks between two parts."""
    return sum(
        codec.json_weight(data, at, at + PART_BYTES) for at in range(0, len(data), PART_BYTES)
    )
