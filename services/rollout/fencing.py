"""Who may use the sampler, the requests under way, and which weights sampled which tokens.

A newer attempt supersedes a job's worker, and a newer epoch the weights that the worker loaded.
Requests of a superseded worker are refused (Conflict, code "stale"), and its requests under way end
with the same error. So no group mixes weights of two epochs. A job of another orchestrator than the
owner of the sampler is refused too (`shared/http/ownership.py`). Requests by hand belong to no job
and are never stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.errors import Conflict, HoneError, StateLost
from shared.http.ownership import Holders, Ownership
from shared.http.service import request_key
from shared.wire import (
    AbortRequest,
    Fence,
    Fenced,
    Fencing,
    GenerateRequest,
    ModelRequest,
    ServingWeights,
    SleepRequest,
    Span,
)

R = TypeVar("R")

Asker = Fenced | GenerateRequest | ModelRequest | ServingWeights


def owner_of(asker: Asker) -> str:
    """Returns whose weights they are: job, attempt and epoch; "" without a job."""
    return f"{asker.job_id}:{asker.attempt}:{asker.epoch}" if asker.job_id else ""


def label(owner: str, version: int) -> str:
    """Returns what the engine writes beside every token that a version samples. The version alone
    would not do, because after a rewind the same number names other weights."""
    return f"{owner}/{version}"


def spans(labels: Iterable[tuple[str, int]], owner: str) -> tuple[Span, ...]:
    """Returns which weight versions sampled a completion, oldest first; none for weights that no
    job has published. `labels` are each label with the first token that has it. Raises Conflict,
    code "stale", if `owner` is a job and weights of another owner sampled some tokens."""
    found: list[Span] = []
    for text, start in labels:
        of, separator, version = text.rpartition("/")
        if owner and of != owner:
            raise Conflict(
                f"tokens from {start} on were sampled by weights of {text!r}, expected {owner!r}",
                code="stale",
            )
        if separator:
            found.append(Span(version=int(version), start=start))
    return tuple(found)


class Fences:
    """Which attempts may use the sampler, and the fences that were aborted."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._holders = Holders()
        self._aborted: dict[str, Fence] = {}

    def take_over(self, asker: Fenced | ModelRequest | SleepRequest) -> bool:
        """Makes all older attempts and epochs stale, but those that the asker names beside itself.
        Returns whether the sampler was another orchestrator's before. Raises Conflict if it is now,
        or if the asker is stale itself."""
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
        """Returns whether weights or requests are of no attempt that may use the sampler."""
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
        "aborted; expected nothing more of it",
        code="stale",
    )


def taken(asker: GenerateRequest) -> Conflict:
    """Returns the error of a request that ends because another orchestrator took the sampler."""
    return Conflict(
        "the sampler was taken by another orchestrator while nothing was heard of job "
        f"{asker.job_id!r}",
        code="taken",
    )


def not_serving(request: GenerateRequest, serving: ServingWeights | Fenced) -> Conflict:
    have = (
        f"those of attempt {serving.attempt}, epoch {serving.epoch} of job {serving.job_id!r}"
        if serving.job_id
        else "no job's"
    )
    return Conflict(
        f"attempt {request.attempt}, epoch {request.epoch} of job {request.job_id!r} asks, but "
        f"the weights that serve are {have}; reload the weights first",
        code="out_of_order",
    )


@dataclass
class _UnderWay:
    request: GenerateRequest
    key: str | None
    ended: HoneError | None = None


class Requests:
    """What is being sampled, and for whom."""

    def __init__(self) -> None:
        self._under_way: dict[asyncio.Task[Any], _UnderWay] = {}

    async def run(self, request: GenerateRequest, work: Coroutine[Any, Any, R]) -> R:
        """Returns what `work` gives, or raises what `end` was given for this request. It can be
        ended from the moment of the call."""
        task = asyncio.create_task(work)
        entry = self._under_way[task] = _UnderWay(request, request_key.get())
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
    ) -> int:
        """Ends the requests that `which` picks, each with its error. Returns how many."""
        return self._end(lambda entry: which(entry.request), error)

    def lose(self, why: str) -> None:
        """Ends all requests: what would answer them is gone."""
        self.end(lambda _: True, lambda _: StateLost(why))

    def end_keys(self, request: AbortRequest) -> int:
        """Ends the job's requests that were asked for with `request.keys`. Returns how many."""
        return self._end(
            lambda entry: entry.request.job_id == request.job_id and entry.key in request.keys,
            lambda asker: stale(asker, request.job_id),
        )

    def _end(
        self,
        which: Callable[[_UnderWay], bool],
        error: Callable[[GenerateRequest], HoneError],
    ) -> int:
        ended = [
            (task, entry)
            for task, entry in self._under_way.items()
            if entry.ended is None and which(entry)
        ]
        for task, entry in ended:
            entry.ended = error(entry.request)
            task.cancel()
        return len(ended)
