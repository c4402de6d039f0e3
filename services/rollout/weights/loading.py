"""Verifies published versions and loads them into the engine that runs. READ FIRST.

Weights replace the model's between two tokens; an adapter is loaded beside the model while sampling
continues. Nothing changes until the version is verified. If a load fails halfway, the weights are
unknown, and nothing is sampled with them.

`LOADERS` has a row for each method by which a version arrives; a new method is a row and its
function. A loader first verifies (`proofs.py`), while the engine still samples, that the version is
the published one and that it fits the model. The result is loaded while nothing is sampled; an
adapter is loaded beside the model's weights (`adapters.py`). Tensors that come from the trainer's
device can be verified only after they were loaded: then every tensor is read back before the engine
samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.rollout.engine import Engine
from services.rollout.running import (
    EXCHANGING,
    Requests,
    Running,
    ServedVersion,
    not_serving,
    owner_of,
    sentence,
)
from services.rollout.weights.copies import Copies, Copy
from services.rollout.weights.proofs import (
    CanaryReading,
    ExpectedVersion,
    announced_digest,
    differing,
    verified_adapter,
    verified_digest,
)
from shared.errors import BadRequest, Conflict, Failed, StateLost, Unavailable
from shared.host.logs import get_logger
from shared.weights.folders import CONFIG, FILES
from shared.wire import (
    AdapterWeights,
    AnyWeights,
    BroadcastWeights,
    DeltaWeights,
    FolderWeights,
    HttpWeights,
    Logprobs,
    ServingWeights,
    SharedWeights,
)

Act = Callable[[Engine], Awaitable[None]]
LoadFolder = Callable[[Engine, Path], Awaitable[None]]


async def nothing(_: Engine) -> None:
    pass


@dataclass(frozen=True)
class VerifiedWeights:
    """A verified version; call `load` while the engine samples nothing. `digest` is the digest of
    its tensors; `received_bytes` came over the network. `meet` is called before, while the engine
    still samples."""

    digest: str
    load: Act
    received_bytes: int = 0
    meet: Act = nothing


@dataclass(frozen=True)
class VerifiedAdapter:
    """The sampler's own copy of an adapter, for `LoadedAdapters.load`."""

    copy: Copy
    digest: str

    @property
    def received_bytes(self) -> int:
        return self.copy.received_bytes


Loader = Callable[[Any, ExpectedVersion, Copies], Awaitable[VerifiedWeights | VerifiedAdapter]]
"""Verifies the version of a reference of one kind."""


# --- files that the sampler sees ------------------------------------------------------------------


def seen(load: LoadFolder, *, refreshed: bool = True) -> Loader:
    """Returns the loader of a folder that the sampler sees. `refreshed`: other hosts may have
    written the folder, so their files are made visible first."""

    async def loader(ref: FolderWeights, expected: ExpectedVersion, _: Copies) -> VerifiedWeights:
        if refreshed:
            await asyncio.to_thread(expected.refresh)
        folder = published_folder(ref, expected.roots)
        digest = await asyncio.to_thread(verified_digest, ref, folder, expected)
        return VerifiedWeights(digest, lambda engine: load(engine, folder))

    return loader


async def after_freeing(engine: Engine, folder: Path) -> None:
    """Frees the engine's memory, then loads."""
    await engine.sleep()
    await engine.wake_weights()
    await engine.load_files(folder)
    await engine.wake_cache()


# --- files that the sampler fetches ---------------------------------------------------------------


async def fetched(ref: HttpWeights, expected: ExpectedVersion, copies: Copies) -> VerifiedWeights:
    """Fetches the whole version, as a copy that is removed once it is loaded."""
    copy = await copies.fetched(ref)
    try:
        digest = await asyncio.to_thread(verified_digest, ref, copy.folder, expected)
    except Failed:
        copies.remove(copy)
        raise

    async def load(engine: Engine) -> None:
        try:
            await engine.load_files(copy.folder)
        finally:
            copies.remove(copy)

    return VerifiedWeights(digest, load, copy.received_bytes)


async def patched(ref: DeltaWeights, expected: ExpectedVersion, copies: Copies) -> VerifiedWeights:
    """Turns the sampler's copy of an earlier version into this one, and keeps it for the next. The
    whole version is fetched if the deltas do not begin with a version that the sampler has, or if
    the result does not have the published digest."""
    received_bytes = 0
    if copies.can_update(ref):
        try:
            copy = await copies.updated(ref)
            received_bytes = copy.received_bytes
            return await _kept(ref, expected, copies, copy, 0)
        except Failed as error:
            get_logger().warning("delta not applied", version=ref.version, reason=error.detail)
            copies.clear()
    return await _kept(ref, expected, copies, await copies.fetched(ref), received_bytes)


async def _kept(
    ref: DeltaWeights, expected: ExpectedVersion, copies: Copies, copy: Copy, received_before: int
) -> VerifiedWeights:
    digest = await asyncio.to_thread(verified_digest, ref, copy.folder, expected)
    copies.keep(copy, digest)
    return VerifiedWeights(
        digest,
        lambda engine: engine.load_files(copy.folder),
        received_before + copy.received_bytes,
    )


async def adapter(
    ref: AdapterWeights, expected: ExpectedVersion, copies: Copies
) -> VerifiedAdapter:
    if not expected.max_lora_rank:
        raise Conflict(
            f"adapter {ref.adapter!r} cannot be loaded: the engine was started without adapters, "
            "or vLLM has none for the model's architecture, or on a GPU for its dtype",
            code="no_adapters",
        )
    copy = await copies.adapter(ref, seen_folder(ref, expected.roots))
    try:
        digest = await asyncio.to_thread(verified_adapter, ref, copy.folder, expected)
    except (Failed, Conflict):
        copies.remove(copy)
        raise
    return VerifiedAdapter(copy, digest)


# --- tensors from the trainer's device ------------------------------------------------------------


async def broadcast(ref: BroadcastWeights, expected: ExpectedVersion, _: Copies) -> VerifiedWeights:
    tensors = {tensor.name: tensor.shape for chunk in ref.chunks for tensor in chunk}
    return _received(ref, announced_digest(ref, tensors, expected), ref.size_bytes)


async def shared(ref: SharedWeights, expected: ExpectedVersion, _: Copies) -> VerifiedWeights:
    tensors = {tensor.name: tensor.shape for tensor in ref.shared}
    return _received(ref, announced_digest(ref, tensors, expected), 0)


def _received(
    ref: BroadcastWeights | SharedWeights, digest: str, received_bytes: int
) -> VerifiedWeights:
    async def load(engine: Engine) -> None:
        await engine.receive(ref)
        check_loaded(await engine.digests(), ref)

    return VerifiedWeights(digest, load, received_bytes, meet=lambda engine: engine.meet(ref))


def check_loaded(digests: dict[str, str], ref: BroadcastWeights | SharedWeights) -> None:
    """Raises Failed, code "not_loaded", unless each tensor of the engine equals the published one.
    `digests` were read back from the engine."""
    if wrong := differing(digests, ref.tensors):
        raise Failed(
            f"{len(wrong)} of the tensors that the trainer sent have other bytes, the first is "
            f"{wrong[0]!r}",
            code="not_loaded",
        )
    if unread := sorted(ref.tensors.keys() - digests.keys()):
        raise Failed(
            f"{len(unread)} tensors could not be read back, the first is {unread[0]!r}",
            code="not_loaded",
        )


LOADERS: dict[str, Loader] = {
    "shm": seen(lambda engine, folder: engine.load_files(folder), refreshed=False),
    "disk": seen(lambda engine, folder: engine.load_files(folder)),
    "reload": seen(after_freeing),
    "restart": seen(lambda engine, folder: engine.restart(folder)),
    "http": fetched,
    "delta": patched,
    "lora": adapter,
    "nccl": broadcast,
    "ipc": shared,
}


async def verify(
    ref: AnyWeights, expected: ExpectedVersion, copies: Copies
) -> VerifiedWeights | VerifiedAdapter:
    """Returns the version, ready to be loaded. Raises BadRequest for an unknown method, and Failed
    if the version differs from `ref` or does not fit `expected`."""
    if ref.method not in LOADERS:
        raise BadRequest(f"got method {ref.method!r}, expected one of {sorted(LOADERS)}")
    return await LOADERS[ref.method](ref, expected, copies)


def seen_folder(ref: AdapterWeights, roots: Sequence[Path]) -> Path | None:
    """Returns the adapter's folder; None if this sampler does not see it and has to fetch its
    files. Raises BadRequest for files that are not an adapter's, and as `published_folder`."""
    if ref.files and {file.name for file in ref.files} != set(FILES):
        names = [file.name for file in ref.files]
        raise BadRequest(f"'files': got {names}, expected {list(FILES)}")
    try:
        return published_folder(ref, roots)
    except Failed:
        if not ref.files:
            raise
        return None


def published_folder(ref: FolderWeights | AdapterWeights, roots: Sequence[Path]) -> Path:
    """Returns the real path of `ref.path`. Raises Failed unless it is a folder below one of
    `roots`, with links resolved."""
    folder = Path(ref.path).resolve()
    allowed = [root.resolve() for root in roots]
    if not any(root in folder.parents for root in allowed):
        raise Failed(
            f"'path': got {ref.path!r}; weights are loaded only from below "
            f"{' or '.join(map(str, allowed))}",
            code="not_seen",
        )
    if not folder.is_dir():
        raise Failed(
            f"'path': got {ref.path!r}, which is not a folder here; does the sampler see the "
            "trainer's volume?",
            code="not_seen",
        )
    return folder


@dataclass(frozen=True)
class Load:
    """The load of the version `ref`. `requests` are the sampler's requests under way."""

    running: Running
    requests: Requests
    ref: AnyWeights

    def __str__(self) -> str:
        return f"version {self.ref.version} of job {self.ref.job_id!r}"

    @property
    def owner(self) -> str:
        return owner_of(self.ref)

    async def run(self, copies: Copies) -> ServingWeights:
        """Loads the version, and returns the weights that serve then."""
        start, running, ref = time.monotonic(), self.running, self.ref
        self._check_alone()
        verified = await verify(ref, running.expected, copies)
        if isinstance(verified, VerifiedAdapter):
            assert isinstance(ref, AdapterWeights)
            paused_s = await self._load_adapter(ref, verified)
        else:
            paused_s = await self._load_weights(verified)
        weights = running.nothing.model_copy(
            update={
                "job_id": ref.job_id,
                "attempt": ref.attempt,
                "epoch": ref.epoch,
                "version": ref.version,
                "digest": verified.digest,
                "load_s": time.monotonic() - start,
                "paused_s": paused_s,
                "received_bytes": verified.received_bytes,
            }
        )
        before = running.served_to(ref.job_id)
        by_adapter = isinstance(verified, VerifiedAdapter)
        tensors = {name: digest for name, digest in ref.tensors.items() if name != CONFIG}
        running.serve(ServedVersion(weights, tensors, before.seen, by_adapter=by_adapter))
        running.adapters.kept = frozenset(running.of_jobs)
        await self._measure_canary(ref, before)
        seconds = round(weights.load_s, 4)
        get_logger().info("weights loaded", job=ref.job_id, version=ref.version, seconds=seconds)
        return running.serving

    def _check_alone(self) -> None:
        """Raises Failed if the load would replace the model's weights under the adapters of other
        jobs."""
        ref, running = self.ref, self.running
        if isinstance(ref, AdapterWeights) and running.is_base:
            return
        others = [
            job_id
            for job_id, served in running.of_jobs.items()
            if job_id != ref.job_id and served.weights.attempt != ref.attempt
        ]
        if others:
            raise Failed(
                f"{self} cannot be loaded: it replaces the model's weights, and the sampler serves "
                f"job {others[0]!r} beside it; `hone resume {ref.job_id} --set weight_sync=http` "
                "gives the job the trainer and its samplers alone",
                code="shared",
            )

    # --- weights in the place of the model's -----------------------------------------------------

    async def _load_weights(self, verified: VerifiedWeights) -> float:
        """Loads between two tokens, and returns for how many seconds nothing was sampled. Requests
        of other jobs end."""
        running, engine = self.running, self.running.engine
        await verified.meet(engine)
        self._end_others()
        start = time.monotonic()
        has_adapters = bool(running.adapters)
        if has_adapters:
            self._exchange()
        try:
            await self._stop_sampling(abort=has_adapters)
            await verified.load(engine)
            await self._wake_cache()
            await engine.set_version(self.owner, self.ref.version)
        except BaseException as error:  # after any kind of error the weights are unknown
            running.lose_base()
            await self._give_up(error)
            raise
        finally:
            running.is_exchanging = False
        running.lose_base()
        running.fault, running.is_asleep = None, False
        await self.running.resume_sampling()
        return time.monotonic() - start

    # --- an adapter beside it --------------------------------------------------------------------

    async def _load_adapter(self, ref: AdapterWeights, verified: VerifiedAdapter) -> float:
        """Loads while the engine samples; a request keeps the adapter that it began with. If other
        weights have replaced the model's own, these are loaded first. Returns for how many seconds
        nothing was sampled."""
        running, start = self.running, time.monotonic()
        if is_base := running.is_base:
            await running.adapters.load(ref, verified.copy)
        else:
            await self._bring_base_back(ref, verified)
        self._end_others()
        if running.fault and is_base:
            await self.running.resume_sampling()
        running.fault = None
        return 0.0 if is_base else time.monotonic() - start

    async def _bring_base_back(self, ref: AdapterWeights, verified: VerifiedAdapter) -> None:
        """Loads the model's own weights again, and then the adapter."""
        running = self.running
        self._exchange()
        try:
            await self._stop_sampling(abort=True)
            await running.engine.load_files(running.engine.folder)
            await self._wake_cache()
            await running.adapters.load(ref, verified.copy)
            await self.running.resume_sampling()
            running.is_base, running.is_asleep = True, False
        except BaseException as error:  # after any kind of error the weights are unknown
            await self._give_up(error)
            raise
        finally:
            running.is_exchanging = False

    # --- the steps of both -----------------------------------------------------------------------

    async def _stop_sampling(self, *, abort: bool) -> None:
        if self.running.is_asleep:
            await self.running.engine.wake_weights()
        else:
            await self.running.engine.pause("abort" if abort else "keep")

    async def _wake_cache(self) -> None:
        if self.running.is_asleep:
            await self.running.engine.wake_cache()

    def _exchange(self) -> None:
        """Ends all requests and refuses new ones, which would be sampled with an adapter on other
        weights than its own, or without their adapter. Clients send them again."""
        self.running.is_exchanging = True
        self.requests.end(lambda _: True, lambda _: Unavailable(EXCHANGING))

    def _end_others(self) -> None:
        """Ends the requests of jobs, attempts and epochs that do not share the engine."""
        by_adapter = isinstance(self.ref, AdapterWeights)
        others = self.running.of_jobs.values() if by_adapter else ()
        stay = {
            owner_of(other.weights) for other in others if other.weights.job_id != self.ref.job_id
        }
        self.requests.end(
            lambda asker: asker.job_id is not None and owner_of(asker) not in {self.owner, *stay},
            lambda asker: not_serving(asker, self.ref),
        )

    # --- when it fails ---------------------------------------------------------------------------

    async def _give_up(self, error: BaseException) -> None:
        """Refuses to sample from now on, and raises the reason: Failed, code "not_loaded", if
        another method may load the version, else StateLost. The caller raises errors that are not
        Exceptions, such as the service's end."""
        reason = await self._distrust(error)
        if isinstance(error, Failed) and error.code == "not_loaded":
            raise Failed(reason, code=error.code) from error
        if isinstance(error, Exception):
            raise StateLost(reason) from error

    async def _distrust(self, error: BaseException) -> str:
        """Refuses to sample from now on, ends all requests, and returns the reason."""
        running = self.running
        running.fault = (
            f"loading {self} failed halfway ({sentence(error)}), so the engine's weights are "
            "unknown; reload a version, or PUT /model"
        )
        running.forget(running.latest.seen)
        get_logger().error("weights unknown", of=str(self), error=sentence(error))
        self.requests.lose(running.fault)
        with contextlib.suppress(StateLost):  # a dead engine has nothing under way
            await running.engine.pause("abort")
        return running.fault

    # --- the canary ------------------------------------------------------------------------------

    async def _measure_canary(self, ref: AnyWeights, before: ServedVersion) -> None:
        """Stores the log-probs of the canary by the weights or the adapter that serve. Raises
        Failed if the load did nothing: the log-probs are the same as before, or have hardly moved
        and the engine still has a tensor of the previous version."""
        running, canary = self.running, ref.canary
        served = running.served_to(ref.job_id)
        if canary is None:
            return
        with running.serving_adapter(ref.job_id) as adapter:
            logprobs = await running.engine.logprobs(list(canary.token_ids), adapter)
        seen = CanaryReading(canary, Logprobs(logprobs))
        problem = ""
        if served.seen and seen.is_unchanged(served.seen):
            problem = "the engine's log-probs of the canary did not change at all"
        elif served.seen and not served.by_adapter and seen.moved_too_little(served.seen):
            problem = await self._old_tensor(ref, before.published)
        if problem:
            why = Failed(problem)
            alone = set(running.of_jobs) <= {ref.job_id}
            reason = await self._distrust(why) if alone else running.drop(ref.job_id, why.detail)
            running.latest = replace(running.latest, published=before.published)
            raise Failed(reason, code="not_loaded")
        weights = served.weights.model_copy(update={"canary_logprobs": seen.logprobs})
        running.serve(replace(served, weights=weights, seen=seen))

    async def _old_tensor(self, ref: AnyWeights, before: Mapping[str, str]) -> str:
        """Returns the name of a tensor of the version `before` that the engine still has; "" if
        none of the changed tensors in one turn of reading back is such a tensor. Bytes of neither
        version do not count, because some kernels keep a matrix in another form."""
        changed = {
            name for name, digest in before.items() if ref.tensors.get(name, digest) != digest
        }
        if not changed:
            return ""
        try:
            digests = await self.running.engine.digests(changed)
        except StateLost:
            raise
        except Exception as error:  # vLLM raises errors of its process as plain Exceptions
            get_logger().warning("weights not read back", of=str(self), error=sentence(error))
            return ""
        old = sorted(name for name in changed & digests.keys() if digests[name] == before[name])
        return f"the engine still has {old[0]!r} of the previous version" if old else ""
