"""The engine that runs, the weights that it is known to have, and whether it may sample a
request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from services.rollout.engine import Adapter, Engine
from services.rollout.fencing import Requests, owner_of
from services.rollout.weights.adapters import LoadedAdapters
from services.rollout.weights.proofs import Expected, Seen, differing, given_tensors
from shared.errors import BadRequest, Conflict, HoneError, StateLost, Unavailable
from shared.http.connecting import since
from shared.http.operations import Starting
from shared.wire import (
    CheckedWeights,
    EngineSpec,
    Published,
    ServingWeights,
)

ASLEEP = "the sampler sleeps while the trainer has its GPU; it wakes with the next weights"

EXCHANGING = "the weights of the engine's model are being exchanged; ask again"


@dataclass(frozen=True)
class Start:
    """The start of an engine for `model`, under way since `at` (Unix time)."""

    model: str
    at: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"starting the engine for {self.model!r}"

    @property
    def told(self) -> Starting:
        return Starting(f"{self}, {since(self.at)}")


@dataclass(frozen=True)
class Served:
    """A version that serves. `published` has the digests of its tensors, and `seen` the engine's
    log-probs of its canary. `by_adapter`: it is an adapter beside the model."""

    weights: ServingWeights
    published: dict[str, str] = field(default_factory=dict)
    seen: Seen | None = None
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
    expected: Expected
    adapters: LoadedAdapters
    nothing: ServingWeights
    latest: Served
    of_jobs: dict[str, Served] = field(default_factory=dict)
    is_base: bool = True
    is_paused: bool = False
    is_asleep: bool = False
    is_exchanging: bool = False
    fault: str | None = None

    # --- may it be asked? ------------------------------------------------------------------------

    async def unready(self) -> str | None:
        """Returns why nothing would be sampled, or None."""
        return await self.failure() or self._why_asleep()

    async def failure(self) -> str | None:
        """Returns why the engine needs to be replaced, or needs another version; None if it
        works."""
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

    def served_to(self, job_id: str | None) -> Served:
        """Returns the version that serves the job; the latest one for no job, and for a job that
        has none."""
        return self.of_jobs.get(job_id or "", self.latest)

    def serve(self, served: Served) -> None:
        """Makes the version serve: beside other adapters, or alone."""
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
        """Raises Conflict, code "no_adapters", if the model has not its own weights."""
        if not self.is_base:
            raise Conflict(
                "other weights have replaced the model's own, so neither these nor an adapter of "
                "theirs can be sampled",
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
        """Returns the key of the prefixes that a version of the job has cached, by default of the
        version that serves."""
        serving = self.served_to(job_id).weights
        return f"{owner_of(serving)}:{serving.version if version is None else version}"

    def serving_adapter(self, job_id: str | None) -> AbstractContextManager[Adapter | None]:
        """Keeps the adapter that serves the job loaded during a request. None if none does."""
        by_adapter = self.served_to(job_id).by_adapter
        return self.adapters.using(self.adapters.of_job(job_id) if by_adapter else None)

    async def checked(self) -> CheckedWeights:
        """Returns which of the engine's tensors differ from the version that serves, or from the
        model that it was started with. With an adapter both are compared."""
        published, found = self.latest.published, await self.engine.digests()
        if self.is_base:
            base = await asyncio.to_thread(given_tensors, self.engine.folder, self.engine.dtype)
            published = {**base, **published}
        with self.serving_adapter(self.serving.job_id) as adapter:
            if adapter:
                found |= await self.engine.adapter_digests(adapter)
        return CheckedWeights(
            version=self.serving.version,
            job_id=self.serving.job_id,
            replica=self.serving.replica,
            num_tensors=len(published),
            differing=differing(found, published),
            unread=tuple(sorted(published.keys() - found.keys())),
        )

    def lose_base(self) -> None:
        """Other weights replace the model's own, and the loaded adapters do not fit them."""
        self.adapters.forget()
        self.is_base = False

    def forget(self, seen: Seen | None = None) -> None:
        """No version serves from now on. `seen` is what the next one is compared with."""
        self.latest = Served(self.nothing, seen=seen)
        self.of_jobs.clear()

    def drop(self, job_id: str, why: str) -> str:
        """Forgets the version of one of several jobs, and returns the reason as a sentence."""
        served = self.of_jobs.pop(job_id)
        self.latest = Served(self.nothing, seen=served.seen)
        return f"version {served.weights.version} of job {job_id!r} does not serve: {why}"

    async def fall_asleep(self, requests: Requests) -> None:
        """Frees the engine's memory and gives up its weights. An engine that sleeps stays asleep.
        Raises StateLost if it fails: then the weights are unknown. BadRequest of an engine that
        cannot sleep changes nothing."""
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
        """Ends a pause by hand, which a job knows nothing of. A dead engine is left unchanged."""
        was_paused, self.is_paused = self.is_paused, False
        if was_paused and not self.is_asleep and not await self.failure():
            await self.engine.resume()

    async def go_on(self) -> None:
        """Lets the engine sample, unless it was paused by hand."""
        if not self.is_paused:
            await self.engine.resume()


def sentence(error: BaseException) -> str:
    return error.detail if isinstance(error, HoneError) else f"{type(error).__name__}: {error}"
