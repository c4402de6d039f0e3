"""The arguments that vLLM is started with: those that make its log-probs those the trainer needs,
on the hardware that is there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from services.rollout.on_vllm.inside.executors import (
    InProcessExecutor,
    MaskingScheduler,
    ProcessPerDeviceExecutor,
)
from shared.errors import BadRequest
from shared.model import architectures
from shared.settings import Settings
from shared.wire import (
    EngineSpec,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

CPU_SEQUENCES = 256
"""What vLLM samples at once on a CPU, if nobody says."""

LORA_RANKS = sorted(get_args(MaxLoRARanks))
"""What vLLM can be started for."""

LORA_DTYPES = frozenset({"float16", "bfloat16"})
"""What vLLM's kernels for adapters take on a GPU; they end the engine at another one. Those for a
CPU take all."""

MAX_OLD_ADAPTERS = 65
"""Versions of one adapter that requests may still name: one for each step of staleness. vLLM keeps
them in host memory, and gives each a place on the device in its turn."""


def engine_args(
    spec: EngineSpec, settings: Settings, weights: Path | None = None
) -> AsyncEngineArgs:
    """Returns vLLM's arguments for `spec` on this machine, with the model in `weights`, if given,
    in the place of its own."""
    args = AsyncEngineArgs(
        model=str(weights) if weights else spec.model,
        revision=None if weights else spec.revision,
        tokenizer=spec.model,
        tokenizer_revision=spec.revision,
        dtype=choose_dtype(spec.dtype),
        # vLLM's own default is None too
        max_model_len=spec.max_model_len,  # pyright: ignore[reportArgumentType]
        seed=spec.seed,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend=InProcessExecutor
        if settings.tensor_parallel_size == 1
        else ProcessPerDeviceExecutor,
        worker_extension_cls="services.rollout.on_vllm.inside.worker.WorkerExtension",
        logprobs_mode="processed_logprobs",
        # A model's own sampling defaults would be a silent second source of temperature and top_p.
        generation_config="vllm",
        enable_prefix_caching=True,
        scheduling_policy="priority",  # for the canary
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if spec.sampling_masks:
        ask_for_masks(args)
    if current_platform.is_cpu():
        args.enforce_eager = True
        args.max_num_seqs = settings.max_num_seqs or CPU_SEQUENCES
        # Where a prompt is computed in parts, vLLM takes back what it drew for it in between, which
        # the generators of seeded requests cannot do on a CPU: the engine would die.
        args.enable_chunked_prefill = False
        args.kv_cache_memory_bytes = settings.kv_cache_gib << 30
    else:
        check_devices(settings.tensor_parallel_size, torch.cuda.device_count())
        args.gpu_memory_utilization = settings.gpu_memory_utilization
        args.enable_sleep_mode = can_sleep(settings)
    if spec.max_lora_rank and takes_adapters(args):
        args.enable_lora = True
        args.max_lora_rank = min(rank for rank in LORA_RANKS if rank >= spec.max_lora_rank)
        args.max_loras = settings.rollout_adapters + 1
        args.max_cpu_loras = args.max_loras + MAX_OLD_ADAPTERS
    return args


def start(args: AsyncEngineArgs) -> AsyncLLM:
    """Returns vLLM once it can sample. On a GPU it takes as much at once as where a program
    gives it all prompts together: the sizes of its server are for short waits."""
    context = UsageContext.ENGINE_CONTEXT if current_platform.is_cpu() else UsageContext.LLM_CLASS
    llm = AsyncLLM.from_engine_args(args, usage_context=context)
    if args.return_sampling_mask:
        # With masks vLLM refuses a request without top_k, and a greedy one, for the size of theirs.
        # Theirs are empty here (inside/masks.py).
        checks = copy.copy(llm.model_config)
        checks.return_sampling_mask = False
        llm.input_processor.model_config = checks
    return llm


def check_devices(num_ranks: int, num_visible: int) -> None:
    """Raises BadRequest where the model would be split over more GPUs than there are. That the
    model can be split so, vLLM checks."""
    if num_ranks > num_visible:
        raise BadRequest(
            f"HONE_TENSOR_PARALLEL_SIZE is {num_ranks}, and the sampler sees {num_visible} GPU(s); "
            "lower it, or name more in CUDA_VISIBLE_DEVICES"
        )


def takes_adapters(args: AsyncEngineArgs) -> bool:
    """Returns whether vLLM has LoRA for the model's architecture, and for its dtype here."""
    if not current_platform.is_cpu() and args.dtype not in LORA_DTYPES:
        return False
    config = args.create_model_config()
    model, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
    return supports_lora(model)


def can_sleep(settings: Settings) -> bool:
    """Returns whether vLLM allocates memory in the way that lets it free it again."""
    return settings.sleep_mode or settings.colocate


def ask_for_masks(args: AsyncEngineArgs) -> None:
    """Asks for the tokens that each token was drawn from: of vLLM, or on a CPU, where its model
    runner does not say it, of our executor. Raises BadRequest where neither can."""
    if not current_platform.is_cpu():
        args.return_sampling_mask = True
    elif args.tensor_parallel_size == 1:
        args.scheduler_cls = MaskingScheduler
    else:
        raise BadRequest(
            "the job samples from parts of the vocabulary (sampling.top_p, top_k or min_p), and on "
            "a CPU the sampler can say which only with HONE_TENSOR_PARALLEL_SIZE 1; got "
            f"{args.tensor_parallel_size}. To train without, set "
            'correction.truncated_sampling = "accept"'
        )


def choose_dtype(asked: Dtype) -> Dtype:
    """Returns the dtype to serve in here, by the rule that the trainer follows."""
    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    chosen = architectures.choose_dtype(
        asked,
        capability=None if capability is None else (capability.major, capability.minor),
        cpu_multiplies_bfloat16=torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported(),
    )
    return cast(Dtype, chosen)
