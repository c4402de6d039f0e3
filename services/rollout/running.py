"""The engine that runs, its verified weights, and the requests under way: which requests may be
sampled, when a request is ended, and which weights sampled which tokens.

A newer attempt supersedes a job's worker, and a newer epoch the weights that the worker loaded.
Requests of a superseded worker are refused (Conflict, code "stale"), and its requests under way end
with the same error. So no group mixes weights of two epochs. A job of another orchestrator than the
owner of the sampler is refused too (`shared/http/ownership.py`). Requests without a job are never
stale.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Coroutine, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.rollout.engine import Adapter, Engine
from services.rollout.weights.adapters import LoadedAdapters
from services.rollout.weights.proofs import CanaryReading, ExpectedVersion, differing, given_tensors
from shared.errors import BadRequest, Conflict, HoneError, StateLost, Unavailable
from shared.http.connecting import since
from shared.http.operations import Starting
from shared.http.ownership import Holders, Ownership
from shared.http.service import request_key
from shared.wire import (
    AbortRequest,
    CheckedWeights,
    EngineSpec,
    Fence,
    Fenced,
    Fencing,
    GenerateRequest,
    ModelRequest,
    Published,
    ServingWeights,
    SleepRequest,
    Span,
)

R = TypeVar("R")

Asker = Fenced | GenerateRequest | ModelRequest | ServingWeights


def owner_of(asker: Asker) -> str:
    """Returns the owner of weights: job, attempt and epoch; "" without a job."""
    return f"{asker.job_id}:{asker.attempt}:{asker.epoch}" if asker.job_id else ""


def label(owner: str, version: int) -> str:
    """Returns the label that the engine writes beside every token that a version samples. It is
    more than the version, because after a rewind the same number names other weights."""
    return f"{owner}/{version}"


def spans(labels: Iterable[tuple[str, int]], owner: str) -> tuple[Span, ...]:
    """Returns the spans of the versions that sampled a completion, oldest first; none for weights
    that no job has published. `labels` has each label with the first token of that label. Raises
    Conflict, code "stale", if `owner` is a job and weights of another owner sampled some tokens."""
    all_spans: list[Span] = []
    for text, start in labels:
        of, separator, version = text.rpartition("/")
        if owner and of != owner:
            raise Conflict(
                f"tokens from {start} on were sampled by weights of {text!r}, expected {owner!r}",
                code="stale",
            )
        if separator:
            all_spans.append(Span(version=int(version), start=start))
    return tuple(all_spans)


class Fences:
    """The attempts that may use the sampler, and the fences that were aborted."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._holders = Holders()
        self._aborted: dict[str, Fence] = {}

    def take_over(self, asker: Fenced | ModelRequest | SleepRequest) -> bool:
        """Makes all older attempts and epochs stale, except the attempts that the caller names
        beside itself. Returns whether the sampler was another orchestrator's before. Raises
        Conflict if it is now, or if the asker is stale itself."""
        if asker.job_id is None:
            return False
        if passes := self._ownership.take(asker):
            self._holders, self._aborted = Holders(), {}
        self.refuse_stale(asker, asker.job_id)
        beside = asker.beside if isinstance(asker, ModelRequest) else ()
        self._holders.take(asker.fence, beside)
        self._aborted = {
            job_id: fence
            for job_id, fence in self._aborted.items()
            if not self._holders.is_stale(fence)
        }
        return passes

    def are_superseded(self, asker: GenerateRequest | ServingWeights) -> bool:
        """Returns whether weights or requests belong to an attempt that may not use the sampler."""
        is_over = asker.fence < self._after_abort(asker.job_id or "")
        is_known = asker.attempt in self._holders and not self._holders.is_stale(asker.fence)
        return is_over or not is_known

    def abort(self, request: AbortRequest) -> None:
        """Makes the job stale up to this fence, and the sampler free for another orchestrator."""
        self._ownership.leave(request)
        aborted = self._aborted.get(request.job_id, request.fence)
        self._aborted[request.job_id] = max(aborted, request.fence)

    def check(self, request: GenerateRequest, serving: ServingWeights) -> None:
        """Raises Conflict unless the weights that serve belong to the job and its epoch."""
        self.check_asker(request)
        if request.job_id is not None and owner_of(request) != owner_of(serving):
            raise not_serving(request, serving)

    def check_asker(self, request: GenerateRequest) -> None:
        """Raises Conflict for a job that is superseded, or another orchestrator's."""
        if request.job_id is not None:
            self._ownership.check()
            self.refuse_stale(request, request.job_id)

    def refuse_stale(self, asker: Fencing, job_id: str) -> None:
        if self._holders.is_stale(asker.fence) or asker.fence < self._after_abort(job_id):
            raise stale(asker, job_id)

    def _after_abort(self, job_id: str) -> Fence:
        aborted = self._aborted.get(job_id)
        return (aborted[0], aborted[1] + 1) if aborted else (0, 0)


def stale(asker: Fencing, job_id: str) -> Conflict:
    return Conflict(
        f"attempt {asker.attempt}, epoch {asker.epoch} of job {job_id!r} was superseded or "
        "aborted; expected no further requests of it",
        code="stale",
    )


def taken(asker: GenerateRequest) -> Conflict:
    """Returns the error of a request that ends because another orchestrator took the sampler."""
    return Conflict(
        f"another orchestrator took the sampler, because job {asker.job_id!r} had sent nothing for "
        "too long",
        code="taken",
    )


def not_serving(request: GenerateRequest, serving: ServingWeights | Fenced) -> Conflict:
    have = (
        f"the weights of attempt {serving.attempt}, epoch {serving.epoch} of job {serving.job_id!r}"
        if serving.job_id
        else "no job's"
    )
    return Conflict(
        f"attempt {request.attempt}, epoch {request.epoch} of job {request.job_id!r} sent a "
        f"request, but the weights that serve are {have}; reload the weights first",
        code="out_of_order",
    )


@dataclass
class _ActiveRequest:
    request: GenerateRequest
    key: str | None
    ended: HoneError | None = None


class Requests:
    """The requests under way."""

    def __init__(self) -> None:
        self._under_way: dict[asyncio.Task[Any], _ActiveRequest] = {}

    async def run(self, request: GenerateRequest, work: Coroutine[Any, Any, R]) -> R:
        """Returns the result of `work`, or raises the error with which `end` ended this request.
        `end` works from the moment of the call."""
        task = asyncio.create_task(work)
        entry = self._under_way[task] = _ActiveRequest(request, request_key.get())
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            del self._under_way[task]
        if entry.ended:
            raise entry.ended
        return task.result()

    def end(
        self,
        which: Callable[[GenerateRequest], bool],
        error: Callable[[GenerateRequest], HoneError],
        keys: Container[str | None] | None = None,
    ) -> int:
        """Ends the requests that `which` selects, of those with these `keys` if they are given,
        with the error of `error`. Returns how many."""
        ended = [
            (task, entry)
            for task, entry in self._under_way.items()
            if entry.ended is None and which(entry.request) and (keys is None or entry.key in keys)
        ]
        for task, entry in ended:
            entry.ended = error(entry.request)
            task.cancel()
        return len(ended)

    def lose(self, why: str) -> None:
        """Ends all requests, because the engine that would answer them has ended."""
        self.end(lambda _: True, lambda _: StateLost(why))

    def end_keys(self, request: AbortRequest) -> int:
        """Ends the job's requests with the keys `request.keys`. Returns how many."""
        return self.end(
            lambda asker: asker.job_id == request.job_id,
            lambda asker: stale(asker, request.job_id),
            request.keys,
        )


ASLEEP = "the sampler sleeps while the trainer has its GPU; it wakes with the next weights"

EXCHANGING = "the weights of the engine's model are being exchanged; send the request again"


@dataclass(frozen=True)
class Start:
    """The start of an engine for `model`, under way since `at` (Unix time)."""

    model: str
    at: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"starting the engine for {self.model!r}"

    @property
    def starting(self) -> Starting:
        return Starting(f"{self}, {since(self.at)}")


@dataclass(frozen=True)
class ServedVersion:
    """A version that serves. `published` has the digests of its tensors, and `seen` the engine's
    log-probs of its canary. `by_adapter`: it is an adapter, beside the model."""

    weights: ServingWeights
    published: dict[str, str] = field(default_factory=dict)
    seen: CanaryReading | None = None
    by_adapter: bool = False


@dataclass
class Running:
    """An engine from its start to its end. `latest` is the version that was loaded last, and
    `of_jobs` the version of each job that shares the engine: adapters, or only the latest.
    `nothing` describes an engine with which no version serves. `is_base`: the model has its own
    weights, so adapters may be loaded beside it. `fault` says why
    the weights are unknown."""

    engine: Engine
    spec: EngineSpec
    expected: ExpectedVersion
    adapters: LoadedAdapters
    nothing: ServingWeights
    latest: ServedVersion
    of_jobs: dict[str, ServedVersion] = field(default_factory=dict)
    is_base: bool = True
    is_paused: bool = False
    is_asleep: bool = False
    is_exchanging: bool = False
    fault: str | None = None

    # --- can it sample? ------------------------------------------------------------------------

    async def unready(self) -> str | None:
        """Returns why nothing would be sampled, or None."""
        return await self.failure() or self._why_asleep()

    async def failure(self) -> str | None:
        """Returns why the engine must be replaced, or must load a version; None if it works."""
        return await self.engine.failure() or self.fault

    async def check_alive(self) -> None:
        """Raises StateLost if the engine has died. Its weights may be unknown."""
        if reason := await self.engine.failure():
            raise StateLost(reason)

    async def check_ready(self) -> None:
        """Raises Unavailable while the engine sleeps or exchanges weights, and StateLost if it is
        dead or its weights are unknown."""
        await self.check_alive()
        if self.is_exchanging:
            raise Unavailable(EXCHANGING)
        if self.fault:
            raise StateLost(self.fault)
        if why := self._why_asleep():
            raise Unavailable(why)

    def _why_asleep(self) -> str | None:
        return ASLEEP if self.is_asleep else None

    @property
    def serving(self) -> ServingWeights:
        """The weights that were loaded last."""
        return self.latest.weights

    def served_to(self, job_id: str | None) -> ServedVersion:
        """Returns the version that serves the job; the latest one for no job, and for a job that
        has none."""
        return self.of_jobs.get(job_id or "", self.latest)

    def serve(self, served: ServedVersion) -> None:
        """Makes the version serve: beside adapters of other jobs, or alone."""
        job_id = served.weights.job_id
        if not served.by_adapter:
            self.of_jobs.clear()
        self.latest = served
        if job_id is not None:
            self.of_jobs[job_id] = served

    def keep(self, stays: Callable[[ServingWeights], bool]) -> None:
        """Forgets the versions of jobs that do not share the engine any more."""
        self.of_jobs = {
            job_id: served for job_id, served in self.of_jobs.items() if stays(served.weights)
        }
        self.adapters.kept = frozenset(self.of_jobs)

    def check_base(self) -> None:
        """Raises Conflict, code "no_adapters", if the model does not have its own weights."""
        if not self.is_base:
            raise Conflict(
                "other weights have replaced the model's own, so neither the model's own weights "
                "nor adapters for them can be sampled",
                code="no_adapters",
            )

    def check_version(self, min_version: int | None, job_id: str | None) -> None:
        """Raises Conflict, code "out_of_order", for a version that does not serve yet."""
        serving = self.served_to(job_id).weights
        version = serving.version
        if min_version is not None and (version is None or version < min_version):
            have = (
                "no version of a job"
                if version is None
                else f"version {version} of {serving.job_id!r}"
            )
            raise Conflict(
                f"'min_version': got {min_version}, serving {have}; reload the weights first",
                code="out_of_order",
            )

    def covers(self, spec: EngineSpec) -> bool:
        """Returns whether this engine can serve `spec`. Jobs that share an engine for their
        adapters may differ in rank, and in the seed, because their requests carry their own."""
        mine = self.spec
        if not (spec.max_lora_rank and mine.max_lora_rank):
            return spec == mine
        of_job = {"seed": mine.seed, "max_lora_rank": mine.max_lora_rank}
        fits = spec.max_lora_rank <= mine.max_lora_rank
        return fits and spec.model_copy(update=of_job) == mine

    def serves(self, ref: Published) -> bool:
        """Returns whether `ref` serves now. Raises Conflict if a newer version of its job and epoch
        does, or other bytes of this one."""
        serving = self.served_to(ref.job_id).weights
        if owner_of(serving) != owner_of(ref) or serving.version is None:
            return False
        if ref.version < serving.version:
            raise Conflict(
                f"'version': got {ref.version}, serving {serving.version} of job {ref.job_id!r}; "
                "versions only go up within an epoch",
                code="out_of_order",
            )
        if ref.version == serving.version and ref.digest != serving.digest:
            raise Conflict(
                f"version {ref.version} of job {ref.job_id!r} serves with digest {serving.digest}, "
                f"got {ref.digest}",
                code="body_differs",
            )
        return ref.version == serving.version

    # --- the weights that serve ------------------------------------------------------------------

    def salt(self, job_id: str | None, version: int | None = None) -> str:
        """Returns the key of the prefixes that are cached for a version of the job, by default the
        version that serves."""
        serving = self.served_to(job_id).weights
        return f"{owner_of(serving)}:{serving.version if version is None else version}"

    def serving_adapter(self, job_id: str | None) -> AbstractContextManager[Adapter | None]:
        """Returns a context that keeps the job's adapter loaded; it yields None without one."""
        by_adapter = self.served_to(job_id).by_adapter
        return self.adapters.using(self.adapters.of_job(job_id) if by_adapter else None)

    async def check_weights(self) -> CheckedWeights:
        """Returns which of the engine's tensors differ from the version that serves, or from the
        model that it was started with. With an adapter both are compared."""
        published, digests = self.latest.published, await self.engine.digests()
        if self.is_base:
            base = await asyncio.to_thread(given_tensors, self.engine.folder, self.engine.dtype)
            published = {**base, **published}
        with self.serving_adapter(self.serving.job_id) as adapter:
            if adapter:
                digests |= await self.engine.adapter_digests(adapter)
        return CheckedWeights(
            version=self.serving.version,
            job_id=self.serving.job_id,
            replica=self.serving.replica,
            num_tensors=len(published),
            differing=differing(digests, published),
            unread=tuple(sorted(published.keys() - digests.keys())),
        )

    def lose_base(self) -> None:
        """Notes that the model's own weights are replaced: the loaded adapters do not fit
        others."""
        self.adapters.forget()
        self.is_base = False

    def forget(self, seen: CanaryReading | None = None) -> None:
        """Forgets the version that serves. The next version is compared with `seen`."""
        self.latest = ServedVersion(self.nothing, seen=seen)
        self.of_jobs.clear()

    def drop(self, job_id: str, why: str) -> str:
        """Forgets the version of one of several jobs, and returns the reason as a sentence."""
        served = self.of_jobs.pop(job_id)
        self.latest = ServedVersion(self.nothing, seen=served.seen)
        return f"version {served.weights.version} of job {job_id!r} does not serve: {why}"

    async def fall_asleep(self, requests: Requests) -> None:
        """Frees the engine's memory, which loses its weights. Does nothing if the engine sleeps
        already. Raises StateLost if it fails: then the weights are unknown. An engine that cannot
        sleep raises BadRequest and is unchanged."""
        if not self.is_asleep:
            requests.lose(ASLEEP)
            try:
                await self.engine.sleep()
            except BadRequest:
                raise  # it did nothing
            except Exception as error:  # whatever it was, the weights are unknown
                self.forget()
                self.lose_base()
                self.fault = f"going to sleep failed ({sentence(error)}); PUT /model"
                raise StateLost(self.fault) from error
            self.is_asleep = True
        self.forget()
        self.lose_base()

    async def end_pause(self) -> None:
        """Ends a pause of `/pause` before a job uses the engine. Leaves a dead engine unchanged."""
        was_paused, self.is_paused = self.is_paused, False
        if was_paused and not self.is_asleep and not await self.failure():
            await self.engine.resume()

    async def resume_sampling(self) -> None:
        """Lets the engine sample, unless `/pause` paused it."""
        if not self.is_paused:
            await self.engine.resume()


def sentence(error: BaseException) -> str:
    return error.detail if isinstance(error, HoneError) else f"{type(error).__name__}: {error}"
