"""The state of the service: which engine runs, which weights it serves, and whether these are
known. READ FIRST.

    no model --put_model--> starting --> serving <--reload_weights--> serving a newer version
                                            |
                               a load fails halfway, or the engine dies
                                            v
                                          state lost, until a reload (not of a dead engine) or
                                          put_model succeeds

A sampler that takes turns with the trainer on one GPU sleeps from `sleep` until the next version is
loaded. Meanwhile it has no weights, and requests for samples are refused until later.

`running.py` has the engine that runs (`Running`), decides which requests it may sample, and ends
requests that a newer load supersedes. `weights/loading.py` loads versions into the engine.

One lock orders all calls that change the engine or its weights. /generate takes no lock: vLLM
queues requests while it is paused. No request is remembered: whether a PUT or a reload was done is
decided by the weights that serve now.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from services.rollout.engine import Adapter, Engine, Starter
from services.rollout.groups import given_group, sampled_group
from services.rollout.running import (
    Fences,
    Requests,
    Running,
    ServedVersion,
    Start,
    owner_of,
    stale,
    taken,
)
from services.rollout.weights.adapters import LoadedAdapter, LoadedAdapters
from services.rollout.weights.copies import Copies
from services.rollout.weights.loading import Load, VerifiedAdapter, verify
from services.rollout.weights.proofs import ExpectedVersion, expected_version
from shared.errors import BadRequest, Conflict, HoneError, StateLost, Unavailable
from shared.host.logs import get_logger
from shared.http.ownership import Ownership
from shared.weights.meeting import memory_space
from shared.wire import (
    Aborted,
    AbortRequest,
    AdapterWeights,
    CheckedWeights,
    EngineSpec,
    GenerateRequest,
    ModelRequest,
    Published,
    RolloutGroup,
    ServingWeights,
    SleepRequest,
    WeightsRef,
)

NO_MODEL = "no model is loaded; PUT /model loads one"


class Sampler:
    """Samples with one engine at a time. Published weights may lie in the folders `weight_roots`;
    `copies` keeps fetched weights. `replica` is this sampler's name in its answers. Its engines
    hold the adapters of at most `max_adapters` jobs. `refresh` makes files of other hosts
    visible."""

    def __init__(
        self,
        starter: Starter,
        weight_roots: Sequence[Path],
        copies: Copies,
        *,
        replica: str = "",
        max_adapters: int = 1,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._starter = starter
        self._weight_roots = weight_roots
        self._refresh = refresh
        self.copies = copies
        self._max_adapters = max_adapters
        self._change = asyncio.Lock()
        self.ownership = Ownership("rollout")
        self._fences = Fences(self.ownership)
        self.requests = Requests()
        self._opening: asyncio.Task[None] | None = None
        self.running: Running | None = None
        self._starting: Start | None = None
        self._not_started: str | None = None
        self._nothing = ServingWeights(replica=replica)

    @property
    def serving(self) -> ServingWeights:
        return self.running.serving if self.running else self._nothing

    @property
    def status(self) -> ServingWeights:
        """The weights that serve; the stage of an engine that is starting; and the other
        orchestrator whose job has the sampler, if one has it."""
        doing = None
        if self.running is None and self._starting:
            stage = self._starter.stage()
            doing = f"{self._starting}: {stage}" if stage else str(self._starting)
        changes = {"doing": doing, "taken": self.ownership.taken()}
        return self.serving.model_copy(update=changes)

    # --- the engine ------------------------------------------------------------------------------

    def open(self, model: str | None) -> None:
        """Begins to import vLLM, and to start an engine for `model`, while requests are already
        answered."""
        self.copies.clear()
        if model:
            self._starting = Start(model)
        self._opening = asyncio.create_task(self._open(model))

    async def close(self) -> None:
        """Stops the engine without waiting for a change under way."""
        if self._opening:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._stop_engine()
        self._starter.close()
        self.copies.clear()

    async def put_model(self, request: ModelRequest) -> ServingWeights:
        """Serves the model: at once if it is already served, else by a new engine. A request for a
        model that does not exist leaves the running engine unchanged. Raises Conflict: code "stale"
        for a superseded job, "taken" while another orchestrator's job has the sampler."""
        async with self._change:
            self._take_over(request)
            if request.job_id and self.running:
                await self.running.end_pause()
            if request.own_weights:
                return await self._serve_own_weights(request)
            serving = await self._serve(request.spec)
            (await self._alive()).engine.keeps_cache = request.keep_prefixes
            return serving

    async def unready(self) -> str | None:
        """Returns why /generate would be refused, or None. Before the first model the sampler
        counts as ready."""
        if self.running is None:
            return self._starting.starting if self._starting else self._not_started
        return await self.running.unready()

    async def ready_engine(self) -> Engine:
        """Returns the engine. Raises Unavailable while it starts, sleeps or exchanges weights, and
        StateLost if no engine has known weights."""
        return (await self._ready()).engine

    def num_running(self) -> int:
        return self.running.engine.num_running() if self.running else 0

    def num_running_tokens(self) -> int:
        return self.running.engine.num_running_tokens() if self.running else 0

    def prompt_tokens(self) -> tuple[int, int]:
        """Returns how many tokens the engine's prompts had, and how many were cached."""
        return self.running.engine.prompt_tokens() if self.running else (0, 0)

    async def _ready(self) -> Running:
        """Returns the engine, if it can sample."""
        running = await self._alive()
        await running.check_ready()
        return running

    async def _alive(self) -> Running:
        """Returns the engine, if it runs. Its weights may be unknown."""
        if self.running is None and self._starting:
            raise Unavailable(self._starting.starting, code="starting")
        if self.running is None:
            raise StateLost(self._not_started or NO_MODEL)
        running = self.running
        await running.check_alive()
        return running

    async def _open(self, model: str | None) -> None:
        try:
            await self._starter.preload()
            async with self._change:
                if model and self.running is None:  # otherwise a concurrent call has replaced it
                    await self._serve(EngineSpec(model=model))
        except HoneError as error:
            self._starting = None
            if self.running is None:
                self._not_started = error.detail
            get_logger().error("engine not started", model=model, error=error.detail)

    async def _serve(self, spec: EngineSpec) -> ServingWeights:
        running = self.running
        if running and not await running.failure() and running.covers(spec):
            return running.serving
        folder = await self._starter.find_model(spec)
        expected = expected_version(folder, self._weight_roots, self._refresh)
        await self._stop_engine()
        self._starting = Start(spec.model)
        start = time.monotonic()
        try:
            engine = await self._starter.start(spec, folder)
        finally:
            self._starting = None
        running = self.running = self._started(engine, spec, expected, time.monotonic() - start)
        engine.offer(running.adapters)
        get_logger().info("engine started", model=spec.model, seconds=round(self.serving.load_s, 1))
        return running.serving

    async def _serve_own_weights(self, request: ModelRequest) -> ServingWeights:
        """Serves the model with the weights of its folder. An engine into which other weights were
        loaded is stopped."""
        if request.job_id is None:
            raise BadRequest(
                "'own_weights' is true and there is no 'job_id'; expected the job that they serve"
            )
        if self.running and not self.running.is_base:
            await self._stop_engine()
        await self._serve(request.spec)
        running = await self._alive()
        running.adapters.serving = None
        await running.engine.set_version(owner_of(request), 0)
        of_job = request.model_dump(include={"job_id", "attempt", "epoch"})
        running.serve(ServedVersion(running.nothing.model_copy(update={**of_job, "version": 0})))
        return running.serving

    def _started(
        self, engine: Engine, spec: EngineSpec, expected: ExpectedVersion, load_s: float
    ) -> Running:
        serving = self._nothing.model_copy(
            update={
                "model": spec.model,
                "load_s": load_s,
                "dtype": engine.dtype,
                "max_num_seqs": engine.max_num_seqs,
                "kv_cache_tokens": engine.kv_cache_tokens,
                "boot_id": secrets.token_hex(8),
                "gpus": engine.gpus,
                "memory_space": memory_space(),
            }
        )
        return Running(
            engine,
            spec,
            replace(expected, max_lora_rank=engine.max_lora_rank),
            LoadedAdapters(engine, self.copies, self._max_adapters),
            nothing=serving,
            latest=ServedVersion(serving),
        )

    async def _stop_engine(self) -> None:
        running, self.running, self._not_started = self.running, None, None
        self.copies.remove_adapters()
        self.requests.lose("the engine was stopped; another one may replace it")
        if running:
            await running.engine.stop()

    # --- sampling --------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> RolloutGroup:
        """Returns the prompt's group `[G]`, sampled by weights of the job's epoch and of at least
        `min_version`. If nothing can be sampled after the prompt, a job gets failed rollouts as
        data, and a request without a job gets BadRequest."""
        if request.answers:
            self._fences.check_asker(request)
            group = await given_group(request, (await self._alive()).engine)
            return group.model_copy(update={"replica": self.serving.replica})
        running = await self._ready()
        with await self._adapter_for(request, running) as adapter:
            work = sampled_group(request, running, adapter)
            group = await self.requests.run(request, work)
        return group.model_copy(update={"replica": self.serving.replica})

    async def _adapter_for(
        self, request: GenerateRequest, running: Running
    ) -> AbstractContextManager[Adapter | None]:
        """Returns a context that keeps the request's adapter loaded; it yields None if the model's
        weights are enough. Raises Conflict for weights that the request may not use."""
        if request.snapshot is None and not request.own_weights:
            self._fences.check(request, running.served_to(request.job_id).weights)
            running.check_version(request.min_version, request.job_id)
            return running.serving_adapter(request.job_id)
        self._fences.check_asker(request)
        running.check_base()
        if request.snapshot is None:
            return contextlib.nullcontext()
        return running.adapters.using(await self._snapshot(request.snapshot, running))

    async def _snapshot(self, ref: AdapterWeights, running: Running) -> LoadedAdapter:
        """Returns the snapshot's adapter, after loading it if needed."""
        if held := running.adapters.snapshot(ref.adapter):
            return held
        async with self._change:
            running = await self._ready()
            running.check_base()
            if held := running.adapters.snapshot(ref.adapter):
                return held
            verified = await verify(ref, running.expected, self.copies)
            assert isinstance(verified, VerifiedAdapter), "the method is lora"
            return await running.adapters.load_snapshot(ref, verified.copy)

    async def abort(self, request: AbortRequest) -> Aborted:
        """Ends the job's requests up to this fence, and refuses later ones; or ends only the
        requests of `request.keys`."""
        if request.keys:
            return Aborted(num_requests=self.requests.end_keys(request))
        self._fences.abort(request)
        self._keep_holders()
        num_requests = self.requests.end(
            lambda asker: asker.job_id == request.job_id and asker.fence <= request.fence,
            _stale,
        )
        return Aborted(num_requests=num_requests)

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncGenerator[Running]:
        """Yields the engine to a caller without a job, and blocks other changes meanwhile. Raises
        Conflict, code "taken", while a job has the sampler."""
        await self._ready()
        async with self._change:
            self.ownership.check()
            yield await self._ready()

    def _take_over(self, asker: Published | ModelRequest | SleepRequest) -> None:
        """Supersedes all older attempts and epochs, except attempts that the caller names beside
        itself, and ends their requests. Raises Conflict if the caller is superseded itself, or has
        no job while a job has the sampler."""
        if asker.job_id is None:
            self.ownership.check()
        if self._fences.take_over(asker):
            self.requests.end(lambda other: other.job_id is not None, taken)
        elif asker.job_id is not None:
            self.requests.end(
                lambda other: other.job_id is not None and self._fences.are_superseded(other),
                _stale,
            )
        if asker.job_id is not None:
            self._keep_holders(asker.job_id)

    def _keep_holders(self, job_id: str | None = None) -> None:
        """Forgets the versions of attempts that may no longer use the sampler; the job's own are
        kept until it has others."""
        if self.running:
            self.running.keep(
                lambda weights: weights.job_id == job_id or not self._fences.are_superseded(weights)
            )

    # --- weights ---------------------------------------------------------------------------------

    async def reload_weights(self, request: WeightsRef) -> ServingWeights:
        """Loads this version and returns the weights that serve then. If the version serves
        already, it is not loaded, except with `again`. An older version of the same epoch is
        refused. Nothing changes until the version is verified."""
        await self._alive()
        async with self._change:
            running, ref = await self._alive(), request.root
            known = running.of_jobs.get(ref.job_id)
            if known and ref.fence < known.weights.fence:
                raise stale(ref, ref.job_id)
            self._take_over(ref)
            await running.end_pause()
            if running.serves(ref) and not ref.again:
                return running.served_to(ref.job_id).weights
            return await Load(running, self.requests, ref).run(self.copies)

    async def check_weights(self) -> CheckedWeights:
        """Returns which of the engine's tensors differ from the version that serves."""
        async with self._change:
            return await (await self._ready()).check_weights()

    async def sleep(self, request: SleepRequest) -> ServingWeights:
        """Frees the GPU's memory until a version is loaded. Until then nothing is served, and
        requests under way are lost. Does nothing if the sampler sleeps already."""
        async with self._change:
            running = await self._alive()
            self._take_over(request)
            await running.fall_asleep(self.requests)
            return running.serving


def _stale(asker: GenerateRequest) -> Conflict:
    return stale(asker, asker.job_id or "")
