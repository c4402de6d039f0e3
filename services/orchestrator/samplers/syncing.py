"""From the trainer's weights to the samplers', proven by their digest and by what each sampler's
engine computes with them (canary.py)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from services.orchestrator.errors import SyncFailed
from services.orchestrator.samplers.canary import change, difference, prove
from services.orchestrator.samplers.sampler import NOT_HERE, Push
from services.orchestrator.samplers.services import Services
from services.orchestrator.store.folder import Proof, RunFolder
from services.orchestrator.store.journal import Journal
from services.orchestrator.tasks import to_disk
from shared.errors import Conflict, Failed, Unavailable
from shared.job import SYNC_METHODS, Job, SyncMethod
from shared.wire import (
    AnyWeights,
    SentWeights,
    ServingWeights,
    WeightsRef,
)

NOT_OF_THE_SYNC = frozenset({"stale", "taken", "tensors_differ", "disk_full", "out_of_memory"})
"""Codes of errors that another push does not fix."""

FEW_CHANGE = 1e-5
"""Largest learning rate at which "auto" takes deltas."""

Candidate = tuple[SyncMethod, str]
"""A method that "auto" tries, and what is known once it works."""


@dataclass(frozen=True)
class Synced:
    """A version that serves: what was published, and what each sampler answered, after `seconds`
    in all. `moved` is how far a step moved its canary since the version before (`change` in
    canary.py); None: not known."""

    published: AnyWeights
    answers: list[ServingWeights]
    seconds: float
    moved: float | None = None

    def row(self) -> dict[str, Any]:
        """Returns what the run folder keeps of it."""
        ref = self.published
        return {
            "version": ref.version,
            "method": ref.method,
            "digest": ref.digest,
            "size_bytes": ref.size_bytes,
            "seconds": round(self.seconds, 4),
            "canary_change": self.moved,
            "samplers": [
                {
                    "replica": serving.replica,
                    "load_s": round(serving.load_s, 4),
                    "paused_s": round(serving.paused_s, 4),
                    "received_bytes": serving.received_bytes,
                    "canary_difference": difference(ref.canary, serving)
                    if ref.canary and serving.canary_logprobs
                    else None,
                }
                for serving in self.answers
            ],
        }

    @property
    def proof(self) -> Proof | None:
        """The version with its canary; None if it has none."""
        ref = self.published
        if ref.canary is None:
            return None
        return Proof(version=ref.version, digest=ref.digest, canary=ref.canary)


async def sync_weights(
    services: Services, folder: RunFolder, job: Job, version: int, journal: Journal
) -> Synced:
    """Makes every sampler serve the trainer's `version`, with the digest of what was published and
    the log-probs of its canary, and records it in the run folder. One sampler of several that does
    not is taken out of the pool. If none does, it is pushed again, by another method if there
    is one; then raises SyncFailed."""
    synced = await _synced(services, job, version, journal)
    await to_disk(folder.append_sync, synced.row(), synced.proof)
    return synced


async def _synced(services: Services, job: Job, version: int, journal: Journal) -> Synced:
    if job.weight_sync != "auto":
        method = services.sync_method or job.weight_sync
        return await _sync(services, job, version, method, journal)
    if services.sync_method in services.pool.given_up:
        services.sync_method = None
    if services.sync_method is None:
        return await _find_way(services, job, version, journal)
    return await _sync(services, job, version, services.sync_method, journal)


async def _find_way(services: Services, job: Job, version: int, journal: Journal) -> Synced:
    """The same by the first candidate that every sampler can take, which later versions go by."""
    start = time.monotonic()
    for method, why in candidates(job, gpus_of(services), one_host=services.one_host):
        if method in services.pool.given_up:
            continue
        try:
            synced = await _sync(services, job, version, method, journal)
        except SyncFailed as error:
            if error.code not in NOT_HERE:
                raise
            services.pool.given_up.add(method)
            if error.code == "not_met":
                await journal.log(f'{error.detail}; weights do not go by "{method}"')
            continue
        if method not in services.pool.given_up:
            services.sync_method = method
            seconds = round(time.monotonic() - start, 1)
            how = f'weights go by "{method}": {why}'
            await journal.log(how, weight_sync=method, seconds=seconds)
        return synced
    raise AssertionError("the last candidate needs no folder that a sampler may not see")


# --- the candidates of "auto" --------------------------------------------------------------------


@dataclass(frozen=True)
class Gpus:
    """The GPU that the trainer sends from and the GPUs of each sampler, by UUID; none on a CPU.
    `one_space`: all are in one `memory_space` (shared/weights/meeting.py)."""

    trainer: str | None
    samplers: tuple[tuple[str, ...], ...]
    one_space: bool = False


def gpus_of(services: Services) -> Gpus:
    """Returns where weights come from, and where they go to: the samplers that are up."""
    up = services.pool.up()
    trainer, space = services.trainer_gpu
    spaces = {space, *(sampler.memory_space for sampler in up)}
    one_space = None not in spaces and len(spaces) == 1
    return Gpus(trainer, tuple(sampler.gpus for sampler in up), one_space)


def candidates(job: Job, gpus: Gpus, *, one_host: bool) -> list[Candidate]:
    """Returns what "auto" tries, in order, and what is known once that works. The last one works
    wherever the sampler reaches the trainer."""
    rate = job.learning_rate
    folders = "folders" if one_host else "shared memory"
    where = f"not every sampler sees the trainer's {folders}"
    few = rate <= FEW_CHANGE
    change = f"at a learning rate of {rate:g} {'few' if few else 'most'} elements change in a step"
    every: list[Candidate | None] = [
        _from_gpu_to_gpu(gpus) if job.has_live_weights else None,
        ("lora", "the job trains an adapter, and the engine takes it beside the model")
        if job.served_rank
        else None,
        ("shm", "every sampler sees the trainer's shared memory"),
        # Several hosts may share a volume, and fetched weights come sooner than it shows them.
        ("disk", "every sampler sees HONE_RUNS_DIR, and not the trainer's shared memory")
        if one_host
        else None,
        ("delta" if few else "http", f"{where}, and {change}"),
    ]
    return [candidate for candidate in every if candidate]


def _from_gpu_to_gpu(gpus: Gpus) -> Candidate | None:
    """Returns how weights get to the samplers without passing through files; None if they
    cannot."""
    if gpus.trainer is None or not gpus.samplers or not all(gpus.samplers):
        return None
    if gpus.samplers == ((gpus.trainer,),) and gpus.one_space:
        return "ipc", f"trainer and sampler compute on the same GPU, {gpus.trainer}"
    if any(gpus.trainer in its_gpus for its_gpus in gpus.samplers):
        return None  # NCCL takes each GPU once, and containers read each other's no memory
    num_gpus = sum(map(len, gpus.samplers))
    return "nccl", f"the trainer's GPU and the samplers' {num_gpus} are different ones"


# --- one version ---------------------------------------------------------------------------------


async def _sync(
    services: Services, job: Job, version: int, method: SyncMethod, journal: Journal
) -> Synced:
    try:
        return await _push(services, job, version, method, journal)
    except SyncFailed as error:
        if error.code in NOT_HERE and (_is_trial(services, job) or error.code != "not_met"):
            raise  # it would be the same the second time
        traits = SYNC_METHODS[method]
        other = traits.published_again or method
        how = "" if other == method else f' by "{other}"'
        if traits.is_given_up:
            services.pool.given_up.add(method)
            services.sync_method = None if job.weight_sync == "auto" else other
            how = f'{how}, and later versions do not go by "{method}"'
        await journal.warn(f"{error.detail}; the weights are pushed again{how}")
        return await _push(services, job, version, other, journal, again=True)


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
    fallback = Fallback(services, published)
    try:
        if isinstance(published.root, SentWeights) and services.pool.want_files:
            await _write_files(fallback, journal)
        ref = await fallback() if again else published
        push = Push(ref, fallback, prove, job.drain_before_sync, is_trial=_is_trial(services, job))
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
    moved, services.published = change(services.published, published.root), published.root
    return Synced(published.root, answers, time.monotonic() - start, moved)


def _is_trial(services: Services, job: Job) -> bool:
    return job.weight_sync == "auto" and services.sync_method is None


async def _published(services: Services, version: int, method: SyncMethod) -> WeightsRef:
    """Returns the reference of the version. Raises SyncFailed where it cannot be taken off the
    trainer's device, as files can, or could take longer than it is waited for."""
    try:
        published = await services.publish_weights(version, method)
        if isinstance(published.root, SentWeights):
            _check_transfer(published.root, services.settings.sync_deadline_s)
        return published
    except (Failed, Conflict) as error:
        if not SYNC_METHODS[method].is_given_up or error.code in NOT_OF_THE_SYNC | {"out_of_order"}:
            raise
        raise SyncFailed(f"weight sync: {error.detail}", code="not_met") from error


def _check_transfer(ref: SentWeights, deadline_s: float) -> None:
    """Raises Failed where a sampler could still receive once its answer is not waited for any more:
    after `deadline_s`, the time for a sync."""
    if ref.bound_s > deadline_s:
        raise Failed(
            f"HONE_TRANSFER_DEADLINE_S of the trainer is {ref.deadline_s:g} s, so a sampler "
            f"may take {ref.bound_s:g} s to receive a version, and the orchestrator waits "
            f"{deadline_s:g} s for it (HONE_SYNC_DEADLINE_S); lower the one, or raise the other"
        )


async def _write_files(fallback: Fallback, journal: Journal) -> None:
    """Has what is sent written as files too, for samplers that are unreachable, while the trainer
    is at it. They lose a step at most if that fails. Raises SyncFailed if the files are of other
    weights than what was sent."""
    try:
        await fallback()
    except SyncFailed:
        raise
    except (Failed, Unavailable) as error:
        await journal.warn(f"samplers that are unreachable join later: {error.detail}")


class Fallback:
    """The same version for a sampler that failed to load it, or joins after it was sent: loaded in
    any case, and in another way if its method has one (`SyncTraits.loaded_again`)."""

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
                self._files = self._files or await self._written(ref, ref.method)
            ref = self._files
        method = SYNC_METHODS[ref.method].loaded_again or ref.method
        return WeightsRef(ref.model_copy(update={"again": True, "method": method}))

    async def _written(self, sent: SentWeights, sent_by: SyncMethod) -> AnyWeights:
        try:
            method = SYNC_METHODS[sent_by].published_again
            assert method is not None, (
                "every method that sends has another method that writes files"
            )
            files = (await self._services.publish_weights(sent.version, method)).root
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
