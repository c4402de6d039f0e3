"""`/v1/jobs/{job_id}/groups`: groups that were sampled and scored elsewhere. A group is checked,
and stored on disk, before it is acknowledged. Errors name the rollout and the index of its token,
both from 0."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from services.orchestrator.data.choosing import tokenizer_folder, tokenizer_stamp
from services.orchestrator.extensions.pushed.queue import Ledger, PushedQueue
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Busy, Conflict, Unavailable
from shared.http import codec, rendering
from shared.http.service import Service
from shared.job import Job, TrainingSpec
from shared.templates import PromptReader, TokenizerUnavailable, prompt_reader
from shared.weights.model_folder import read_config, window_of
from shared.wire import (
    TERMINAL,
    GroupAccepted,
    GroupCounts,
    JobRecord,
    Part,
    Prompt,
    PushedGroup,
    PushedRollout,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    Span,
)
from shared.wire.packed import Packed, TokenIds

REWARD = "environment"
"""The name of a pushed reward in metrics, as of every reward that no grader gave."""

MAX_LOGPROB = 0.01
"""Rounding may make a log-prob slightly positive."""

MAX_BODY_BYTES = 128 << 20
"""Most bytes of a request with groups, also of what it unpacks to."""

COLUMNS = ("sampled", "logprobs", "advantages")


@dataclass(frozen=True)
class Model:
    """The parts of a job's model that checks need: the number of its token ids, and the most tokens
    of prompt and completion, None if it is not known. `reader` is None for a model without a
    tokenizer.json."""

    name: str
    vocabulary: int
    window: int | None
    reader: PromptReader | None

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids; "" without a tokenizer."""
        return self.reader.decode(ids) if self.reader else ""


def model_of(job: Job) -> Model:
    """Reads the model's files. Raises Unavailable if they are not on this machine."""
    try:
        folder = tokenizer_folder(job)
        config = read_config(folder)
    except TokenizerUnavailable as error:
        raise Unavailable(f"groups of the job cannot be checked here: {error}") from error
    inner: Any = config.get("text_config") or config
    limits = [limit for limit in (job.max_model_len, window_of(config)) if limit is not None]
    try:
        reader = prompt_reader(job.model, folder, job.sampling.template_args)
    except TokenizerUnavailable:
        reader = None
    return Model(job.model, int(inner["vocab_size"]), min(limits, default=None), reader)


def scored_group(group: PushedGroup, model: Model) -> ScoredGroup:
    """Returns the group as the job trains on it. Raises BadRequest for the first fault."""
    prompt = _prompt_ids(group, model)
    _check_ids("prompt_token_ids", prompt, model)
    for index, rollout in enumerate(group.rollouts):
        _check(f"rollout {index}", rollout, len(prompt), model)
    if all(each.reward is None and not each.advantages for each in group.rollouts):
        raise BadRequest(
            f"none of the {len(group.rollouts)} rollouts has a reward or advantages; expected them "
            "of at least one"
        )
    content = group.prompt if group.prompt is not None else model.text(prompt)
    return ScoredGroup(
        prompt=Prompt(index=0, content=content, row={}),
        group=RolloutGroup(
            prompt_token_ids=prompt,
            rollouts=tuple(_rollout(each, model) for each in group.rollouts),
        ),
        scores=tuple(_scored(each.reward) for each in group.rollouts),
    )


def check_ratio(group: PushedGroup, training: TrainingSpec) -> None:
    """Raises BadRequest for a rollout whose tokens have different advantages, if the job's
    importance ratio is per sequence, which would average them."""
    if training.ratio_of != "sequence":
        return
    for index, rollout in enumerate(group.rollouts):
        given = list(itertools.compress(rollout.advantages, _sampled(rollout)))
        at = next((at for at, one in enumerate(given) if one != given[0]), None)
        if at is not None:
            raise BadRequest(
                f"rollout {index}, advantages: got {given[0]:g} and {given[at]:g}, and "
                f'training.loss is "{training.loss}" with importance "{training.importance}", '
                "whose ratio is of the sequence and would average them; expected the same for all "
                "sampled tokens"
            )


def check_versions(group: PushedGroup, oldest: int, newest: int, step: int) -> None:
    """Raises BadRequest, "too_stale", for a token that weights older than `oldest` sampled, and
    BadRequest for one of weights newer than `newest`. Tokens of unknown weights pass."""
    for index, rollout in enumerate(group.rollouts):
        for at, version in _dated(rollout):
            if oldest <= version <= newest:
                continue
            where = f"rollout {index}, versions: got {version} at token {at}; expected"
            if version > newest:
                raise BadRequest(f"{where} at most {newest}, the newest version that there is")
            raise BadRequest(
                f"{where} {oldest} to {newest}: step {step} trains the group, and max_staleness "
                f"is {step - 1 - oldest}",
                code="too_stale",
            )


def _prompt_ids(group: PushedGroup, model: Model) -> TokenIds:
    if group.prompt_token_ids:
        return group.prompt_token_ids
    if group.prompt is None:
        raise BadRequest("the group has no prompt; expected prompt_token_ids, or prompt")
    if model.reader is None:
        raise BadRequest(
            f"the group has no prompt_token_ids, and the model {model.name!r} has no "
            "tokenizer.json to make them; expected prompt_token_ids"
        )
    ids = TokenIds(model.reader.ids(group.prompt))
    if not ids:
        raise BadRequest(f"prompt: got {group.prompt!r:.80}, which has no tokens; expected some")
    return ids


def _check(where: str, rollout: PushedRollout, num_prompt: int, model: Model) -> None:
    length = len(rollout.token_ids)
    if not length:
        raise BadRequest(f"{where}, token_ids: got none; expected at least 1")
    if model.window is not None and num_prompt + length > model.window:
        raise BadRequest(
            f"{where}, token_ids: got {length} after a prompt of {num_prompt}; expected at most "
            f"{model.window} together (the model's own limit, or the job's max_model_len)"
        )
    _check_ids(f"{where}, token_ids", rollout.token_ids, model)
    for name in COLUMNS:
        _check_length(where, name, getattr(rollout, name), length)
    if not isinstance(rollout.versions, int):
        _check_length(where, "versions", rollout.versions, length)
    _check_values(f"{where}, sampled", rollout.sampled, lambda n: n in (0, 1), "0 or 1")
    if not any(_sampled(rollout)):
        raise BadRequest(f"{where}, sampled: got no 1 among {length}; expected at least one")
    for name, limit in (("logprobs", MAX_LOGPROB), ("advantages", math.inf)):
        column = [
            number if is_sampled else 0.0
            for number, is_sampled in zip(getattr(rollout, name), _sampled(rollout), strict=False)
        ]
        most = "a finite number" if limit == math.inf else "a finite number of at most 0"
        _check_values(f"{where}, {name}", column, _is_finite_up_to(limit), most)
    for at, version in _dated(rollout):
        if version < 0:
            raise BadRequest(f"{where}, versions: got {version} at token {at}; expected 0 or more")


def _is_finite_up_to(limit: float) -> Callable[[float], bool]:
    return lambda number: math.isfinite(number) and number <= limit


def _check_ids(where: str, ids: TokenIds, model: Model) -> None:
    expected = f"0 to {model.vocabulary - 1}, the vocabulary of model {model.name!r}"
    if ids and not (min(ids) >= 0 and max(ids) < model.vocabulary):
        _check_values(where, ids, lambda id: 0 <= id < model.vocabulary, expected)


def _check_length(where: str, name: str, column: Packed[Any], length: int) -> None:
    if len(column) not in (0, length):
        raise BadRequest(
            f"{where}, {name}: got {len(column)}; expected {length}, one for each of token_ids, or "
            "none"
        )


def _check_values(
    where: str, column: Sequence[float], fits: Callable[[Any], bool], expected: str
) -> None:
    for at, number in enumerate(column):
        if not fits(number):
            raise BadRequest(f"{where}: got {number:g} at token {at}; expected {expected}")


def _sampled(rollout: PushedRollout) -> Sequence[int]:
    return rollout.sampled or [1] * len(rollout.token_ids)


def _dated(rollout: PushedRollout) -> list[tuple[int, int]]:
    """Returns the first sampled token of each run of tokens of one version, as (index, version)."""
    if isinstance(rollout.versions, int):
        return [(0, rollout.versions)]
    pairs = zip(rollout.versions, enumerate(_sampled(rollout)), strict=False)
    found = [(at, version) for version, (at, is_sampled) in pairs if is_sampled]
    return [next(each) for _, each in itertools.groupby(found, key=lambda pair: pair[1])]


def _rollout(pushed: PushedRollout, model: Model) -> Rollout:
    spans = [Span(version=version, start=at) for at, version in _dated(pushed)]
    if spans:
        spans[0] = spans[0].model_copy(update={"start": 0})
    return Rollout(
        text=model.text(_last_answer(pushed)),
        token_ids=pushed.token_ids,
        logprobs=pushed.logprobs,
        finish_reason=pushed.finish_reason,
        spans=tuple(spans),
        sampled=pushed.sampled,
        advantages=pushed.advantages,
        messages=pushed.messages,
    )


def _last_answer(rollout: PushedRollout) -> list[int]:
    """Returns the last contiguous run of tokens that the policy sampled."""
    pairs = list(zip(rollout.token_ids, _sampled(rollout), strict=True))
    runs = itertools.groupby(pairs, key=lambda pair: bool(pair[1]))
    return [[id for id, _ in run] for is_sampled, run in runs if is_sampled][-1]


def _scored(reward: float | None) -> Score:
    """Returns the score with a pushed reward; None: no reward applies."""
    if reward is None:
        return Score(value=None, parts={})
    return Score(value=reward, parts={REWARD: Part(value=reward)})


FULL_S = 2
"""Retry-After of a refused group."""

MAX_QUEUES = 64

MAX_MODELS = 8


def add_routes(service: Service, pushing: GroupIntake) -> None:
    path = "/v1/jobs/{job_id}/groups"

    async def push(job_id: str, request: Request) -> Response:
        """Stores a group of a job with `[environment] kind = "pushed"`, to be trained on in order
        of arrival. 429: the job has as many as `max_staleness` allows."""
        group = await rendering.read_body(request, PushedGroup)
        return await rendering.render(await pushing.push(job_id, group), request)

    service.body(PushedGroup, "POST", path)
    service.app.add_api_route(
        path, push, methods=["POST"], responses=rendering.answers(GroupAccepted)
    )

    @service.app.get(path)
    async def count_groups(job_id: str) -> GroupCounts:
        """The number of pushed groups of a job, and for how many more it has room."""
        return await pushing.counts(job_id)


@dataclass(frozen=True)
class CheckedGroup:
    """A checked pushed group: as sent, and as stored."""

    group: PushedGroup
    scored: ScoredGroup
    digest: str


class GroupIntake:
    """Accepts groups for the jobs of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queues: dict[str, PushedQueue] = {}
        self._models: dict[object, Model] = {}

    async def push(self, job_id: str, group: PushedGroup) -> GroupAccepted:
        """Returns the group's number once it is on disk. Raises BadRequest for a group that cannot
        be trained on, Busy while there is no room, and Conflict for a job that takes no groups."""
        return await self.store(job_id, await self.checked(job_id, group))

    async def checked(self, job_id: str, group: PushedGroup) -> CheckedGroup:
        """Returns the checked group. Raises BadRequest for a group that cannot be trained on, and
        Conflict for a job that takes no groups."""
        record = await self.record(job_id)
        return await asyncio.to_thread(self._checked, record, group)

    async def store(self, job_id: str, checked: CheckedGroup) -> GroupAccepted:
        """Returns the group's number once it is on disk. Raises Busy while there is no room."""
        record = await self.record(job_id)
        number = await asyncio.to_thread(self._accept, record, self.queue(record), checked)
        return GroupAccepted(job_id=record.id, number=number)

    async def counts(self, job_id: str) -> GroupCounts:
        """Returns how many groups the job has."""
        record = await self.record(job_id)
        return await asyncio.to_thread(self.queue(record).look, partial(counts_of, record))

    async def registered(self, record: JobRecord) -> list[dict[str, Any]]:
        """Returns the programs that push to the job, by number."""
        return await asyncio.to_thread(self.queue(record).look, lambda found: [*found.programs])

    async def record(self, job_id: str) -> JobRecord:
        """Returns the job's record. Raises Conflict for a job of another kind."""
        record = await self._store.get(job_id)
        if not record.job.is_pushed:
            raise Conflict(
                f"job {record.id!r} samples its groups itself; expected a job with [environment] "
                'kind = "pushed"'
            )
        return record

    def _checked(self, record: JobRecord, group: PushedGroup) -> CheckedGroup:
        scored = scored_group(group, self.model(record.job))
        check_ratio(group, record.job.training)
        digest = hashlib.sha256(codec.pack(group.model_copy(update={"key": None}))).hexdigest()
        return CheckedGroup(group, scored, digest)

    def _accept(self, record: JobRecord, queue: PushedQueue, checked: CheckedGroup) -> int:
        RunFolder(Path(record.run_dir)).check_there()
        group = checked.group

        def admit(ledger: Ledger) -> None:
            check_room(record, ledger)
            next_step = counts_of(record, ledger).next_step
            oldest = max(next_step - 1 - record.job.max_staleness, 0)
            check_versions(group, oldest, record.step + 1, next_step)

        return queue.accept(
            checked.scored, admit, digest=checked.digest, key=group.key, last_step=record.step
        )

    def queue(self, record: JobRecord) -> PushedQueue:
        """Returns the job's queue, which caches the part of the journal that it has read."""
        queue = self._queues.pop(record.id, None) or PushedQueue(Path(record.run_dir))
        self._queues[record.id] = queue
        while len(self._queues) > MAX_QUEUES:
            del self._queues[next(iter(self._queues))]
        return queue

    def model(self, job: Job) -> Model:
        """Returns the cached `model_of` the job."""
        key = (tokenizer_stamp(job), job.max_model_len, repr(job.sampling.template_args))
        if key not in self._models:
            found = model_of(job)
            while len(self._models) >= MAX_MODELS:
                self._models.pop(next(iter(self._models)), None)
            self._models[key] = found
        return self._models[key]


def counts_of(record: JobRecord, ledger: Ledger) -> GroupCounts:
    """Returns the counts of a job's groups. A group of unknown weights has room as if the newest
    weights had sampled it."""
    per_step, ahead = record.job.sampling.prompts_per_step, ledger.num_ahead(record.step)
    trained = ledger.num_trained(record.step)
    room = per_step * (record.job.max_staleness + 1) - ahead
    return GroupCounts(
        job_id=record.id,
        accepted=ledger.num_accepted,
        trained=trained,
        waiting=ledger.num_accepted - ledger.num_dropped - trained,
        dropped=ledger.num_dropped,
        version=record.step,
        next_step=record.step + 1 + ahead // per_step,
        room=0 if record.status in TERMINAL else max(room, 0),
    )


def check_room(record: JobRecord, ledger: Ledger) -> None:
    """Raises Conflict for a job that has ended, and Busy for one that has as many groups as
    `max_staleness` allows."""
    if record.status in TERMINAL:
        raise Conflict(f"job {record.id!r} is {record.status}; expected one that has not ended")
    found = counts_of(record, ledger)
    if not found.room:
        job = record.job
        raise Busy(
            f"job {record.id!r} has {found.waiting} groups that are not trained on, expected fewer "
            f"than {job.sampling.prompts_per_step * (job.max_staleness + 1)}: "
            f"sampling.prompts_per_step {job.sampling.prompts_per_step} times max_staleness "
            f"{job.max_staleness} plus 1; push it again when a step is done",
            retry_after_s=FULL_S,
        )
