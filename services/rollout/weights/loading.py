"""Loads a proven version into the engine that runs. READ FIRST.

Weights replace the model's between two tokens; an adapter is loaded beside the model while sampling
goes on. Nothing changes until the version is proven. If a load fails halfway, the weights are
unknown, and nothing is sampled with them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from services.rollout.fencing import Requests, not_serving, owner_of
from services.rollout.running import EXCHANGING, Running, sentence
from services.rollout.weights.copies import Copies
from services.rollout.weights.methods import Act, Proven, ProvenAdapter, prove
from services.rollout.weights.proofs import Seen, tensors_of
from shared.errors import Failed, StateLost, Unavailable
from shared.host.logs import get_logger
from shared.wire import AdapterWeights, AnyWeights, ServingWeights
from shared.wire.packed import Logprobs


@dataclass(frozen=True)
class Load:
    """The load of the version `ref`; None: of weights that no job has published. `requests` are the
    sampler's requests under way."""

    running: Running
    requests: Requests
    ref: AnyWeights | None

    def __str__(self) -> str:
        ref = self.ref
        return f"version {ref.version} of job {ref.job_id!r}" if ref else "weights by hand"

    @property
    def owner(self) -> str:
        return owner_of(self.ref) if self.ref else ""

    async def run(self, copies: Copies) -> ServingWeights:
        """Returns what serves once the version does."""
        start, running, ref = time.monotonic(), self.running, self.ref
        assert ref is not None, "`run_unpublished` is for weights without one"
        proven = await prove(ref, running.expected, copies)
        if isinstance(proven, ProvenAdapter):
            assert isinstance(ref, AdapterWeights)
            paused_s = await self._load_adapter(ref, proven)
        else:
            paused_s = await self._load_weights(proven)
        running.serving = running.nothing.model_copy(
            update={
                "job_id": ref.job_id,
                "attempt": ref.attempt,
                "epoch": ref.epoch,
                "version": ref.version,
                "digest": proven.digest,
                "load_s": time.monotonic() - start,
                "paused_s": paused_s,
                "received_bytes": proven.received_bytes,
            }
        )
        await self._measure_canary(ref)
        seconds = round(running.serving.load_s, 4)
        get_logger().info("weights loaded", job=ref.job_id, version=ref.version, seconds=seconds)
        return running.serving

    async def run_unpublished(self, load: Act) -> None:
        """Loads weights of no version, so the next job finds none to go on with."""
        await self._load_weights(Proven("", load))
        self.running.forget()

    async def begin_unpublished(self) -> None:
        """Stops sampling, for weights that come in several calls."""
        self._end_others()
        has_adapters = self.running.adapters.num_jobs > 0
        if has_adapters:
            self.requests.end(lambda _: True, lambda _: Unavailable(EXCHANGING))
        await self._stop_sampling(abort=has_adapters)
        self.running.forget()
        self.running.lose_base()

    async def end_unpublished(self) -> None:
        """Samples with the weights that came since `begin_unpublished`."""
        running = self.running
        await self._wake_cache()
        await running.engine.set_version(self.owner, None)
        if not await running.engine.reset_cache(running=False, external=False):
            raise Failed("vLLM did not reset its prefix cache")
        running.fault, running.is_asleep, running.is_updating = None, False, False
        await running.go_on()

    # --- weights in the place of the model's -----------------------------------------------------

    async def _load_weights(self, proven: Proven) -> float:
        """Loads between two tokens, and returns for how many seconds nothing was sampled. Requests
        of other jobs end."""
        running, engine = self.running, self.running.engine
        await proven.meet(engine)
        self._end_others()
        start = time.monotonic()
        has_adapters = running.adapters.num_jobs > 0
        if has_adapters:
            self._exchange()
        try:
            await self._stop_sampling(abort=has_adapters)
            await proven.load(engine)
            await self._wake_cache()
            await engine.set_version(self.owner, self.ref.version if self.ref else None)
        except BaseException as error:  # whatever it was, the weights are unknown
            running.lose_base()
            await self._give_up(error)
            raise
        finally:
            running.is_exchanging = False
        running.lose_base()
        running.fault, running.is_asleep = None, False
        running.published = self.ref.tensors if self.ref else {}
        await self.running.go_on()
        return time.monotonic() - start

    # --- an adapter beside it --------------------------------------------------------------------

    async def _load_adapter(self, ref: AdapterWeights, proven: ProvenAdapter) -> float:
        """Loads while sampling goes on; a request keeps the adapter that it began with. If other
        weights have replaced the model's own, these are loaded first. Returns for how many seconds
        nothing was sampled."""
        running, start = self.running, time.monotonic()
        if is_base := running.is_base:
            await running.adapters.load(ref, proven.copy)
        else:
            await self._bring_base_back(ref, proven)
        self._end_others()
        if running.fault and is_base:
            await self.running.go_on()
        running.fault, running.published = None, tensors_of(ref)
        return 0.0 if is_base else time.monotonic() - start

    async def _bring_base_back(self, ref: AdapterWeights, proven: ProvenAdapter) -> None:
        """Loads the model's own weights again, and then the adapter."""
        running = self.running
        self._exchange()
        try:
            await self._stop_sampling(abort=True)
            await running.engine.load_files(running.engine.folder)
            await self._wake_cache()
            await running.adapters.load(ref, proven.copy)
            await self.running.go_on()
            running.is_base, running.is_asleep = True, False
        except BaseException as error:  # whatever it was, the weights are unknown
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
        """Ends all requests and refuses new ones: they would be sampled with an adapter on other
        weights than its own, or without their adapter. Clients ask again."""
        self.running.is_exchanging = True
        self.requests.end(lambda _: True, lambda _: Unavailable(EXCHANGING))

    def _end_others(self) -> None:
        """Ends the requests of other jobs, attempts and epochs."""
        self.requests.end(
            lambda asker: asker.job_id is not None and owner_of(asker) != self.owner,
            lambda asker: not_serving(asker, self.ref or self.running.nothing),
        )

    # --- when it fails ---------------------------------------------------------------------------

    async def _give_up(self, error: BaseException) -> None:
        """Refuses to sample from now on, and raises the reason: Failed, code "not_loaded", if
        another method may load the version, else StateLost. The caller raises what is not an
        Exception, such as the service's end."""
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
        running.serving = running.nothing
        get_logger().error("weights unknown", of=str(self), error=sentence(error))
        self.requests.lose(running.fault)
        with contextlib.suppress(StateLost):  # a dead engine has nothing under way
            await running.engine.pause("abort")
        return running.fault

    # --- the canary ------------------------------------------------------------------------------

    async def _measure_canary(self, ref: AnyWeights) -> None:
        """Keeps the log-probs of the canary by the weights or the adapter that serve. Raises Failed
        if they are the same as before: then the load did nothing."""
        running, canary = self.running, ref.canary
        if canary is None:
            return
        with running.serving_adapter() as adapter:
            logprobs = await running.engine.logprobs(list(canary.token_ids), adapter)
        seen = Seen(canary, Logprobs(logprobs))
        if running.seen and seen.stands_still(running.seen):
            why = Failed("the engine's log-probs of the canary did not change at all")
            raise Failed(await self._distrust(why), code="not_loaded")
        running.seen = seen
        running.serving = running.serving.model_copy(update={"canary_logprobs": seen.logprobs})
