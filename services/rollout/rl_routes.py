"""vLLM's routes for reinforcement learning, so that trainers other than Hone's find a vLLM server:
TRL's clients, prime-rl, SkyRL, and people with curl. What they do is in `by_hand.py`.

As vLLM's, they take query parameters in place of a body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel

from services.rollout.by_hand import ByHand
from services.rollout.sampler import Sampler
from shared.errors import Unavailable
from shared.http.service import Service
from shared.wire import Health, ServingWeights, SleepRequest

Handler = Callable[[Any], Awaitable[BaseModel]]


def add_rl_routes(service: Service, sampler: Sampler) -> None:
    by_hand = ByHand(sampler, service.settings)

    async def health() -> Health:
        """Whether the engine samples; 503 if it does not, or not yet."""
        if why := await sampler.unready():
            raise Unavailable(why)
        return Health(service=service.name)

    async def sleep(request: SleepRequest) -> ServingWeights:
        """Frees the GPU's memory until weights are loaded."""
        return await sampler.sleep(request)

    routes: dict[str, Handler] = {
        "/pause": by_hand.pause,
        "/resume": by_hand.resume,
        "/sleep": sleep,
        "/wake_up": by_hand.wake_up,
        "/reset_prefix_cache": by_hand.reset_prefix_cache,
        "/init_weight_transfer_engine": by_hand.init_transfer,
        "/start_weight_update": by_hand.start_update,
        "/update_weights": by_hand.update,
        "/finish_weight_update": by_hand.finish_update,
        "/collective_rpc": by_hand.call,
        "/v1/load_lora_adapter": by_hand.load_adapter,
        "/load_lora_adapter": by_hand.load_adapter,  # prime-rl's
        "/skyrl/v1/load_lora_adapter": by_hand.load_adapter,
        "/v1/unload_lora_adapter": by_hand.unload_adapter,
    }
    for path, handler in routes.items():
        service.operation("POST", path, handler, key=by_state, parameters=True)
    service.query("/health", health)
    service.query("/is_paused", by_hand.is_paused)
    service.query("/is_sleeping", by_hand.is_sleeping)


def by_state(_: BaseModel) -> str:
    """Returns no key, so that no result is cached: the weights that serve now decide whether a
    request was done. A cached "version 5 is loaded" would be wrong after the engine was
    replaced."""
    return ""
