"""DeepSpeed as the engine uses it: one policy, one AdamW, any ZeRO stage (arXiv 1910.02054).

    stage 0    every rank holds everything; gradients are averaged before the step
    stage 1    each rank holds a share of the master weights and of Adam's moments
    stage 2    and of the gradients, which are averaged micro-batch by micro-batch
    stage 3    and of the weights, which are gathered layer by layer while they are used

At every stage, gradients are added up and averaged in float32, weights have a float32 master, and a
step with a gradient that is not finite changes nothing on any rank. DeepSpeed lacks the last two at
stage 0: see `start` and `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn

from shared.errors import BadRequest
from shared.job import Job, TrainingSpec
from shared.plan.memory import MAX_BUCKET
from shared.wire import Optimization

NORM_PIECE = 1 << 22
"""Elements of a gradient whose norm is taken at a time."""

LINEAR = torch.nn.functional.linear
"""torch's own. ZeRO-3 replaces it permanently by another, whose results differ in the last bit."""

# An all-reduce that only DeepSpeed's tensor-parallel inference uses. Compiling it would take a
# minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

ALLOWED = frozenset(
    {
        *("wall_clock_breakdown", "memory_breakdown", "steps_per_print", "dump_state"),
        *("comms_logger", "log_level", "timers", "disable_python_gc", "aio"),
        "flops_profiler.detailed",
        "flops_profiler.enabled",
        "flops_profiler.module_depth",
        "flops_profiler.profile_step",
        "flops_profiler.recompute_fwd_factor",
        "flops_profiler.top_modules",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.allgather_partitions",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.reduce_scatter",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.stage3_allgather_sequential",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.sub_group_size",
        "zero_optimization.use_multi_rank_bucket_allreduce",
    }
)
"""The keys that `memory.deepspeed` may set: they change placement, communication and logging, and
not results. A key allows all keys below it."""

INSTEAD = {
    "flops_profiler.output_file": "jobs may not name files to write; it is in the log",
    "zero_optimization.offload_param.nvme_path": "jobs may not name folders to write",
    "train_batch_size": "the batch comes with /train_step",
    "train_micro_batch_size_per_gpu": "use memory.micro_batch_tokens",
    "gradient_accumulation_steps": "use memory.micro_batch_tokens",
    "managed_gradient_accumulation": "use memory.micro_batch_tokens",
    "gradient_clipping": "use training.max_grad_norm",
    "gradient_predivide_factor": "the loss is already divided by the tokens of all ranks",
    "prescale_gradients": "the loss is already divided by the tokens of all ranks",
    "gradient_allreduce_op": "the loss is already divided by the tokens of all ranks",
    "communication_data_type": "gradients are added up in float32",
    "data_types": "gradients are added up in float32",
    "optimizer": "use training.learning_rate, weight_decay, adam_beta1 and adam_beta2",
    "scheduler": "use training.schedule and warmup_steps",
    "fp16": "use training.dtype",
    "bf16": "use training.dtype",
    "torch_autocast": "use training.dtype",
    "amp": "use training.dtype",
    "data_efficiency": "the batch comes with /train_step",
    "curriculum_learning": "the batch comes with /train_step",
    "activation_checkpointing": "use memory.gradient_checkpointing",
    "checkpoint": "use [checkpoints]",
    "zero_optimization.stage": "use memory.zero_stage",
    "zero_optimization.offload_optimizer.device": "use memory.offload_optimizer",
    "zero_optimization.cpu_offload": "use memory.offload_optimizer",
}
"""Why `memory.deepspeed` may not set these keys, or what to use instead."""


def start(policy: nn.Module, job: Job, dtype: torch.dtype) -> Any:
    """Returns DeepSpeed's engine around `policy`. Raises BadRequest for settings that DeepSpeed
    refuses."""
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    settings = config(job, dtype, sum(parameter.numel() for parameter in trainable))
    optimizer = make_optimizer(policy)
    try:
        if job.memory.zero_stage == 3:
            spread(policy, settings, dtype)
        zero: Any = deepspeed.initialize(
            model=policy, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
    except (ValueError, TypeError, AssertionError) as error:
        if not job.memory.deepspeed:
            raise
        raise BadRequest(
            f"DeepSpeed does not take memory.deepspeed = {job.memory.deepspeed!r}: {error}"
        ) from error
    if job.memory.zero_stage == 0:
        # DeepSpeed tried its optimizer on gradients of zero, which would count as Adam's first
        # step.
        zero.basic_optimizer.state.clear()
        for parameter in trainable:
            parameter.grad = None
            parameter.grad_dtype = torch.float32
    return zero


def stop(zero: Any) -> None:
    """Frees DeepSpeed's memory, and restores torch's functions that ZeRO-3 replaced, so that the
    next job computes as in a new process. `zero` None: cleans up after a failed start."""
    if zero is not None:
        zero.destroy()
    # ZeRO-3 keeps every policy in these two, and never frees it.
    parameter_offload.FWD_MODULE_STACK.clear()
    coordinator: Any = PartitionedParameterCoordinator
    _clear_cache_in(coordinator._PartitionedParameterCoordinator__params_to_release)
    torch.nn.functional.linear = LINEAR


def _clear_cache_in(decorated: Any) -> None:
    """Empties the `lru_cache` of a function that DeepSpeed's profiling hides in a closure."""
    for cell in decorated.__closure__ or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def start_frozen(policy: nn.Module, job: Job, dtype: torch.dtype) -> None:
    """Partitions a policy that is never trained over the ranks, in place, as ZeRO-3 does."""
    settings = config(job, dtype, sum(parameter.numel() for parameter in policy.parameters()))
    settings["zero_optimization"].pop("offload_optimizer", None)
    spread(policy, settings, dtype)
    deepspeed.initialize(model=policy, config=settings, dist_init_required=False)


def spread(policy: nn.Module, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Partitions the policy's parameters, which rank 0 has in host memory, one by one. Each rank
    keeps its share on its device."""
    deepspeed.zero.Init(module=policy, config_dict_or_path=settings, dtype=dtype)


def step(zero: Any, how: Optimization) -> float | None:
    """Applies the gradients that were added up, clipped to `max_grad_norm` unless that is 0.
    Returns their norm before that; None if it is not finite, then with weights and optimizer
    unchanged."""
    for group in zero.optimizer.param_groups:
        group["lr"], group["eps"] = how.learning_rate, how.eps
        group["betas"] = (how.beta1, how.beta2)
        group["weight_decay"] = how.weight_decay if group[DECAYS] else 0.0
    if zero.zero_optimization_stage() > 0:
        zero.optimizer.clip_grad = how.max_grad_norm
        zero.step()
        return float(zero.get_global_grad_norm()) if zero.was_step_applied() else None
    parameters = [parameter for parameter in zero.module.parameters() if parameter.grad is not None]
    norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if not torch.isfinite(norm):
        zero.zero_grad()
        return None
    if how.max_grad_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, how.max_grad_norm, norm)
    zero.step()
    return float(norm)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm over all gradients, summed in float64 as DeepSpeed does at the other
    stages: in float32, the norm of 50 million normal numbers is 0.4 % too small on a CPU."""
    # In pieces, because each piece is copied to float64.
    pieces = [piece for gradient in gradients for piece in gradient.flatten().split(NORM_PIECE)]
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def config(job: Job, dtype: torch.dtype, num_trainable: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, `memory.deepspeed` merged over it."""
    memory, training = job.memory, job.training
    bucket = min(num_trainable, MAX_BUCKET)
    stage = memory.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket + bucket % 2,
        "overlap_comm": False,
    }
    if memory.offload_optimizer:
        if stage == 0:
            raise BadRequest(
                "memory.offload_optimizer needs memory.zero_stage 1, 2 or 3, got 0: DeepSpeed "
                "offloads ZeRO's optimizer"
            )
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.max_grad_norm if stage > 0 else 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"} if stage > 0 else {},
        "bf16": {"enabled": dtype is torch.bfloat16, "check_grad_overflow": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # see make_optimizer
    }
    check_allowed(memory.deepspeed)
    return merged(base, memory.deepspeed)


def check_allowed(section: dict[str, Any], prefix: str = "") -> None:
    """Raises BadRequest if a section of `memory.deepspeed` sets a key that is not `ALLOWED`."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path in ALLOWED:
            continue
        if any(allowed.startswith(f"{path}.") for allowed in ALLOWED):
            if not isinstance(value, dict):
                raise BadRequest(f"memory.deepspeed sets {path} to {value!r}, expected a table")
            check_allowed(value, f"{path}.")
            continue
        instead = INSTEAD.get(path, "it may change what is computed")
        raise BadRequest(
            f"memory.deepspeed sets {path} to {value!r}, which cannot be set there; {instead}"
        )


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` with the keys of `over`, section by section."""
    result = dict(base)
    for key, value in over.items():
        result[key] = merged(base[key], value) if isinstance(base.get(key), dict) else value
    return result


ADAM_EPS = 1e-8

DECAYS = "decays"
"""Key of the optimizer's parameter groups: whether weight decay applies to them."""


def optimization(training: TrainingSpec, learning_rate: float) -> Optimization:
    """Returns an optimizer step of a job."""
    return Optimization(
        learning_rate=learning_rate,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        eps=ADAM_EPS,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
    )


def make_optimizer(policy: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW over the trained parameters, also where its state is offloaded: torch's fused
    step on a CPU is as fast as DeepSpeed's, which would be compiled at first use.

    Weight decay applies only to matrices, as is usual, and not to norms and biases. Each `step`
    sets Adam's constants.
    """
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [{"params": matrices, DECAYS: True}, {"params": vectors, DECAYS: False}]
    groups = [group for group in groups if group["params"]]
    # Fused: `foreach` would make a second float32 copy of all weights in the middle of a step.
    return torch.optim.AdamW(groups, lr=0.0, fused=True)
