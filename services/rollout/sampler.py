"""The state of the service: which engine runs, which weights serve, and whether they are known.
READ FIRST.

    no model --put_model--> starting --> serving <--reload_weights--> serving a newer version
                                            |
                               a load fails halfway, or the engine dies
                                            v
                                          state lost, until a reload (not of a dead engine) or
                                          put_model succeeds

A sampler that takes turns with the trainer on one GPU sleeps from `sleep` until the next version is
loaded: it has no weights, and whoever asks for samples is to come again.

One lock orders everything that changes the engine or its weights. /generate takes no lock: vLLM
queues what arrives while it is paused. Nothing is keyed by a remembered request: whether a PUT or a
reload has been done is read off what serves now. Who may ask, and how what is under way ends, is in
`fencing.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from services.rollout.engine import Answer, BadPrompt, Engine, NothingReceived, Starter
from services.rollout.fencing import Fences, Requests, not_serving, owner_of, stale
from services.rollout.prompts import group_without_prompt, prompt_ids
from services.rollout.weights.adapters import Adapters, one_call
from services.rollout.weights.canary import Seen
from services.rollout.weights.copies import Copies
from services.rollout.weights.methods import (
    Expected,
    Proven,
    ProvenAdapter,
    differing,
    expected_of,
    given_tensors,
    prove,
    tensors_of,
)
from shared.errors import Conflict, Failed, HoneError, StateLost, Unavailable
from shared.logs import get_logger
from shared.packed import Logprobs, TokenIds
from shared.wire import (
    Aborted,
    AbortRequest,
    AdapterWeights,
    Canary,
    ChatRequest,
    CheckedWeights,
    EngineSpec,
    GenerateRequest,
    ModelRequest,
    PauseState,
    Published,
    RolloutGroup,
    ServingWeights,
    SleepRequest,
    WeightsRef,
)

ASLEEP = "the sampler sleeps while the trainer has its GPU; it wakes with the next weights"

EXCHANGING = "the weights of the engine's model are being exchanged; ask again"

NO_MODEL = "no model is loaded; PUT /model loads one"


class Sampler:
    """Samples with one engine at a time. `weight_roots` are the folders that published weights may
    lie in, and `copies` keeps those that are fetched; `replica` names this sampler in what it
    answers, `max_num_seqs` is how many completions its engines sample at once, and `max_adapters`
    of how many jobs they hold adapters."""

    def __init__(
        self,
        starter: Starter,
        weight_roots: Sequence[Path],
        copies: Copies,
        *,
        replica: str = "",
        max_num_seqs: int = 0,
        max_adapters: int = 1,
    ) -> None:
        self._starter = starter
        self._weight_roots = weight_roots
        self._copies = copies
        self._change = asyncio.Lock()
        self._fences = Fences()
        self._requests = Requests()
        self._opening: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._spec: EngineSpec | None = None
        self._expected: Expected | None = None
        self._max_adapters = max_adapters
        self._adapters: Adapters | None = None
        self._is_base = True
        self._exchanging = False
        self._starting: str | None = None
        self._fault: str | None = None
        self._paused = False
        self._asleep = False
        self._published: dict[str, str] = {}
        self._seen: Seen | None = None
        self._nothing = ServingWeights(replica=replica, max_num_seqs=max_num_seqs)
        self.serving = self._nothing

    # --- the engine ------------------------------------------------------------------------------

    def open(self, model: str | None) -> None:
        """Begins to prepare for engines, and to start one for `model`, behind the first
        requests."""
        self._copies.clear()
        if model:
            self._starting = f"starting the engine for {model!r}"
        self._opening = asyncio.create_task(self._open(model))

    async def close(self) -> None:
        """Stops the engine without waiting for a change under way."""
        if self._opening:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._stop_engine()
        self._starter.close()
        self._copies.clear()

    async def put_model(self, request: ModelRequest) -> ServingWeights:
        """Serves the model: at once if it is already served, else by a new engine. A model that
        does not exist stops nothing. Raises Conflict, code "stale", for a superseded job."""
        async with self._change:
            self._take_over(request)
            return await self._serve(request.spec)

    async def unready(self) -> str | None:
        """Returns why /generate would be refused, or None. Without a model yet there is nothing to
        wait for."""
        if self._engine is None:
            return self._starting or self._fault
        return await self._failure(self._engine) or (ASLEEP if self._asleep else None)

    async def ready_engine(self) -> Engine:
        """Returns the engine. Raises Unavailable while it starts, sleeps or may not be asked, and
        StateLost if there is none that samples from known weights."""
        engine = await self._living_engine()
        if self._exchanging:
            raise Unavailable(EXCHANGING)
        if self._fault:
            raise StateLost(self._fault)
        if self._asleep:
            raise Unavailable(ASLEEP)
        return engine

    async def _living_engine(self) -> Engine:
        """Returns the engine, which may hold unknown weights."""
        if self._engine is None and self._starting:
            raise Unavailable(self._starting, code="starting")
        if self._engine is None:
            raise StateLost(self._fault or NO_MODEL)
        engine = self._engine
        if reason := await engine.failure():
            raise StateLost(reason)
        return engine

    def num_running(self) -> int:
        return self._engine.num_running() if self._engine else 0

    def prompt_tokens(self) -> tuple[int, int]:
        """Returns how many tokens the engine's prompts had, and how many of them were cached."""
        return self._engine.prompt_tokens() if self._engine else (0, 0)

    async def _open(self, model: str | None) -> None:
        try:
            await self._starter.preload()
            async with self._change:
                if model and self._engine is None:  # else another call was faster
                    await self._serve(EngineSpec(model=model))
        except HoneError as error:
            self._starting = None
            if self._engine is None:
                self._fault = error.detail
            get_logger().error("engine not started", model=model, error=error.detail)

    async def _serve(self, spec: EngineSpec) -> ServingWeights:
        if self._engine and not await self._failure(self._engine) and self._covers(spec):
            return self.serving
        folder = await self._starter.find_model(spec)
        await self._stop_engine()
        self._starting = f"starting the engine for {spec.model!r}"
        start = time.monotonic()
        try:
            self._engine = await self._starter.start(spec, folder)
        finally:
            self._starting = None
        self._spec, self._is_base = spec, True
        self._expected = expected_of(folder, self._weight_roots, self._engine.max_lora_rank)
        self._adapters = Adapters(self._engine, self._copies, self._max_adapters)
        self._engine.offer(self._adapters)
        self._nothing = self._nothing.model_copy(
            update={
                "model": spec.model,
                "load_s": time.monotonic() - start,
                "dtype": self._engine.dtype,
                "kv_cache_tokens": self._engine.kv_cache_tokens,
                "boot_id": secrets.token_hex(8),
                "gpus": self._engine.gpus,
            }
        )
        self.serving = self._nothing
        get_logger().info("engine started", model=spec.model, seconds=round(self.serving.load_s, 1))
        return self.serving

    def _covers(self, spec: EngineSpec) -> bool:
        """Returns whether the engine will do. Jobs that share one for their adapters may differ in
        rank and in the seed, which each of their requests has of its own."""
        if self._spec is None or not (spec.max_lora_rank and self._spec.max_lora_rank):
            return spec == self._spec
        of_job = {"seed": self._spec.seed, "max_lora_rank": self._spec.max_lora_rank}
        fits = spec.max_lora_rank <= self._spec.max_lora_rank
        return fits and spec.model_copy(update=of_job) == self._spec

    async def _stop_engine(self) -> None:
        engine, self._engine, self._spec, self._expected = self._engine, None, None, None
        self._adapters = None
        self._copies.remove_adapters()
        self._nothing = ServingWeights(
            replica=self._nothing.replica, max_num_seqs=self._nothing.max_num_seqs
        )
        self._published, self._seen = {}, None
        self._fault, self._paused, self.serving = None, False, self._nothing
        self._asleep = False
        self._lose_requests("the engine was stopped; another one may take its place")
        if engine:
            await engine.stop()

    async def _failure(self, engine: Engine) -> str | None:
        return await engine.failure() or self._fault

    # --- sampling --------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> RolloutGroup:
        """Returns the prompt's group `[G]`, sampled by weights of at least `min_version`, all of
        the job's epoch. A prompt that nothing can be sampled after is data to a job: rollouts that
        went wrong. A request by hand gets BadRequest."""
        engine = await self.ready_engine()
        self._fences.check(request, self.serving)
        self._check_version(request.min_version)
        try:
            ids, is_cut = prompt_ids(request, engine)
        except BadPrompt as error:
            if request.job_id is None:
                raise
            return group_without_prompt(request, error).model_copy(
                update={"replica": self.serving.replica}
            )
        assert self._adapters is not None, "an engine has a place for them"
        with self._adapters.using(self._adapters.serving) as adapter:
            work = engine.sample(
                ids,
                request.sampling,
                owner=owner_of(request),
                salt=self._salt(),
                deadline_s=request.deadline_s,
                adapter=adapter,
            )
            rollouts = await self._requests.run(request, work)
        return RolloutGroup(
            prompt_token_ids=TokenIds(ids),
            rollouts=rollouts,
            replica=self.serving.replica,
            overlong=is_cut,
        )

    async def engine_with(self, weights: ServingWeights, *, asked_by: str) -> Engine:
        """Returns the engine if it serves `weights`: of whichever version, but of their job,
        attempt, epoch and engine. Raises Conflict, code "stale", if it does not."""
        engine = await self.ready_engine()
        serving = self.serving
        if (owner_of(weights), weights.boot_id) != (owner_of(serving), serving.boot_id):
            raise Conflict(
                f"{asked_by} began with weights of {_whose(weights)}, and those that serve are of "
                f"{_whose(serving)}",
                code="stale",
            )
        return engine

    async def answer(
        self,
        request: ChatRequest,
        prompt_token_ids: list[int],
        weights: ServingWeights,
        *,
        asked_by: str,
    ) -> Answer:
        """Returns the answer of a recorded conversation that is of `weights`. Raises Conflict, code
        "stale", if others serve, or come to serve meanwhile."""
        engine = await self.engine_with(weights, asked_by=asked_by)
        asker = GenerateRequest(**self.serving.model_dump(include={"job_id", "attempt", "epoch"}))
        self._fences.check(asker, self.serving)
        assert self._adapters is not None, "an engine has a place for them"
        with one_call(), self._adapters.using(self._adapters.serving) as adapter:
            work = engine.chat.answer(
                request,
                prompt_token_ids,
                owner=owner_of(asker),
                salt=self._salt(),
                adapter=adapter,
            )
            return await self._requests.run(asker, work)

    async def abort(self, request: AbortRequest) -> Aborted:
        """Ends what the job has under way up to this fence, and refuses what comes of it later; or
        only the requests of `request.keys`."""
        if request.keys:
            return Aborted(num_requests=self._requests.end_keys(request))
        self._fences.abort(request)
        num_requests = self._requests.end(
            lambda asker: asker.job_id == request.job_id and asker.fence <= request.fence, _stale
        )
        return Aborted(num_requests=num_requests)

    async def pause(self) -> PauseState:
        """Freezes sampling: requests under way and new ones wait."""
        await self.ready_engine()
        async with self._change:
            engine = await self.ready_engine()
            await engine.pause()
            self._paused = True
        return PauseState(paused=True)

    async def resume(self) -> PauseState:
        await self.ready_engine()
        async with self._change:
            engine = await self.ready_engine()
            self._paused = False
            await engine.resume()
        return PauseState(paused=False)

    async def sleep(self, request: SleepRequest) -> ServingWeights:
        """Frees the GPU's memory until a version is loaded: then nothing serves, and what was under
        way is lost. Asleep already, it stays so."""
        async with self._change:
            engine = await self._living_engine()
            self._take_over(request)
            if not self._asleep:
                self.serving, self._published, self._seen = self._nothing, {}, None
                self._lose_requests(ASLEEP)
                self._is_base = False
                assert self._adapters is not None
                self._adapters.forget()
                await self._fall_asleep(engine)
        return self.serving

    async def _fall_asleep(self, engine: Engine) -> None:
        try:
            await engine.sleep()
        except Exception as error:  # whatever it was, the weights are unknown
            self._fault = f"going to sleep failed ({_sentence(error)}); PUT /model"
            raise StateLost(self._fault) from error
        self._asleep = True

    def _take_over(self, asker: Published | ModelRequest | SleepRequest) -> None:
        """Supersedes all older attempts and epochs, requests under way included. Raises Conflict if
        the asker is superseded itself."""
        self._fences.take_over(asker)
        if asker.job_id is not None:
            self._requests.end(
                lambda other: other.job_id is not None and other.fence < asker.fence, _stale
            )

    def _lose_requests(self, why: str) -> None:
        self._requests.end(lambda _: True, lambda _: StateLost(why))

    def _salt(self) -> str:
        """Returns what tells the cached prefixes of one version from those of others."""
        return f"{owner_of(self.serving)}:{self.serving.version}"

    def _check_version(self, min_version: int | None) -> None:
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

    # --- weights ---------------------------------------------------------------------------------

    async def reload_weights(self, request: WeightsRef) -> ServingWeights:
        """Returns what serves once `request` does. The version serving already is answered at once,
        unless it is to be loaded `again`; an older one of the same epoch is refused. Until the
        version is proven nothing changes."""
        await self._living_engine()
        async with self._change:
            engine = await self._living_engine()
            ref = request.root
            self._take_over(ref)
            if self._is_serving(ref) and not ref.again:
                return self.serving
            assert self._expected is not None, "an engine has a model"
            start = time.monotonic()
            proven = await prove(ref, self._expected, self._copies)
            if isinstance(proven, ProvenAdapter):
                assert isinstance(ref, AdapterWeights)
                paused_s = await self._load_adapter(engine, ref, proven)
            else:
                paused_s = await self._load(engine, ref, proven)
            self.serving = self._nothing.model_copy(
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
            if ref.canary and not self._paused:
                seen = Seen(ref.canary, await self._logprobs(engine, ref.canary))
                if self._seen and seen.stands_still(self._seen):
                    why = Failed("the engine's log-probs of the canary did not change at all")
                    reason = await self._distrust(engine, ref, why)
                    raise Failed(reason, code="not_loaded")
                self._seen = seen
                self.serving = self.serving.model_copy(update={"canary_logprobs": seen.logprobs})
            get_logger().info(
                "weights loaded",
                job=ref.job_id,
                version=ref.version,
                seconds=round(self.serving.load_s, 4),
            )
            return self.serving

    async def _logprobs(self, engine: Engine, canary: Canary) -> Logprobs:
        """Returns what the weights that serve give the canary, the adapter's if it is one."""
        assert self._adapters is not None
        with self._adapters.using(self._adapters.serving) as adapter:
            return Logprobs(await engine.logprobs(list(canary.token_ids), adapter))

    async def check_weights(self) -> CheckedWeights:
        """Returns in which tensors what the engine computes with is not the version that serves,
        or the model that it was started with. With an adapter it is both of them."""
        async with self._change:
            engine = await self.ready_engine()
            assert self._adapters is not None
            published, found = self._published, await engine.digests()
            if self._is_base:
                base = await asyncio.to_thread(given_tensors, engine.folder, engine.dtype)
                published = {**base, **published}
            with self._adapters.using(self._adapters.serving) as adapter:
                if adapter:
                    found |= await engine.adapter_digests(adapter)
        return CheckedWeights(
            version=self.serving.version,
            replica=self.serving.replica,
            num_tensors=len(published),
            differing=differing(found, published),
            unread=tuple(sorted(published.keys() - found.keys())),
        )

    def _is_serving(self, ref: Published) -> bool:
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

    async def _load(self, engine: Engine, ref: Published, proven: Proven) -> float:
        """Loads between two tokens, and returns for how many seconds nothing was sampled. If that
        fails, what the engine holds is unknown: it stays paused, and nothing is sampled. Jobs other
        than the version's are ended."""
        owner = owner_of(ref)
        assert self._adapters is not None
        self._end_others(ref)
        start = time.monotonic()
        had_adapters = self._adapters.num_jobs > 0
        if had_adapters:
            self._exchange()
        try:
            if self._asleep:
                await engine.wake_weights()
            else:
                await engine.pause(abort=had_adapters)
            self._adapters.forget()
            self._is_base = False
            await proven.load(engine)
            if self._asleep:
                await engine.wake_cache()
            await engine.set_version(owner, ref.version)
        except NothingReceived as error:  # what served, if anything, goes on serving
            if self._asleep:  # the memory of its weights was taken back for them
                await self._fall_asleep(engine)
            elif not (self._paused or self._fault):
                await engine.resume()
            raise Failed(error.detail, code="not_loaded") from error
        except Exception as error:  # whatever it was, the weights are unknown
            reason = await self._distrust(engine, ref, error)
            if isinstance(error, Failed) and error.code == "not_loaded":
                raise Failed(reason, code=error.code) from error  # another way may do
            raise StateLost(reason) from error
        except asyncio.CancelledError as error:
            await self._distrust(engine, ref, error)
            raise
        finally:
            self._exchanging = False
        self._fault, self._asleep = None, False
        self._published = ref.tensors
        if not self._paused:
            await engine.resume()
        return time.monotonic() - start

    async def _load_adapter(
        self, engine: Engine, ref: AdapterWeights, proven: ProvenAdapter
    ) -> float:
        """Loads beside the model while sampling goes on: requests under way keep the adapter that
        they began with. Returns for how many seconds nothing was sampled, if the model's own
        weights had to come back."""
        assert self._adapters is not None
        start = time.monotonic()
        if is_base := self._is_base:
            await self._adapters.load(ref, proven.copy)
        else:
            await self._load_beside_base(engine, ref, proven)
        self._end_others(ref)
        if self._fault and is_base and not self._paused:
            await engine.resume()
        self._fault, self._published = None, tensors_of(ref)
        return 0.0 if is_base else time.monotonic() - start

    async def _load_beside_base(
        self, engine: Engine, ref: AdapterWeights, proven: ProvenAdapter
    ) -> None:
        """The same after other weights have taken the place of the model's own. If that fails, what
        the engine holds is unknown."""
        assert self._adapters is not None
        self._exchange()
        try:
            if self._asleep:
                await engine.wake_weights()
            else:
                await engine.pause(abort=True)
            await engine.load_files(engine.folder)
            if self._asleep:
                await engine.wake_cache()
            await self._adapters.load(ref, proven.copy)
            if not self._paused:
                await engine.resume()
            self._is_base, self._asleep = True, False
        except Exception as error:
            raise StateLost(await self._distrust(engine, ref, error)) from error
        except asyncio.CancelledError as error:
            await self._distrust(engine, ref, error)
            raise
        finally:
            self._exchanging = False

    def _exchange(self) -> None:
        """Ends what is under way, and refuses what comes: it would be sampled by the model's
        weights with the adapter of others, or without its own. Clients ask for it again."""
        self._exchanging = True
        self._requests.end(lambda _: True, lambda _: Unavailable(EXCHANGING))

    def _end_others(self, ref: Published) -> None:
        """Ends what is under way of other jobs, attempts and epochs."""
        self._requests.end(
            lambda asker: asker.job_id is not None and owner_of(asker) != owner_of(ref),
            lambda asker: not_serving(asker, ref),
        )

    async def _distrust(self, engine: Engine, ref: Published, error: BaseException) -> str:
        """Refuses to sample, ends what was under way, and returns why."""
        self._fault = (
            f"loading version {ref.version} of job {ref.job_id!r} failed halfway "
            f"({_sentence(error)}), so the weights it "
            "left in the engine are unknown; reload a version, or PUT /model"
        )
        self.serving = self._nothing
        get_logger().error(
            "weights unknown", job=ref.job_id, version=ref.version, error=_sentence(error)
        )
        self._lose_requests(self._fault)
        with contextlib.suppress(StateLost):  # a dead engine has nothing under way
            await engine.pause(abort=True)
        return self._fault


def _stale(asker: GenerateRequest) -> Conflict:
    return stale(asker, asker.job_id or "")


def _whose(weights: ServingWeights) -> str:
    if weights.job_id is None:
        return f"no job (model {weights.model!r})"
    return f"attempt {weights.attempt}, epoch {weights.epoch} of job {weights.job_id!r}"


def _sentence(error: BaseException) -> str:
    return error.detail if isinstance(error, HoneError) else f"{type(error).__name__}: {error}"
