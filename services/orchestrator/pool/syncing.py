"""From the trainer's weights to the samplers', proven by their digest and by what each sampler's
engine computes with them (canary.py)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from services.orchestrator.errors import SyncFailed
from services.orchestrator.pool import canary
from services.orchestrator.pool.gpus import Gpus
from services.orchestrator.pool.sampler_loading import NOT_HERE, Push
from services.orchestrator.pool.services import Services
from services.orchestrator.store.journal import Journal
from shared.errors import Conflict, Failed, HoneError, Unavailable
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.job import Job, SyncMethod
from shared.wire import (
    AnyWeights,
    CheckedWeights,
    NoBody,
    Published,
    SentWeights,
    ServingWeights,
    WeightsRef,
)

NOT_OF_THE_SYNC = frozenset({"stale", "taken", "tensors_differ", "disk_full", "out_of_memory"})
"""Codes of errors that another push does not mend."""

EXPERTS = ".experts."
"""What the names of a mixture's experts have in them, as checkpoints call them."""

CHECK_S = 120.0
"""Seconds for reading an engine's tensors back, which only names what is wrong."""

FULLER: dict[str, SyncMethod] = {
    "disk": "restart",
    "reload": "restart",
    "nccl": "http",
    "ipc": "http",
}
"""What loads the files of a version whose first push failed, where that is not the same again."""

GIVEN_UP = frozenset({"nccl", "ipc", "lora"})
"""Methods that the job does not try again once they failed."""

FEW_CHANGE = 1e-5
"""Largest learning rate at which "auto" takes deltas."""


@dataclass(frozen=True)
class Synced:
    """A version that serves: what was published, and what each sampler answered, after `seconds`
    in all."""

    published: AnyWeights
    answers: list[ServingWeights]
    seconds: float

    def row(self) -> dict[str, Any]:
        """Returns what the run folder keeps of it."""
        ref = self.published
        return {
            "version": ref.version,
            "method": ref.method,
            "digest": ref.digest,
            "size_bytes": ref.size_bytes,
            "seconds": round(self.seconds, 4),
            "samplers": [
                {
                    "replica": serving.replica,
                    "load_s": round(serving.load_s, 4),
                    "paused_s": round(serving.paused_s, 4),
                    "received_bytes": serving.received_bytes,
                    "canary_difference": canary.difference(ref.canary, serving)
                    if ref.canary and serving.canary_logprobs
                    else None,
                }
                for serving in self.answers
            ],
        }


async def sync_weights(services: Services, job: Job, version: int, journal: Journal) -> Synced:
    """Makes every sampler serve the trainer's `version`, with the digest of what was published and
    the log-probs of its canary. One sampler of several that does not is taken out of the pool. If
    none does, it is pushed once more, by a fuller method if there is one; then raises SyncFailed.
    """
    if job.weight_sync != "auto":
        method = services.sync_method or job.weight_sync
        return await _sync(services, job, version, method, journal)
    if services.sync_method in services.given_up:
        services.sync_method = None
    if services.sync_method is None:
        return await _find_way(services, job, version, journal)
    return await _sync(services, job, version, services.sync_method, journal)


async def _find_way(services: Services, job: Job, version: int, journal: Journal) -> Synced:
    """The same by the first candidate that every sampler can take, which later versions go by."""
    start = time.monotonic()
    for method, why in candidates(job, services.gpus, one_host=services.one_host):
        if method in services.given_up:
            continue
        try:
            synced = await _sync(services, job, version, method, journal)
        except SyncFailed as error:
            if error.code not in NOT_HERE:
                raise
            services.given_up.add(method)
            if error.code == "not_met":
                await journal.log(f'{error.detail}; weights do not go by "{method}"')
            continue
        if method not in services.given_up:
            services.sync_method = method
            seconds = round(time.monotonic() - start, 1)
            how = f'weights go by "{method}": {why}'
            await journal.log(how, weight_sync=method, seconds=seconds)
        return synced
    raise AssertionError("the last candidate needs no folder that a sampler may not see")


def candidates(job: Job, gpus: Gpus, *, one_host: bool) -> list[tuple[SyncMethod, str]]:
    """Returns what "auto" tries, in order, and what is known once that works. The last one works
    wherever the sampler reaches the trainer."""
    direct = gpus.method() if job.has_live_weights else None
    return [*([direct] if direct else []), *_by_files(job, one_host=one_host)]


def _by_files(job: Job, *, one_host: bool) -> list[tuple[SyncMethod, str]]:
    rate = job.learning_rate
    folders = "folders" if one_host else "shared memory"
    where = f"not every sampler sees the trainer's {folders}"
    last: tuple[SyncMethod, str] = (
        ("delta", f"{where}, and at a learning rate of {rate:g} few elements change in a step")
        if rate <= FEW_CHANGE
        else ("http", f"{where}, and at a learning rate of {rate:g} most elements change in a step")
    )
    memory: tuple[SyncMethod, str] = ("shm", "every sampler sees the trainer's shared memory")
    # several hosts may share a volume, and what is fetched comes sooner than what it shows them
    volume: list[tuple[SyncMethod, str]] = [
        ("disk", "every sampler sees HONE_RUNS_DIR, and not the trainer's shared memory"),
    ]
    adapter: list[tuple[SyncMethod, str]] = [
        ("lora", "the job trains an adapter, and the engine takes it beside the model")
    ]
    return [*(adapter if job.served_rank else []), memory, *(volume if one_host else []), last]


async def _sync(
    services: Services, job: Job, version: int, method: SyncMethod, journal: Journal
) -> Synced:
    try:
        return await _push(services, job, version, method, journal)
    except SyncFailed as error:
        if error.code in NOT_HERE and (_is_trial(services, job) or error.code != "not_met"):
            raise  # it would be the same the second time
        # in the place of an adapter the merged weights
        fuller = "http" if method == "lora" else FULLER.get(method, method)
        how = "" if fuller == method else f' by "{fuller}"'
        if method in GIVEN_UP:
            services.given_up.add(method)
            services.sync_method = None if job.weight_sync == "auto" else fuller
            how = f'{how}, and later versions do not go by "{method}"'
        await journal.warn(f"{error.detail}; the weights are pushed again{how}")
        return await _push(services, job, version, fuller, journal, again=True)


async def _push(
    services: Services,
    job: Job,
    version: int,
    method: SyncMethod,
    journal: Journal,
    *,
    again: bool = False,
) -> Synced:
    start = time.monotonic()
    published = await _published(services, version, method)
    fuller = Fuller(services, published)
    try:
        if isinstance(published.root, SentWeights) and services.want_files:
            await _write_files(fuller, journal)
        ref = await fuller() if again else published
        push = Push(ref, fuller, prove, job.drain_before_sync, is_trial=_is_trial(services, job))
        answers = await services.push_weights(push)
    except SyncFailed:
        raise
    except (Failed, Conflict) as error:
        if error.code in NOT_OF_THE_SYNC:
            raise
        raise SyncFailed(f"weight sync: {error.detail}", code=error.code) from error
    for serving in answers:
        if published.root.canary and not serving.canary_logprobs:
            await journal.warn(
                f"{serving.replica or 'the sampler'} gave no log-probs for version {version} (it "
                "is paused): only their digest shows that it holds the trainer's weights"
            )
    return Synced(published.root, answers, time.monotonic() - start)


def _is_trial(services: Services, job: Job) -> bool:
    return job.weight_sync == "auto" and services.sync_method is None


async def _published(services: Services, version: int, method: SyncMethod) -> WeightsRef:
    """Returns the reference of the version. Raises SyncFailed where it cannot be taken off the
    trainer's device, as files can, or could take longer than it is waited for."""
    try:
        published = await services.publish_weights(version, method)
        if isinstance(published.root, SentWeights):
            services.check_transfer(published.root)
        return published
    except (Failed, Conflict) as error:
        if method not in GIVEN_UP or error.code in NOT_OF_THE_SYNC | {"out_of_order"}:
            raise
        raise SyncFailed(f"weight sync: {error.detail}", code="not_met") from error


async def _write_files(fuller: Fuller, journal: Journal) -> None:
    """Has what is sent written as files too, for samplers that are away, while the trainer is at
    it. They lose a step at most if that fails. Raises SyncFailed if the files are of other weights
    than what was sent."""
    try:
        await fuller()
    except SyncFailed:
        raise
    except (Failed, Unavailable) as error:
        await journal.warn(f"samplers that are away join later: {error.detail}")


class Fuller:
    """The same version for a sampler that failed to load it, or joins after it was sent: loaded in
    any case, and by the fuller method, if it has one."""

    def __init__(self, services: Services, published: WeightsRef) -> None:
        self._services = services
        self._published = published
        self._files: AnyWeights | None = None
        self._asking = asyncio.Lock()

    async def __call__(self) -> WeightsRef:
        """Returns the reference. What was sent becomes files when they are first asked for: raises
        Unavailable once the trainer has gone on."""
        ref = self._published.root
        if isinstance(ref, SentWeights):
            async with self._asking:
                self._files = self._files or await self._written(ref)
            ref = self._files
        method = FULLER.get(ref.method, ref.method)
        return WeightsRef(ref.model_copy(update={"again": True, "method": method}))

    async def _written(self, sent: SentWeights) -> AnyWeights:
        try:
            files = (await self._services.publish_weights(sent.version, "http")).root
        except Conflict as error:
            if error.code != "out_of_order":
                raise
            raise Unavailable(
                f"version {sent.version} went from GPU to GPU, and the trainer has gone on: a "
                "sampler that joins gets the next version"
            ) from error
        if files.digest != sent.digest:
            raise SyncFailed(
                f"weight sync: the files of version {sent.version} have digest "
                f"{files.digest[:12]}, and what was sent {sent.digest[:12]}"
            )
        return files


async def prove(sampler: Client, published: WeightsRef, serving: ServingWeights) -> None:
    """Raises SyncFailed unless the sampler serves what was published."""
    ref = published.root
    if problem := fault(ref, serving):
        raise SyncFailed(f"weight sync: {problem}")
    if not ref.canary or not serving.canary_logprobs:
        return
    if problem := canary.fault(ref.canary, serving):
        checked = await _read_back(sampler)
        if _holds_all(checked) and canary.may_be_rounding(ref.canary, serving):
            get_logger().warning(
                "the canary differs, but no tensor that was read back from the engine does",
                version=ref.version,
                unread=0 if isinstance(checked, HoneError) else len(checked.unread),
                difference=canary.difference(ref.canary, serving),
            )
            return
        raise SyncFailed(
            f"weight sync: the sampler does not compute with version {ref.version}: {problem} "
            f"({_describe(checked)})"
        )


async def _read_back(sampler: Client) -> CheckedWeights | HoneError:
    """Returns which tensors of the engine are wrong, or why they could not be read back."""
    try:
        return await sampler.call(
            "POST", "/weights/check", NoBody(), CheckedWeights, deadline_s=CHECK_S
        )
    except HoneError as error:
        return error


def _holds_all(checked: CheckedWeights | HoneError) -> bool:
    """Returns whether every tensor was read back, and none differs. A mixture's experts need not
    be: some kernels keep them in an order that the sampler does not know."""
    if not isinstance(checked, CheckedWeights) or checked.differing:
        return False
    return all(EXPERTS in name for name in checked.unread)


def _describe(checked: CheckedWeights | HoneError) -> str:
    if isinstance(checked, HoneError):
        return f"its tensors could not be read back: {checked.detail}"
    if not checked.differing:
        read = checked.num_tensors - len(checked.unread)
        return f"the {read} tensors of the engine that could be read back are those published"
    return (
        f"{len(checked.differing)} of {checked.num_tensors} tensors of the engine are not those "
        f"published, the first is {checked.differing[0]!r}"
    )


def fault(published: Published, serving: ServingWeights) -> str | None:
    """Returns why what the sampler says it serves is not what the trainer published, or None."""
    if (serving.version, serving.digest) != (published.version, published.digest):
        return (
            f"the trainer published version {published.version} with digest "
            f"{published.digest[:12]}, but the sampler serves version {serving.version} with "
            f"digest {str(serving.digest)[:12]}"
        )
    return None
