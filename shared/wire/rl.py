"""Bodies of vLLM's routes for reinforcement learning, which trainers other than Hone's send to a
sampler. Field names are vLLM's. `update_info` is for vLLM's weight transfer, `weight_dir` is
prime-rl's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.documented import Plain
from shared.wire.base import Wire

PauseMode = Literal["keep", "abort", "wait"]
"""What pausing does to requests under way: freeze them, end them, or wait until they are done."""


class PauseRequest(Wire):
    """`POST /pause`. Cached prefixes are always forgotten, so `clear_cache` changes nothing."""

    mode: PauseMode = "keep"
    clear_cache: bool = True


class PauseState(Wire):
    """`status` is vLLM's word for `paused`."""

    paused: bool
    status: Literal["paused", "resumed"] = "paused"


class IsPaused(Wire):
    """`GET /is_paused`."""

    is_paused: bool


class IsSleeping(Wire):
    """`GET /is_sleeping`."""

    is_sleeping: bool


class WakeRequest(Wire):
    """`POST /wake_up`. A sampler wakes as a whole, so `tags` change nothing."""

    tags: tuple[Literal["weights", "kv_cache", "scheduling"], ...] = ()


class WakeState(Wire):
    """`status` is "sleeping" while the sampler still waits for weights."""

    status: Literal["awake", "sleeping"]


class ResetCacheRequest(Wire):
    """`POST /reset_prefix_cache`."""

    reset_running_requests: bool = False
    reset_external: bool = False


class CacheReset(Wire):
    """`success` is False while requests still use what is cached."""

    success: bool


class TransferRequest(Wire):
    """`POST /init_weight_transfer_engine`: where vLLM's processes meet the trainer."""

    init_info: dict[str, Plain]


class StartUpdateRequest(Wire):
    """`POST /start_weight_update`. Weights always come by a checkpoint's names."""

    is_checkpoint_format: Literal[True] = True


class UpdateRequest(Wire):
    """`POST /update_weights`: the tensors that the trainer sends now, or a folder of them."""

    update_info: dict[str, Plain] | None = None
    weight_dir: str | None = None


class FinishUpdateRequest(Wire):
    """`POST /finish_weight_update`. Hone keeps no version of such weights."""

    weight_version: str | None = None


class WeightsChanged(Wire):
    """`message` is vLLM's, `status` prime-rl's."""

    message: str
    status: Literal["ok"] = "ok"


class RemoteCall(Wire):
    """`POST /collective_rpc`: a method of vLLM's workers, and its arguments."""

    method: str
    args: tuple[Plain, ...] = ()
    kwargs: dict[str, Plain] = {}
    timeout: float | None = None


class RemoteResults(Wire):
    """What each worker returned."""

    results: tuple[Plain, ...]


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
