"""The state of the service: which engine runs, which weights serve, and whether they are known.
READ FIRST.

    no model --put_model--> starting --> serving <--reload_weights--> serving a newer version
                                            |
                               a load fails halfway, or the engine dies
                                            v
                                          faulty: /generate answers 503 until a reload or put_model succeeds

One lock orders everything that changes the engine or its weights. /generate takes no lock: vLLM
queues what arrives while it is paused. Nothing is keyed by a remembered request: whether a PUT or a
reload has been done is read off what serves now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from services.rollout.engine import Engine, FindModel, StartEngine
from services.rollout.weights import (
    LOADERS,
    Shapes,
    has_tied_embeddings,
    published_folder,
    shapes,
    verify,
)
from shared.digest import stored_tensors
from shared.errors import BadRequest, Conflict, Failed, HoneError, StateLost, Unavailable
from shared.logs import get_logger
from shared.packed import TokenIds
from shared.wire import (
    EngineSpec,
    Fence,
    Fencing,
    FolderWeights,
    GenerateRequest,
    ModelRequest,
    PauseState,
    Published,
    RolloutGroup,
    ServingWeights,
    WeightsRef,
)

NO_WEIGHTS = ServingWeights()


class Sampler:
    """Samples with one engine at a time. `weight_roots` are the folders that published weights may
    lie in."""

    def __init__(
        self, find_model: FindModel, start_engine: StartEngine, weight_roots: Sequence[Path]
    ) -> None:
        self._find_model = find_model
        self._start_engine = start_engine
        self._weight_roots = weight_roots
        self._change = asyncio.Lock()
        self._engine: Engine | None = None
        self._spec: EngineSpec | None = None
        self._shapes: Shapes = {}
        self._tied = False
        self._unready: str | None = None
        self._fault: str | None = None
        self._paused = False
        self._fence: Fence = (0, 0)
        self.serving = NO_WEIGHTS

    # --- the engine ------------------------------------------------------------------------------

    async def put_model(self, request: ModelRequest) -> ServingWeights:
        """Serves the model: at once if it is already served, else by a new engine. A model that does
        not exist stops nothing. Raises Conflict, code "stale", for a superseded job."""
        async with self._change:
            self._take_over(request)
            spec = request.spec
            if self._engine and spec == self._spec and not await self._failure(self._engine):
                return self.serving
            folder = await self._find_model(spec)
            await self._stop_engine()
            self.refuse(f"starting the engine for {spec.model!r}")
            start = time.monotonic()
            try:
                self._engine = await self._start_engine(spec, folder)
            finally:
                self._unready = None
            self._spec, self._shapes, self._tied = (
                spec,
                shapes(stored_tensors(folder)),
                has_tied_embeddings(folder),
            )
            self.serving = NO_WEIGHTS.model_copy(
                update={"model": spec.model, "load_s": time.monotonic() - start}
            )
            get_logger().info(
                "engine started", model=spec.model, seconds=round(self.serving.load_s, 1)
            )
            return self.serving

    def refuse(self, reason: str) -> None:
        """Makes the service unready for `reason`, until the next start of an engine ends."""
        self._unready = reason

    async def unready(self) -> str | None:
        """Returns why /generate would be refused, or None. Without a model yet there is nothing to
        wait for."""
        return self._unready or (await self._failure(self._engine) if self._engine else None)

    async def ready_engine(self) -> Engine:
        """Returns the engine. Raises Unavailable while there is none that samples from known
        weights."""
        if reason := await self.unready():
            raise Unavailable(reason)
        if self._engine is None:
            raise StateLost("no model is loaded; PUT /model loads one")
        return self._engine

    def num_running(self) -> int:
        return self._engine.num_running() if self._engine else 0

    async def close(self) -> None:
        """Stops the engine without waiting for a change under way."""
        await self._stop_engine()

    async def _stop_engine(self) -> None:
        engine, self._engine, self._spec = self._engine, None, None
        self._fault, self._paused, self.serving = None, False, NO_WEIGHTS
        if engine:
            await engine.stop()

    async def _failure(self, engine: Engine) -> str | None:
        return await engine.failure() or self._fault

    # --- sampling --------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> RolloutGroup:
        """Returns the prompt's group `[G]`, sampled by weights of at least `min_version`."""
        engine = await self.ready_engine()
        self._check_owner(request)
        self._check_version(request.min_version)
        ids = prompt_ids(request, engine)
        rollouts = await engine.sample(
            ids,
            request.sampling,
            salt=f"{self.serving.job_id}:{self.serving.fence}:{self.serving.version}",
        )
        if self._fault:
            raise Unavailable(self._fault)
        return RolloutGroup(prompt_token_ids=TokenIds(ids), rollouts=rollouts)

    async def pause(self) -> PauseState:
        """Freezes sampling: requests under way and new ones wait."""
        engine = await self.ready_engine()
        async with self._change:
            await engine.pause()
            self._paused = True
        return PauseState(paused=True)

    async def resume(self) -> PauseState:
        engine = await self.ready_engine()
        async with self._change:
            self._paused = False
            await engine.resume()
        return PauseState(paused=False)

    def _take_over(self, request: Fencing) -> None:
        """Makes whoever is older than this request stale. Raises Conflict if it is so itself."""
        if request.fence < self._fence:
            raise _stale(request, self._fence)
        self._fence = request.fence

    def _check_owner(self, request: GenerateRequest) -> None:
        """Raises Conflict unless the job asks of its own weights of its own epoch."""
        if request.job_id is None:
            return
        if request.fence < self._fence:
            raise _stale(request, self._fence)
        if (request.job_id, request.fence) != (self.serving.job_id, self.serving.fence):
            raise Conflict(
                f"job {request.job_id!r} with attempt {request.attempt}, epoch {request.epoch} "
                f"asks, but the weights are those of {self.serving.job_id!r} with "
                f"{self.serving.attempt}, {self.serving.epoch}; reload the weights first",
                code="out_of_order",
            )

    def _check_version(self, min_version: int | None) -> None:
        version = self.serving.version
        if min_version is not None and (version is None or version < min_version):
            have = (
                "no version of a job"
                if version is None
                else f"version {version} of {self.serving.job_id!r}"
            )
            raise Conflict(
                f"'min_version': got {min_version}, serving {have}; reload the weights first"
            )

    # --- weights ---------------------------------------------------------------------------------

    async def reload_weights(self, request: WeightsRef) -> ServingWeights:
        """Returns what serves once `ref` does. The version serving already is answered at once; an
        older one is refused."""
        async with self._change:
            engine = self._engine
            if engine is None:
                raise StateLost(self._unready or "no model is loaded; PUT /model loads one")
            if reason := await engine.failure():
                raise Unavailable(reason)
            ref = request.root
            self._take_over(ref)
            if self._is_serving(ref):
                return self.serving
            start = time.monotonic()
            if not isinstance(ref, FolderWeights):
                raise BadRequest(f"got method {ref.method!r}, expected one of {sorted(LOADERS)}")
            folder = published_folder(ref, self._weight_roots)
            digest = await asyncio.to_thread(verify, ref, folder, self._shapes, tied=self._tied)
            await self._load(engine, ref, folder)
            self.serving = ServingWeights(
                job_id=ref.job_id,
                attempt=ref.attempt,
                epoch=ref.epoch,
                version=ref.version,
                digest=digest,
                model=self.serving.model,
                load_s=time.monotonic() - start,
            )
            get_logger().info(
                "weights loaded",
                job=ref.job_id,
                version=ref.version,
                seconds=round(self.serving.load_s, 4),
            )
            return self.serving

    def _is_serving(self, ref: Published) -> bool:
        """Returns whether `ref` serves now. Raises Conflict if a newer version of its job and epoch
        does, or other bytes of this one."""
        serving = self.serving
        if (serving.job_id, serving.fence) != (ref.job_id, ref.fence) or serving.version is None:
            return False
        if ref.version < serving.version:
            raise Conflict(
                f"'version': got {ref.version}, serving {serving.version} of job {ref.job_id!r}; "
                "versions only go up"
            )
        if ref.version == serving.version and ref.digest != serving.digest:
            raise Conflict(
                f"version {ref.version} of job {ref.job_id!r} serves with digest {serving.digest}, "
                f"got {ref.digest}"
            )
        return ref.version == serving.version

    async def _load(self, engine: Engine, ref: FolderWeights, folder: Path) -> None:
        """Loads between two tokens. If that fails, what the engine holds is unknown: it stays
        paused and /generate refuses."""
        await engine.pause()
        try:
            await LOADERS[ref.method](engine, folder)
            await engine.set_version(ref.version)
        except Exception as error:
            raise Failed(await self._distrust(engine, ref, error)) from error
        except asyncio.CancelledError as error:
            await self._distrust(engine, ref, error)
            raise
        self._fault = None
        if not self._paused:
            await engine.resume()

    async def _distrust(self, engine: Engine, ref: Published, error: BaseException) -> str:
        """Makes the service unready, ends what was under way, and returns why."""
        self._fault = (
            f"loading version {ref.version} of job {ref.job_id!r} failed halfway "
            f"({_sentence(error)}), so the weights it "
            "left in the engine are unknown; reload a version, or PUT /model"
        )
        self.serving = NO_WEIGHTS.model_copy(update={"model": self.serving.model})
        get_logger().error(
            "weights unknown", job=ref.job_id, version=ref.version, error=_sentence(error)
        )
        if not await engine.failure():
            await engine.pause(abort=True)
        return self._fault


def prompt_ids(request: GenerateRequest, engine: Engine) -> list[int]:
    """Returns the prompt's token ids `[T]`. Raises BadRequest if there is none, or no room for the
    completion after it."""
    if (request.prompt is None) == (request.prompt_token_ids is None):
        raise BadRequest("give one of 'prompt' and 'prompt_token_ids', not both or neither")
    if request.prompt_token_ids is None:
        assert request.prompt is not None
        ids = engine.encode(request.prompt)
    else:
        ids = list(request.prompt_token_ids)
        for id in ids:
            if not 0 <= id < engine.vocab_size:
                raise BadRequest(
                    f"'prompt_token_ids': got {id}, expected 0 to {engine.vocab_size - 1}"
                )
    if not ids:
        raise BadRequest("the prompt has no tokens")
    total = len(ids) + request.sampling.max_tokens
    if total > engine.max_model_len:
        raise BadRequest(
            f"a prompt of {len(ids)} tokens with 'max_tokens' {request.sampling.max_tokens} makes "
            f"{total}; "
            f"the model holds {engine.max_model_len}"
        )
    return ids


def _stale(request: Fencing, fence: Fence) -> Conflict:
    return Conflict(
        f"got attempt {request.attempt}, epoch {request.epoch}, superseded by {fence[0]}, "
        f"{fence[1]}",
        code="stale",
    )


def _sentence(error: BaseException) -> str:
    return error.detail if isinstance(error, HoneError) else f"{type(error).__name__}: {error}"
