"""The engine that runs, what is known of the weights in it, and whether a request may be sampled by
them."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from services.rollout.engine import Adapter, Engine
from services.rollout.fencing import owner_of
from services.rollout.weights.adapters import Adapters
from services.rollout.weights.canary import Seen
from services.rollout.weights.proofs import Expected, differing, given_tensors
from shared.errors import Conflict, HoneError, StateLost, Unavailable
from shared.wire import CheckedWeights, EngineSpec, Published, ServingWeights

ASLEEP = "the sampler sleeps while the trainer has its GPU; it wakes with the next weights"

EXCHANGING = "the weights of the engine's model are being exchanged; ask again"


@dataclass
class Running:
    """An engine from its start to its end. `serving` is what it answers of itself, and `nothing`
    what it answers while no version serves. `published` are the digests of the version's tensors,
    and `seen` what the engine gave the last canary. `is_base`: the engine's model has its own
    weights, beside which adapters may be loaded. `fault` says why its weights are unknown."""

    engine: Engine
    spec: EngineSpec
    expected: Expected
    adapters: Adapters
    nothing: ServingWeights
    serving: ServingWeights
    published: dict[str, str] = field(default_factory=dict)
    seen: Seen | None = None
    is_base: bool = True
    is_paused: bool = False
    is_asleep: bool = False
    is_exchanging: bool = False
    fault: str | None = None

    # --- may it be asked? ------------------------------------------------------------------------

    async def unready(self) -> str | None:
        """Returns why nothing would be sampled, or None."""
        return await self.failure() or (ASLEEP if self.is_asleep else None)

    async def failure(self) -> str | None:
        """Returns why only another engine, or another version, makes it useful; None: it is."""
        return await self.engine.failure() or self.fault

    async def check_alive(self) -> None:
        """Raises StateLost if the engine has died. Its weights may be unknown."""
        if reason := await self.engine.failure():
            raise StateLost(reason)

    async def check_ready(self) -> None:
        """Raises Unavailable while it sleeps or may not be asked, and StateLost if it does not
        sample from known weights."""
        await self.check_alive()
        if self.is_exchanging:
            raise Unavailable(EXCHANGING)
        if self.fault:
            raise StateLost(self.fault)
        if self.is_asleep:
            raise Unavailable(ASLEEP)

    def check_version(self, min_version: int | None) -> None:
        """Raises Conflict, code "out_of_order", for a version that does not serve yet."""
        version = self.serving.version
        if min_version is not None and (version is None or version < min_version):
            have = (
                "no version of a job"
                if version is None
                else f"version {version} of {self.serving.job_id!r}"
            )
            raise Conflict(
                f"'min_version': got {min_version}, serving {have}; reload the weights first",
                code="out_of_order",
            )

    def check_goes_on(self, weights: ServingWeights, *, asked_by: str) -> None:
        """Raises Conflict, code "stale", unless `weights` serve: of whichever version, but of their
        job, attempt, epoch and engine."""
        serving = self.serving
        if (owner_of(weights), weights.boot_id) != (owner_of(serving), serving.boot_id):
            raise Conflict(
                f"{asked_by} began with weights of {_whose(weights)}, and those that serve are of "
                f"{_whose(serving)}; begin another session",
                code="stale",
            )

    def covers(self, spec: EngineSpec) -> bool:
        """Returns whether the engine will do. Jobs that share one for their adapters may differ in
        rank and in the seed, which each of their requests has of its own."""
        mine = self.spec
        if not (spec.max_lora_rank and mine.max_lora_rank):
            return spec == mine
        of_job = {"seed": mine.seed, "max_lora_rank": mine.max_lora_rank}
        fits = spec.max_lora_rank <= mine.max_lora_rank
        return fits and spec.model_copy(update=of_job) == mine

    def serves(self, ref: Published) -> bool:
        """Returns whether `ref` serves now. Raises Conflict if a newer version of its job and epoch
        does, or other bytes of this one."""
        serving = self.serving
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

    @property
    def salt(self) -> str:
        """What tells the cached prefixes of one version from those of others."""
        return f"{owner_of(self.serving)}:{self.serving.version}"

    def serving_adapter(self) -> AbstractContextManager[Adapter | None]:
        """Keeps the adapter that serves loaded, if one does, for a request that names it."""
        return self.adapters.using(self.adapters.serving)

    async def checked(self) -> CheckedWeights:
        """Returns in which tensors what the engine computes with is not the version that serves,
        or the model that it was started with. With an adapter it is both of them."""
        published, found = self.published, await self.engine.digests()
        if self.is_base:
            base = await asyncio.to_thread(given_tensors, self.engine.folder, self.engine.dtype)
            published = {**base, **published}
        with self.serving_adapter() as adapter:
            if adapter:
                found |= await self.engine.adapter_digests(adapter)
        return CheckedWeights(
            version=self.serving.version,
            replica=self.serving.replica,
            num_tensors=len(published),
            differing=differing(found, published),
            unread=tuple(sorted(published.keys() - found.keys())),
        )

    def lose_base(self) -> None:
        """Notes that other weights take the place of the model's own: no adapter is of these."""
        self.adapters.forget()
        self.is_base = False

    async def fall_asleep(self) -> None:
        """Frees the engine's memory, its weights included. Raises StateLost if that fails: then
        they are unknown."""
        try:
            await self.engine.sleep()
        except Exception as error:  # whatever it was, the weights are unknown
            self.fault = f"going to sleep failed ({sentence(error)}); PUT /model"
            raise StateLost(self.fault) from error
        self.is_asleep = True


def sentence(error: BaseException) -> str:
    return error.detail if isinstance(error, HoneError) else f"{type(error).__name__}: {error}"


def _whose(weights: ServingWeights) -> str:
    if weights.job_id is None:
        return f"no job (model {weights.model!r})"
    return f"attempt {weights.attempt}, epoch {weights.epoch} of job {weights.job_id!r}"
