"""vLLM's routes that TRL's clients call: they pause sampling, reset the prefix cache, and load LoRA
adapters beside the served weights, which requests name as their model.

All but `/health` are refused while a job has the sampler. As in vLLM, they take query parameters in
place of a body. The field names of bodies are vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from services.rollout.running import Running
from services.rollout.sampler import Sampler
from services.rollout.weights.proofs import verified_adapter
from shared.errors import BadRequest, Conflict, Failed, NotFound, Unavailable
from shared.http.gate import other_folders
from shared.http.service import Service
from shared.settings import Settings
from shared.weights.folders import adapter_digests, digest
from shared.wire import AdapterWeights, Health, NoBody, Wire


class PauseRequest(Wire):
    """`POST /pause`: requests under way are frozen, and cached prefixes are dropped."""

    mode: Literal["keep"] = "keep"


class PauseState(Wire):
    """The answer to `/pause` and `/resume`. `status` is vLLM's text for `paused`."""

    paused: bool
    status: Literal["paused", "resumed"] = "paused"


class CacheReset(Wire):
    """The answer to `/reset_prefix_cache`. `success` is False while prefixes are in use."""

    success: bool


class AdapterChanged(Wire):
    """The answer to a change of adapters. `message` is vLLM's."""

    message: str


class LoadAdapterRequest(Wire):
    """`POST /v1/load_lora_adapter`: PEFT's files in the folder `lora_path`, to be called
    `lora_name`. An adapter of that name is replaced, also without `load_inplace`."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] = False


class UnloadAdapterRequest(Wire):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


Handler = Callable[[Any], Awaitable[BaseModel]]


def add_rl_routes(service: Service, sampler: Sampler) -> None:
    by_hand = EngineRoutes(sampler, service.settings)

    async def health() -> Health:
        """Whether the engine samples; 503 if it does not."""
        if why := await sampler.unready():
            raise Unavailable(why)
        return Health(service=service.name)

    routes: dict[str, Handler] = {
        "/pause": by_hand.pause,
        "/resume": by_hand.resume,
        "/reset_prefix_cache": by_hand.reset_prefix_cache,
        "/v1/load_lora_adapter": by_hand.load_adapter,
        "/v1/unload_lora_adapter": by_hand.unload_adapter,
    }
    for path, handler in routes.items():
        service.operation("POST", path, handler, key=by_state, parameters=True)
    service.query("/health", health)


def by_state(_: BaseModel) -> str:
    """Returns no key, so that no result is cached: the weights that serve now decide whether a
    request was done. A cached "version 5 is loaded" would be wrong after the engine was
    replaced."""
    return ""


class EngineRoutes:
    """The handlers of the routes that change the engine."""

    def __init__(self, sampler: Sampler, settings: Settings) -> None:
        self._sampler = sampler
        self._settings = settings

    async def pause(self, _: PauseRequest) -> PauseState:
        """Freezes sampling; new requests wait, and requests under way are kept. A job that takes
        the sampler ends the pause."""
        async with self._sampler.changing() as running:
            await running.engine.pause()
            running.is_paused = True
        return PauseState(paused=True)

    async def resume(self, _: NoBody) -> PauseState:
        """Continues sampling."""
        async with self._sampler.changing() as running:
            running.is_paused = False
            await running.engine.resume()
        return PauseState(paused=False, status="resumed")

    async def reset_prefix_cache(self, _: NoBody) -> CacheReset:
        """Forgets cached prefixes."""
        async with self._sampler.changing() as running:
            return CacheReset(success=await running.engine.reset_cache())

    async def load_adapter(self, request: LoadAdapterRequest) -> AdapterChanged:
        """Loads an adapter beside the served weights; calls name it as their model."""
        async with self._sampler.changing() as running:
            name = request.lora_name
            is_own = name in ("policy", running.spec.model)
            if "#" in name or is_own or not name.isprintable():
                raise BadRequest(
                    f"'lora_name': got {name!r}; expected a printable name without '#' that is not "
                    "the model's"
                )
            if not running.is_base:
                raise Conflict(
                    "weights of a job have replaced the model's own, to which adapters belong; "
                    "restart the sampler to serve the model's own"
                )
            folder = self._named_folder("lora_path", request.lora_path)
            await self._load_adapter(running, name, folder)
        return AdapterChanged(message=f"Success: LoRA adapter '{name}' added successfully.")

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
            await asyncio.to_thread(verified_adapter, whole, copy.folder, running.expected)
        except (Failed, Conflict) as error:
            copies.remove(copy)
            raise BadRequest(f"'lora_path': {error.detail}") from error
        await running.adapters.load_by_hand(name, copy)

    async def unload_adapter(self, request: UnloadAdapterRequest) -> AdapterChanged:
        """Unloads an adapter that was loaded by name, once no call uses it any more."""
        name = request.lora_name
        async with self._sampler.changing() as running:
            if not running.adapters.drop(name):
                raise NotFound(f"'lora_name': no adapter {name!r} was loaded by this route")
        return AdapterChanged(message=f"Success: LoRA adapter '{name}' removed successfully.")

    def _named_folder(self, name: str, text: str) -> Path:
        """Returns the real path of a folder that the caller may name."""
        if "\0" in text:
            raise BadRequest(f"{name!r}: got {text!r:.80}; expected a folder")
        folder = Path(text).resolve()
        if allowed := other_folders(folder, self._settings):
            raise BadRequest(
                f"{name!r}: got {text!r:.200}; folders may be named below these only: {allowed}"
            )
        if not folder.is_dir():
            raise BadRequest(f"{name!r}: there is no folder {text!r:.200} here", code="not_there")
        return folder
