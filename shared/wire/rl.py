"""Bodies of vLLM's routes that TRL's clients call at a sampler. Field names are vLLM's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.wire.base import Wire


class PauseRequest(Wire):
    """`POST /pause`: requests under way are frozen, and cached prefixes forgotten."""

    mode: Literal["keep"] = "keep"


class PauseState(Wire):
    """`status` is vLLM's word for `paused`."""

    paused: bool
    status: Literal["paused", "resumed"] = "paused"


class CacheReset(Wire):
    """`success` is False while requests still use what is cached."""

    success: bool


class AdapterChanged(Wire):
    """`message` is vLLM's."""

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
