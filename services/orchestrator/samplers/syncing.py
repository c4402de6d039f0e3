"""From the trainer's weights to the samplers', proven by their digest and by what each sampler's
engine computes with them.

The digest that a sampler answers is of the files it read. What its engine then computes with is
another thing: a load that did nothing, that left a tensor out or put it into another's place. So
trainer and sampler each give log-probs of the same sequence, the canary, which have to agree as far
as the rounding of their dtypes allows.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import pstdev
from typing import Any, Protocol

from services.orchestrator.errors import SyncFailed
from services.orchestrator.samplers.clients import TrainerClient
from services.orchestrator.samplers.sampler import NOT_HERE, Push
from services.orchestrator.samplers.services import Services
from services.orchestrator.tasks import write_despite_cancel
from shared.errors import Conflict, Failed, HoneError, Unavailable
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.job import SYNC_METHODS, Job, SyncMethod
from shared.wire import (
    AnyWeights,
    Canary,
    CheckedWeights,
    NoBody,
    Published,
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


class SyncLog(Protocol):
    def append_sync(self, row: dict[str, Any]) -> None:
        """Notes how a version reached the samplers."""
        ...


class Events(Protocol):
    """The job's events."""

    async def log(self, message: str, **data: Any) -> None: ...

    async def warn(self, message: str, **data: Any) -> None: ...


@dataclass(frozen=True)
class SyncResult:
    """A version that serves: what was published, and what each sampler answered, after `seconds`
    in all. `moved` is how far a step moved its canary since the version before (`change`), and
    `rounding` how far rounding alone may have (`noise`); None: not known."""

    published: AnyWeights
    answers: list[ServingWeights]
    seconds: float
    moved: float | None = None
    rounding: float | None = None

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
            "canary_rounding": self.rounding,
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


async def sync_weights(
    services: Services, log: SyncLog, version: int, journal: Events
) -> SyncResult:
    """Makes every sampler serve the trainer's `version`, with the digest of what was published and
    the log-probs of its canary, and records it in the run folder. One sampler of several that does
    not is taken out of the pool. If none does, it is pushed again, by another method if there
    is one; then raises SyncFailed."""
    synced = await _synced(services, version, journal)
    await write_despite_cancel(log.append_sync, synced.row())
    return synced


async def _synced(services: Services, version: int, journal: Events) -> SyncResult:
    asked = services.caller.job.weight_sync
    if asked != "auto":
        return await _sync(services, version, services.samplers.sync_method or asked, journal)
    if services.samplers.sync_method in services.samplers.pool.given_up:
        services.samplers.sync_method = None
    if services.samplers.sync_method is None:
        return await _find_way(services, version, journal)
    return await _sync(services, version, services.samplers.sync_method, journal)


async def _find_way(services: Services, version: int, journal: Events) -> SyncResult:
    """As `_sync`, by the first candidate method that every sampler supports; later versions use
    that method too."""
    start, job, one_host = time.monotonic(), services.caller.job, services.samplers.one_host
    for method, why in candidates(job, gpus_of(services), one_host=one_host):
        if method in services.samplers.pool.given_up:
            continue
        try:
            synced = await _sync(services, version, method, journal)
        except SyncFailed as error:
            if error.code not in NOT_HERE:
                raise
            services.samplers.pool.given_up.add(method)
            if error.code == "not_met":
                await journal.log(f'{error.detail}; weights do not go by "{method}"')
            continue
        if method not in services.samplers.pool.given_up:
            services.samplers.sync_method = method
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
    up = services.samplers.pool.up()
    trainer, space = services.trainer.gpu, services.trainer.memory_space
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
    services: Services, version: int, method: SyncMethod, journal: Events
) -> SyncResult:
    try:
        return await _push(services, version, method, journal)
    except SyncFailed as error:
        if error.code in NOT_HERE and (_is_trial(services) or error.code != "not_met"):
            raise  # it would be the same the second time
        traits = SYNC_METHODS[method]
        other = traits.published_again or method
        how = "" if other == method else f' by "{other}"'
        if traits.is_given_up:
            services.samplers.pool.given_up.add(method)
            is_auto = services.caller.job.weight_sync == "auto"
            services.samplers.sync_method = None if is_auto else other
            how = f'{how}, and later versions do not go by "{method}"'
        await journal.warn(f"{error.detail}; the weights are pushed again{how}")
        return await _push(services, version, other, journal, again=True)


async def _push(
    services: Services, version: int, method: SyncMethod, journal: Events, *, again: bool = False
) -> SyncResult:
    start = time.monotonic()
    published = await _published(services, version, method)
    fallback = Fallback(services.trainer, published)
    try:
        if isinstance(published.root, SentWeights) and services.samplers.pool.want_files:
            await _write_files(fallback, journal)
        ref = await fallback() if again else published
        drains = services.caller.job.drain_before_sync
        push = Push(ref, fallback, prove, drains, is_trial=_is_trial(services))
        answers = await services.samplers.push_weights(push)
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
    before = services.samplers.published
    moved, rounding = change(before, published.root), noise(before, published.root)
    services.samplers.published = published.root
    return SyncResult(published.root, answers, time.monotonic() - start, moved, rounding)


def _is_trial(services: Services) -> bool:
    is_auto = services.caller.job.weight_sync == "auto"
    return is_auto and services.samplers.sync_method is None


async def _published(services: Services, version: int, method: SyncMethod) -> WeightsRef:
    """Returns the reference of the version. Raises SyncFailed where it cannot be taken off the
    trainer's device, as files can."""
    try:
        return await services.trainer.publish_weights(version, method)
    except (Failed, Conflict) as error:
        if not SYNC_METHODS[method].is_given_up or error.code in NOT_OF_THE_SYNC | {"out_of_order"}:
            raise
        raise SyncFailed(f"weight sync: {error.detail}", code="not_met") from error


async def _write_files(fallback: Fallback, journal: Events) -> None:
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

    def __init__(self, trainer: TrainerClient, published: WeightsRef) -> None:
        self._trainer = trainer
        self._published = published
        self._files: AnyWeights | None = None
        self._asking = asyncio.Lock()

    async def __call__(self) -> WeightsRef:
        """Returns the reference. Weights that were sent without files are written as files at the
        first call. Raises Unavailable if the trainer has begun the next step."""
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
            files = (await self._trainer.publish_weights(sent.version, method)).root
        except Conflict as error:
            if error.code != "out_of_order":
                raise
            raise Unavailable(
                f"version {sent.version} went from GPU to GPU, and the trainer has begun the next "
                "step: a sampler that joins gets the next version"
            ) from error
        if files.digest != sent.digest:
            raise SyncFailed(
                f"weight sync: the files of version {sent.version} have digest "
                f"{files.digest[:12]}, and what was sent {sent.digest[:12]}"
            )
        return files


# --- the canary -----------------------------------------------------------------------------------

EPSILONS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number: rounding errors are multiples of it."""

LEAST = {"float32": 1e-3, "float16": 0.005, "bfloat16": 0.02}
"""Nats by which log-probs may differ on average over the sequence in any case. Two right
implementations differ by about 1e-6 in float32; in bfloat16 by 0.02 in two layers."""

NOISES = 2.0
"""How many times the trainer's own noise the difference may be. vLLM's was 0.5 to 1.0 times that in
models of 2 to 48 layers (`services/trainer/learning/policy.py`)."""

MOST = 0.5
"""Share of the log-probs' standard deviation that a difference may be in any case, whatever the
noise: an unrelated model's differs by 0.96 to 1.1 times that."""

EXPERTS = ".experts."
"""What the names of a mixture's experts have in them, as checkpoints call them."""

CHECK_S = 120.0
"""Seconds for reading an engine's tensors back, which only names what is wrong."""

ROUNDING = 0.1
"""Share of the log-probs' standard deviation that rounding to 16 bits may make them differ by."""


def difference(canary: Canary, serving: ServingWeights) -> float:
    """Returns the mean absolute difference of the log-probs, in nats; infinity if they are not of
    the same tokens."""
    return _mean_gap(list(canary.logprobs), list(serving.canary_logprobs))


def _mean_gap(ours: list[float], theirs: list[float]) -> float:
    if len(ours) != len(theirs):
        return float("inf")
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    mean = sum(gaps) / len(gaps)
    return mean if mean == mean else float("inf")  # NaN: the sampler's are not finite


def change(before: Published | None, after: Published) -> float | None:
    """Returns how far the steps between two versions moved the trainer's log-probs of the canary:
    the mean absolute difference in nats, per step. None: it is not known."""
    if before is None or before.canary is None or after.canary is None:
        return None
    num_steps = after.version - before.version
    if num_steps < 1 or before.canary.token_ids != after.canary.token_ids:
        return None
    moved = _mean_gap(list(before.canary.logprobs), list(after.canary.logprobs)) / num_steps
    return moved if moved < float("inf") else None


def noise(before: Published | None, after: Published) -> float | None:
    """Returns how far rounding alone moves the canary, in nats per step like `change`, by the
    trainer's dtype and model; None: it is not known."""
    if before is None or after.canary is None or after.version <= before.version:
        return None
    return after.canary.noise / (after.version - before.version)


def tolerance(canary: Canary, serving: ServingWeights) -> float:
    """Returns the allowed rounding error in nats: `NOISES` times the trainer's own noise, in the
    less precise dtype of the two, but at most `MOST` of the log-probs' standard deviation: where
    rounding errors grow without bound, as in sharp attention, the noise is no measure. A load that
    did nothing is detected here if the new weights moved the log-probs by more than this; if the
    log-probs are the same bits as before, or have hardly moved, the sampler itself detects it."""
    dtype = max(canary.dtype, serving.dtype, key=_epsilon)
    coarser = _epsilon(dtype) / _epsilon(canary.dtype)
    expected = min(NOISES * canary.noise * coarser, MOST * pstdev(canary.logprobs))
    return max(LEAST.get(dtype, max(LEAST.values())), expected)


def _epsilon(dtype: str) -> float:
    return EPSILONS.get(dtype, max(EPSILONS.values()))


def fault(canary: Canary, serving: ServingWeights) -> str | None:
    """Returns why the sampler cannot hold the trainer's weights, or None."""
    found, allowed = difference(canary, serving), tolerance(canary, serving)
    if found <= allowed:
        return None
    return (
        f"the log-probs of the canary differ by {found:.4g} nats on average, expected at most "
        f"{allowed:.3g} in {canary.dtype}"
    )


def may_be_rounding(canary: Canary, serving: ServingWeights) -> bool:
    """Returns whether the rounding of 16 bits, which grows with the layers and with the spread of
    the logits, may alone have made the difference. It says nothing of which weights these are: a
    query matrix of another layer changes as little."""
    if canary.dtype == serving.dtype == "float32":
        return False
    return difference(canary, serving) <= ROUNDING * pstdev(canary.logprobs)


async def prove(sampler: Client, published: WeightsRef, serving: ServingWeights) -> None:
    """Raises SyncFailed unless the sampler serves what was published."""
    ref = published.root
    if (serving.version, serving.digest) != (ref.version, ref.digest):
        raise SyncFailed(
            f"weight sync: the trainer published version {ref.version} with digest "
            f"{ref.digest[:12]}, but the sampler serves version {serving.version} with digest "
            f"{str(serving.digest)[:12]}"
        )
    if not ref.canary or not serving.canary_logprobs:
        return
    if problem := fault(ref.canary, serving):
        checked = await _read_back(sampler)
        if _holds_all(checked, ref) and may_be_rounding(ref.canary, serving):
            get_logger().warning(
                "the canary differs, but no tensor that was read back from the engine does",
                version=ref.version,
                unread=0 if isinstance(checked, HoneError) else len(checked.unread),
                difference=difference(ref.canary, serving),
            )
            return
        raise SyncFailed(
            f"weight sync: the sampler does not compute with version {ref.version}: {problem} "
            f"({_describe(checked, ref)})"
        )


async def _read_back(sampler: Client) -> CheckedWeights | HoneError:
    """Returns which tensors of the engine are wrong, or why they could not be read back."""
    try:
        return await sampler.call(
            "POST", "/weights/check", NoBody(), CheckedWeights, deadline_s=CHECK_S
        )
    except HoneError as error:
        return error


def _is_of_another(checked: CheckedWeights, ref: Published) -> bool:
    """Whether a job that shares the sampler has loaded a version meanwhile, which was read back."""
    return checked.job_id is not None and checked.job_id != ref.job_id


def _holds_all(checked: CheckedWeights | HoneError, ref: Published) -> bool:
    """Returns whether every tensor of the version was read back, and none differs. A mixture's
    experts need not be: some kernels keep them in an order that the sampler does not know."""
    if not isinstance(checked, CheckedWeights) or checked.differing:
        return False
    if _is_of_another(checked, ref):
        return False
    return all(EXPERTS in name for name in checked.unread)


def _describe(checked: CheckedWeights | HoneError, ref: Published) -> str:
    if isinstance(checked, HoneError):
        return f"its tensors could not be read back: {checked.detail}"
    if _is_of_another(checked, ref):
        return "a job that shares the sampler has loaded a version meanwhile"
    if not checked.differing:
        read = checked.num_tensors - len(checked.unread)
        return f"the {read} tensors of the engine that could be read back are those published"
    return (
        f"{len(checked.differing)} of {checked.num_tensors} tensors of the engine are not those "
        f"published, the first is {checked.differing[0]!r}"
    )
