"""Settings of the samplers: the engine, its memory, and what is kept of sessions and adapters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from shared.http.urls import check_service_url
from shared.settings.base import FromEnvironment, Listed


class RolloutSettings(FromEnvironment):
    """What a sampler has."""

    rollout_model: str | None = None
    """Model folder or Hugging Face id that the sampler loads at its start, to serve it by hand.
    None: it waits for a job's."""

    rollout_replica: str | None = None
    """Name of this sampler among several, in rollouts and logs. None: its host's name and port."""

    rollout_advertise_url: str | None = None
    """URL by which the orchestrator reaches this sampler, such as http://10.0.0.7:8001. With it the
    sampler registers itself at `orchestrator_url`, until it ends. None: the orchestrator's
    `rollout_url` names it."""

    rollout_replicas: int = Field(default=1, ge=1, le=64)
    """Samplers that `hone up` starts for each trainer, on the ports from `rollout_port` on. More
    than 1 only where there is no GPU: there each needs GPUs of its own, and is started by hand. On
    a CPU with cores to spare two sample a tenth to a third faster than one."""

    kv_cache_gib: int = Field(default=1, gt=0)
    """GiB of memory for attention's keys and values where vLLM runs on a CPU."""

    colocate: bool = False
    """Sampler and trainer take turns on the same GPUs: while the trainer trains, the sampler sleeps
    and frees its memory; while the sampler samples, the optimizer is in the host's memory. Needs
    `max_staleness` 0 in every job. Off by default: with GPUs of its own neither waits for the
    other. Set it for orchestrator, trainer and sampler alike."""

    rollout_devices: Annotated[tuple[str, ...], Listed] = ()
    """GPUs of the sampler in the stack that `hone up` starts, as CUDA_VISIBLE_DEVICES names them:
    "0,1". Empty: the first `tensor_parallel_size`."""

    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes, weights and cache together. `hone up` lowers the
    default to 0.35 where sampler and trainer have to share a GPU, and to 0.6 where they take turns
    on it (`colocate`)."""

    sleep_mode: bool = False
    """Lets vLLM free its GPU memory while weights are exchanged, which `weight_sync = "reload"`
    needs. Off by default: vLLM then allocates memory in another way. Without effect on a CPU."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that the sampler's model is split over. 1 is fastest for a model that fits."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that vLLM samples at once; others wait. More need a larger cache. None: 256 on a
    CPU, and vLLM's default on a GPU: 1,024 from 70 GiB of memory on, and 256 below."""

    tool_parser: str | None = None
    """vLLM's parser of tool calls (its `--tool-call-parser`) for `/v1/chat/completions`: "hermes"
    for Qwen2.5. None: a request with tools must say `tool_choice` "none", and the model's tool
    calls stay text."""

    max_sessions: int = Field(default=1024, ge=1)
    """Sessions (recorded agents) that the sampler keeps at once. Beyond it the session that was
    idle longest is forgotten."""

    sessions_mib: int = Field(default=2048, ge=1)
    """Memory, in MiB, that all sessions may take together: tokens with their log-probs (13 bytes
    per token), the candidates of each token under `top_p`, `top_k` or `min_p` (4 bytes each),
    messages, and the last answers. Beyond it the sessions idle longest are forgotten, and a session
    that takes all of it gets no further turn. The default holds 1,024 sessions of 100,000 tokens
    without masks."""

    max_session_tokens: int = Field(default=262_144, ge=1)
    """Tokens that one session may have, those of tools and users included. Beyond it the next turn
    is refused. The default is twice the context of most models."""

    session_idle_s: float = Field(default=3600.0, gt=0)
    """Seconds without a turn after which a session is forgotten. Long enough for the slowest tool,
    and for fetching the record."""

    rollout_adapters: int = Field(default=4, ge=1, le=64)
    """Jobs whose LoRA adapters (`weight_sync = "lora"`) a sampler serves side by side, the one in
    training included. Beyond it the adapter that was loaded longest ago is unloaded. Each takes its
    size in device memory, 80 MB for rank 16 of a 7B model. Without effect on jobs without
    `[lora]`."""

    shm_dir: Path = Path(f"/dev/shm/hone-{os.getuid()}")
    """Folder in shared memory for weights on their way to the sampler (`weight_sync = "shm"`); it
    holds three versions. Trainer and sampler must see the same one."""

    copies_dir: Path | None = None
    """Folder for weights that a sampler fetches from its trainer (`weight_sync` "http", "delta" and
    "lora"): at most twice the model's size. None: `shm_dir`, which must then be writable."""

    @field_validator("rollout_advertise_url")
    @classmethod
    def _advertised(cls, value: str | None) -> str | None:
        return value and check_service_url(value)
