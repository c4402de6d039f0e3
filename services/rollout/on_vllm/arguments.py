"""The arguments with which vLLM is started on this machine, so that its log-probs are as the
trainer needs them; and the model's tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from services.rollout.on_vllm.inside_executors import (
    ConstraintMaskingScheduler,
    InProcessExecutor,
    MaskingScheduler,
    ProcessPerDeviceExecutor,
)
from shared.errors import BadRequest
from shared.settings import Settings
from shared.weights import architectures
from shared.weights.model_folder import model_folder
from shared.wire import (
    EngineSpec,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

CPU_SEQUENCES = 256
"""The most completions at once on a CPU, without a setting."""

CPU_BLOCK = 32
"""Tokens of a block of the cache on a CPU, the fewest for which vLLM's kernels are fast. Prompts
share whole blocks, and with vLLM's default there, 128, a shorter prompt would be computed again for
each completion of its group."""

LORA_RANKS = sorted(get_args(MaxLoRARanks))
"""The ranks of adapters that vLLM can be started for."""

LORA_DTYPES = frozenset({"float16", "bfloat16"})
"""The dtypes that vLLM's GPU kernels for adapters take. Another dtype crashes the engine. The
kernels for a CPU support all dtypes."""

MAX_OLD_ADAPTERS = 65
"""The most versions of one adapter that requests may still name: one for each step of staleness.
vLLM keeps them in host memory and moves one to the device when a request needs it."""

EMPTY = "<|endoftext|>"
"""The only token of an empty byte-level tokenizer of transformers."""

EXPECTED = "expected tokenizer.json, or what it is made from, beside config.json"


def engine_args(
    spec: EngineSpec, settings: Settings, weights: Path | None = None
) -> AsyncEngineArgs:
    """Returns vLLM's arguments for `spec` on this machine. The weights are those in the folder
    `weights`, if given, and else the model's own."""
    args = AsyncEngineArgs(
        model=str(weights) if weights else spec.model,
        revision=None if weights else spec.revision,
        tokenizer=spec.model,
        tokenizer_revision=spec.revision,
        dtype=choose_dtype(spec.dtype),
        # None is vLLM's default
        max_model_len=spec.max_model_len,  # pyright: ignore[reportArgumentType]
        seed=spec.seed,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend=InProcessExecutor
        if settings.tensor_parallel_size == 1
        else ProcessPerDeviceExecutor,
        worker_extension_cls="services.rollout.on_vllm.inside_worker.WorkerExtension",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,  # distillation by TRL requests the 100 likeliest tokens
        # Else the model's own defaults would silently set temperature and top_p.
        generation_config="vllm",
        enable_prefix_caching=True,
        scheduling_policy="priority",  # for the canary
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if spec.sampling_masks:
        ask_for_masks(args)
    elif gives_masks(spec, settings):
        args.scheduler_cls = ConstraintMaskingScheduler
    if current_platform.is_cpu():
        args.enforce_eager = True
        args.max_num_seqs = settings.max_num_seqs or CPU_SEQUENCES
        # After each part of a prompt vLLM undoes the draw of a random number. The generators of
        # seeded requests cannot do that on a CPU, and the engine would die.
        args.enable_chunked_prefill = False
        args.block_size = CPU_BLOCK
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
    """Returns vLLM once it can sample. On a GPU it gets the batch sizes of vLLM's offline use,
    where a program gives all prompts at once: the sizes of vLLM's server are for short waits."""
    context = UsageContext.ENGINE_CONTEXT if current_platform.is_cpu() else UsageContext.LLM_CLASS
    llm = AsyncLLM.from_engine_args(args, usage_context=context)
    if args.return_sampling_mask:
        # With masks vLLM refuses greedy requests and requests without top_k, because their masks
        # would be large. Here these masks are empty (inside_executors.py).
        checks = copy.copy(llm.model_config)
        checks.return_sampling_mask = False
        llm.input_processor.model_config = checks
    return llm


def check_devices(num_ranks: int, num_visible: int) -> None:
    """Raises BadRequest if the model would be split over more GPUs than there are. vLLM checks
    whether the model can be split."""
    if num_ranks > num_visible:
        raise BadRequest(
            f"HONE_TENSOR_PARALLEL_SIZE is {num_ranks}, and the sampler sees {num_visible} GPU(s); "
            "lower it, or name more in CUDA_VISIBLE_DEVICES"
        )


def takes_adapters(args: AsyncEngineArgs) -> bool:
    """Returns whether vLLM supports LoRA for the model's architecture, and for its dtype on this
    machine."""
    if not current_platform.is_cpu() and args.dtype not in LORA_DTYPES:
        return False
    config = args.create_model_config()
    model, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
    return supports_lora(model)


def can_sleep(settings: Settings) -> bool:
    """Returns whether vLLM allocates its memory so that it can free it again."""
    return settings.sleep_mode or settings.colocate


def gives_masks(spec: EngineSpec, settings: Settings) -> bool:
    """Returns whether the engine returns the tokens that a constraint allowed. On a CPU this has no
    cost without constraints; on a GPU vLLM then samples all requests in another way."""
    return spec.sampling_masks or (current_platform.is_cpu() and settings.tensor_parallel_size == 1)


def ask_for_masks(args: AsyncEngineArgs) -> None:
    """Turns on sampling masks: vLLM's own masks on a GPU, our executor's on a CPU. Raises
    BadRequest if neither is possible."""
    if not current_platform.is_cpu():
        args.return_sampling_mask = True
    elif args.tensor_parallel_size == 1:
        args.scheduler_cls = MaskingScheduler
    else:
        raise BadRequest(
            "the job samples from parts of the vocabulary (sampling.top_p, top_k or min_p), and "
            "on a CPU the sampler can return these only with HONE_TENSOR_PARALLEL_SIZE 1; got "
            f"{args.tensor_parallel_size}. To train without them, set "
            'correction.truncated_sampling = "accept"'
        )


def choose_dtype(setting: Dtype) -> Dtype:
    """Returns the dtype to serve in on this hardware, by the same rule as the trainer
    (`shared/weights/architectures.py`)."""
    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    chosen = architectures.choose_dtype(
        setting,
        capability=None if capability is None else (capability.major, capability.minor),
        cpu_multiplies_bfloat16=torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported(),
    )
    return cast(Dtype, chosen)


def load_tokenizer(spec: EngineSpec) -> Any:
    """Returns the model's tokenizer. Raises BadRequest for a folder that has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(spec.model, revision=spec.revision)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if model_folder(spec.model) is None:
            raise  # the hub may be unreachable
        raise BadRequest(
            f"the tokenizer in {spec.model!r} cannot be loaded: {type(error).__name__}: {error}; "
            f"{EXPECTED}"
        ) from error
    # Without tokenizer files transformers makes an empty tokenizer, which has only special tokens.
    special = set(tokenizer.added_tokens_encoder) | set(tokenizer.all_special_tokens)
    if set(tokenizer.get_vocab()) <= special | {EMPTY}:
        raise BadRequest(
            f"the model {spec.model!r} has no tokenizer: it has only special tokens; {EXPECTED}"
        )
    return tokenizer


def end_ids(tokenizer: Any, model_config: Any) -> frozenset[int]:
    """Returns the tokens at which vLLM ends a completion: the end-of-sequence tokens of the
    tokenizer and of the model's generation configuration."""
    eos: Any = model_config.try_get_generation_config().get("eos_token_id")
    listed: list[Any] = eos if isinstance(eos, list) else [eos]
    return frozenset(id for id in (tokenizer.eos_token_id, *listed) if id is not None)
