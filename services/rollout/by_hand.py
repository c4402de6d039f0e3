"""What a caller who is no job may do to the engine, in vLLM's words: pause it, put it to sleep, and
load weights and adapters of a trainer that is not Hone's.

Nothing of it is possible while a job has the sampler. Weights that were loaded so have no version,
so a job that comes later finds none of its own and loads them. Adapters are called by name, beside
what serves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from services.rollout.running import Running, sentence
from services.rollout.sampler import Sampler
from services.rollout.weights.loading import Load
from services.rollout.weights.methods import in_place
from services.rollout.weights.proofs import compare, proven_adapter, shapes, wrongly_typed
from shared.errors import BadRequest, Conflict, Failed, NotFound, StateLost
from shared.http.folders import other_folders
from shared.settings import Settings
from shared.weights.checkpoints import adapter_digests
from shared.weights.digest import digest, stored_tensors
from shared.wire import (
    AdapterWeights,
    CacheReset,
    FinishUpdateRequest,
    IsPaused,
    IsSleeping,
    LoadAdapterRequest,
    NoBody,
    PauseRequest,
    PauseState,
    RemoteCall,
    RemoteResults,
    ResetCacheRequest,
    StartUpdateRequest,
    TransferRequest,
    UnloadAdapterRequest,
    UpdateRequest,
    WakeRequest,
    WakeState,
    WeightsChanged,
)

NO_TRANSFER = (
    "this sampler takes no tensors from another trainer's device: that needs a GPU and "
    "HONE_WEIGHT_TRANSFER=nccl; POST /update_weights with a 'weight_dir' loads a folder of "
    "weights, and POST /v1/load_lora_adapter an adapter"
)

UPDATING = (
    "weights are being updated by hand; POST /finish_weight_update ends it, and PUT /model starts "
    "a new engine"
)

RESUMED = PauseState(paused=False, status="resumed")

RELOAD = "reload_weights"
"""The method of vLLM's workers that may be called by name."""


class ByHand:
    """The handlers of vLLM's routes for reinforcement learning."""

    def __init__(self, sampler: Sampler, settings: Settings) -> None:
        self._sampler = sampler
        self._settings = settings

    # --- pausing and sleeping --------------------------------------------------------------------

    async def pause(self, request: PauseRequest) -> PauseState:
        """Freezes sampling; new requests wait, and `mode` says what those under way do. A job that
        comes waits for none of them, and ends the pause."""
        async with self._sampler.changing(ready=True) as running:
            if request.mode != "wait":
                await running.engine.pause(request.mode)
            running.is_paused = True
        if request.mode == "wait":
            await running.engine.pause("wait")
            if not running.is_paused:
                await running.engine.resume()
                return RESUMED
        return PauseState(paused=True)

    async def resume(self, _: NoBody) -> PauseState:
        """Continues sampling."""
        async with self._sampler.changing(ready=True) as running:
            running.is_paused = False
            await running.engine.resume()
        return RESUMED

    async def is_paused(self) -> IsPaused:
        """Whether sampling was paused by hand."""
        running = self._sampler.running
        return IsPaused(is_paused=running is not None and running.is_paused)

    async def is_sleeping(self) -> IsSleeping:
        """Whether the engine sleeps."""
        running = self._sampler.running
        return IsSleeping(is_sleeping=running is not None and running.is_asleep)

    async def wake_up(self, _: WakeRequest) -> WakeState:
        """Brings back weights that were kept. Weights that were given up must be loaded, which
        wakes the engine too."""
        async with self._sampler.changing() as running:
            running.check_no_update()
            await running.wake_up()
            return WakeState(status="sleeping" if running.is_asleep else "awake")

    async def reset_prefix_cache(self, request: ResetCacheRequest) -> CacheReset:
        """Forgets cached prefixes."""
        async with self._sampler.changing(ready=True) as running:
            success = await running.engine.reset_cache(
                running=request.reset_running_requests, external=request.reset_external
            )
        return CacheReset(success=success)

    # --- weights ---------------------------------------------------------------------------------

    async def init_transfer(self, request: TransferRequest) -> WeightsChanged:
        """Makes vLLM's processes meet a trainer, which sends tensors later."""
        async with self._transferring() as running:
            await running.engine.transfer("init_weight_transfer_engine", request.init_info)
        return WeightsChanged(message="Weight transfer initialized")

    async def start_update(self, _: StartUpdateRequest) -> WeightsChanged:
        """Begins an update by vLLM's weight transfer. Nothing is sampled until it is finished."""
        async with self._transferring() as running:
            running.check_no_update()
            await Load(running, self._sampler.requests, None).begin_unpublished()
            await self._step(running, "start_weight_update", None)
        return WeightsChanged(message="Weight update started")

    async def update(self, request: UpdateRequest) -> WeightsChanged:
        """Loads the weights in a folder, or the tensors that the trainer sends now."""
        if (request.update_info is None) == (request.weight_dir is None):
            raise BadRequest("expected one of 'update_info' and 'weight_dir', not both or neither")
        if request.weight_dir is not None:
            await self._load_folder("weight_dir", request.weight_dir)
        else:
            async with self._updating() as running:
                await self._step(running, "update_weights", request.update_info)
        return WeightsChanged(message="Weights updated")

    async def finish_update(self, _: FinishUpdateRequest) -> WeightsChanged:
        """Ends an update by vLLM's weight transfer, and samples again."""
        async with self._updating() as running:
            await self._step(running, "finish_weight_update", None)
            await Load(running, self._sampler.requests, None).end_unpublished()
        return WeightsChanged(message="Weight update finished")

    async def call(self, request: RemoteCall) -> RemoteResults:
        """Calls a method of vLLM's workers by name; only `reload_weights` may be called."""
        path = request.kwargs.get("weights_path", *request.args[:1])
        if request.method != RELOAD or not isinstance(path, str):
            raise BadRequest(
                f"'method': got {request.method!r} with {dict(request.kwargs)!r:.200}; expected "
                f"{RELOAD!r} with 'weights_path', a folder, in 'kwargs': other methods of vLLM's "
                "workers cannot be called from outside"
            )
        await self._load_folder("weights_path", path)
        return RemoteResults(results=(None,) * self._settings.tensor_parallel_size)

    async def _load_folder(self, name: str, given: str) -> None:
        async with self._sampler.changing() as running:
            running.check_no_update()
            folder = self._named_folder(name, given)
            try:
                stored = await asyncio.to_thread(stored_tensors, folder)
            except (OSError, Failed) as error:
                raise BadRequest(f"{name!r}: {sentence(error)}") from error
            expected = running.expected
            difference = compare(shapes(stored), expected.shapes, tied=expected.tied)
            if difference := difference or wrongly_typed(stored, expected.dtypes):
                raise BadRequest(f"{name!r}: {given!r} does not fit the model: {difference}")
            load = Load(running, self._sampler.requests, None)
            await load.run_unpublished(lambda engine: in_place(engine, folder))
            running.is_base = folder == running.engine.folder.resolve()

    @contextlib.asynccontextmanager
    async def _transferring(self) -> AsyncGenerator[Running]:
        async with self._sampler.changing() as running:
            if not running.engine.transfers:
                raise BadRequest(NO_TRANSFER)
            yield running

    @contextlib.asynccontextmanager
    async def _updating(self) -> AsyncGenerator[Running]:
        async with self._transferring() as running:
            if not running.is_updating:
                raise Conflict("POST /start_weight_update comes first", code="out_of_order")
            if running.fault != UPDATING:
                raise StateLost(running.fault or "")
            yield running

    async def _step(self, running: Running, step: str, info: Mapping[str, Any] | None) -> None:
        """The weights are unknown until the last step is done, and for good if one fails."""
        running.is_updating, running.fault = True, UPDATING
        try:
            await running.engine.transfer(step, info)
        except BaseException as error:  # whatever it was, the weights are unknown
            running.fault = (
                f"a weight update by hand failed ({sentence(error)}), so the engine's weights are "
                "unknown; PUT /model starts a new engine"
            )
            raise

    # --- adapters --------------------------------------------------------------------------------

    async def load_adapter(self, request: LoadAdapterRequest) -> WeightsChanged:
        """Loads an adapter beside what serves; calls name it as their model."""
        async with self._sampler.changing(ready=True) as running:
            name = request.lora_name
            is_own = name in ("policy", running.spec.model)
            if "#" in name or is_own or not name.isprintable():
                raise BadRequest(
                    f"'lora_name': got {name!r}; expected a printable name without '#' that is not "
                    "the model's"
                )
            if not running.is_base:
                raise Conflict(
                    "other weights have replaced the model's own, to which an adapter belongs; "
                    f"POST /update_weights with 'weight_dir' {str(running.engine.folder)!r} brings "
                    "them back"
                )
            folder = self._named_folder("lora_path", request.lora_path)
            await self._load_adapter(running, name, folder)
        return WeightsChanged(message=f"Success: LoRA adapter '{name}' added successfully.")

    async def _load_adapter(self, running: Running, name: str, folder: Path) -> None:
        if not running.expected.max_lora_rank:
            raise Conflict(
                "the engine was started without adapters; PUT /model with a 'max_lora_rank' starts "
                "one with them",
                code="no_adapters",
            )
        copies = self._sampler.copies
        ref = AdapterWeights(
            job_id="by-hand",
            version=0,
            digest="",
            size_bytes=0,
            method="lora",
            path=str(folder),
            adapter=name,
        )
        try:
            copy = await copies.adapter(ref, folder)
        except Failed as error:
            raise BadRequest(f"'lora_path': {error.detail}") from error
        try:
            tensors = await asyncio.to_thread(adapter_digests, copy.folder)
            whole = ref.model_copy(update={"tensors": tensors, "digest": digest(tensors)})
            await asyncio.to_thread(proven_adapter, whole, copy.folder, running.expected)
        except (Failed, Conflict) as error:
            copies.remove(copy)
            raise BadRequest(f"'lora_path': {error.detail}") from error
        await running.adapters.load_by_hand(name, copy)

    async def unload_adapter(self, request: UnloadAdapterRequest) -> WeightsChanged:
        """Unloads an adapter that was loaded by name, once no call under way uses it."""
        name = request.lora_name
        async with self._sampler.changing() as running:
            if not running.adapters.drop(name):
                raise NotFound(f"'lora_name': no adapter {name!r} was loaded by hand")
        return WeightsChanged(message=f"Success: LoRA adapter '{name}' removed successfully.")

    def _named_folder(self, name: str, given: str) -> Path:
        """Returns the real path of a folder that the caller may name."""
        if "\0" in given:
            raise BadRequest(f"{name!r}: got {given!r:.80}; expected a folder")
        folder = Path(given).resolve()
        if allowed := other_folders(folder, self._settings):
            raise BadRequest(
                f"{name!r}: got {given!r:.200}; folders may be named below these only: {allowed}"
            )
        if not folder.is_dir():
            raise BadRequest(f"{name!r}: there is no folder {given!r:.200} here", code="not_there")
        return folder
