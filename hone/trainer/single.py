"""Names that people use for GRPO, TRL's above all, each with the key that it becomes alone, and the
names of transformers' TrainingArguments, GRPOConfig and GRPOTrainer without a key, and why.

`REFUSED` would change what is learned: only their neutral value is accepted. `IGNORED` say how
another trainer works inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import BadRequest
from shared.explain import elide


@dataclass
class Translation:
    """A job's keys, nested as in its file, and what became of the names that have none."""

    job: dict[str, Any] = field(default_factory=dict[str, Any])
    ignored: list[str] = field(default_factory=list[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    unknown: list[str] = field(default_factory=list[str])

    def set(self, key: str, value: Any) -> None:
        """Sets a key such as "training.beta"."""
        *sections, last = key.split(".")
        table = self.job
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value


SAME = {
    "name": "name",
    "run_name": "name",
    "model_revision": "model_revision",
    "num_generations": "sampling.group_size",
    "group_size": "sampling.group_size",
    "batch_size": "sampling.prompts_per_step",
    "prompts_per_step": "sampling.prompts_per_step",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "chat_template_kwargs": "sampling.template_args",
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "max_length": "max_model_len",
    "max_seq_length": "max_model_len",
    "vllm_max_model_length": "max_model_len",
    "learning_rate": "training.learning_rate",
    "lr": "training.learning_rate",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "max_grad_norm": "training.max_grad_norm",
    "minibatches": "training.minibatches",
    "beta": "training.beta",
    "kl_coef": "training.beta",
    "clip_low": "training.clip_low",
    "clip_high": "training.clip_high",
    "delta": "training.dual_clip",
    "sapo_temperature_pos": "training.tau_positive",
    "sapo_temperature_neg": "training.tau_negative",
    "importance_sampling_level": "training.importance",
    "mask_truncated_completions": "advantages.mask_truncated",
    "num_train_epochs": "data.epochs",
    "n_epochs": "data.epochs",
    "shuffle_dataset": "data.shuffle",
    "data_seed": "data.shuffle_seed",
    "system_prompt": "data.system_prompt",
    "gradient_checkpointing": "memory.gradient_checkpointing",
    "weight_sync_method": "weight_sync",
    "sync_weights_every": "sync_every",
    "save_total_limit": "checkpoints.keep_last",
}
"""Names whose value is the key's. None leaves the key at its default."""

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
"""A job's schedules, by the names that transformers gives them."""

STD = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
DTYPES = {name: name for name in ("auto", "float32", "bfloat16")}


def _of(known: Mapping[Any, str]) -> Callable[[Any], str]:
    """Returns the conversion of a value, or of an enum's member, by a table."""

    def convert(value: Any) -> str:
        name = getattr(value, "value", value)
        if name not in [*known]:  # a list has no hash
            raise BadRequest(f"expected one of {', '.join(map(repr, known))}")
        return known[name]

    return convert


def dtype(value: Any) -> str:
    """Returns `training.dtype` for one of torch's dtypes, or its name."""
    return _of(DTYPES)(str(value).removeprefix("torch."))


@dataclass(frozen=True)
class Conversion:
    """`of` returns the key's value, and raises BadRequest with what it expected. `note` is for
    people."""

    key: str
    of: Callable[[Any], Any]
    note: str


CONVERTED = {
    "lr_scheduler_type": Conversion(
        "training.schedule", _of(SCHEDULES), 'also "constant_with_warmup", "cosine_with_min_lr"'
    ),
    "scale_rewards": Conversion("advantages.std", _of(STD), 'True is "group", False "none"'),
    "top_p": Conversion("sampling.top_p", float, "below 1 it needs `top_k` too"),
    "top_k": Conversion("sampling.top_k", lambda value: max(value, 0), "-1 is 0: no limit"),
    "min_p": Conversion("sampling.min_p", float, "above 0 it needs `top_k` too"),
    "torch_dtype": Conversion("training.dtype", dtype, "torch's dtypes, or their names"),
    "dtype": Conversion("training.dtype", dtype, "torch's dtypes, or their names"),
}


def key_of(name: str) -> str:
    """Returns the key that a name becomes alone; "" if there is none."""
    return CONVERTED[name].key if name in CONVERTED else SAME.get(name, "")


def set_alone(name: str, value: Any, job: Translation) -> None:
    """Sets the key of a name that has one. Raises BadRequest if the value cannot be converted."""
    if name in SAME:
        job.set(SAME[name], value)
        return
    try:
        job.set(CONVERTED[name].key, CONVERTED[name].of(value))
    except (BadRequest, TypeError, ValueError) as error:
        wanted = error.detail if isinstance(error, BadRequest) else "expected a number"
        raise BadRequest(f"{name} is {elide(value)}; {wanted}") from error


# --- names without a key -------------------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "optim": (
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_8bit", "adamw_bnb_8bit"),
        "the optimizer is AdamW",
    ),
    "generation_kwargs": ((None, {}), "set them in [sampling]"),
    "optim_target_modules": ((None,), "the optimizer is AdamW, for all trained weights"),
    "full_determinism": ((False,), "see sampling.repeatable, and `seed`"),
    "dataloader_in_order": ((True,), "see data.shuffle"),
    "train_sampling_strategy": (("random",), "see data.shuffle"),
    "eval_delay": ((0,), "a job with data.eval evaluates before training"),
    "metric_for_best_model": ((None,), "see checkpoints.keep_best and stop.metric"),
    "greater_is_better": ((None, True), "of the metrics of evaluations more is better"),
    "max_tool_calling_iterations": ((None,), "a job samples one completion for a prompt"),
    "repetition_penalty": ((1.0,), "the trainer's log-probs would not be the sampler's"),
    "top_entropy_quantile": ((1.0,), "all tokens are trained"),
    "entropy_coef": ((0, 0.0), "there is no entropy bonus; training.clip_high keeps entropy up"),
    "use_adaptive_entropy": ((False,), "there is no entropy bonus"),
    "sync_ref_model": ((False,), "the reference is the model that the job began with"),
    "off_policy_mask_threshold": ((None,), "see [correction]"),
    "router_aux_loss_coef": ((None, 0, 0.0, 0.001), "there is no loss of routers"),
    "adam_epsilon": ((1e-8,), "AdamW's epsilon is 1e-8"),
    "fp16": ((False,), 'training.dtype is "bfloat16" or "float32"'),
    "trust_remote_code": ((False,), "code of a model is not run"),
    "disable_dropout": ((False, True), "a job's only dropout is lora.dropout"),
    "neftune_noise_alpha": ((None,), "no noise is added to embeddings"),
    "label_smoothing_factor": ((0, 0.0), "labels are sampled tokens"),
    "vllm_structured_outputs_regex": ((None,), "what a regex cuts off, the trainer cannot see"),
    "max_prompt_length": ((None,), "max_model_len bounds prompt and completion together"),
    "cast_lm_head_to_fp32": ((False,), "logits are always computed in float32"),
    "callbacks": (
        ([], ()),
        "training is in the services; `run.logs(follow=True)` yields each step",
    ),
    "optimizers": (((None, None),), "the optimizer is AdamW"),
    "reward_processing_classes": (([],), "no reward model is hosted; `score_model` asks one"),
    "quantization_config": ((None,), 'training.dtype is "bfloat16" or "float32"'),
    "rollout_func": ((None,), "the sampler samples; what follows an answer is an environment"),
    "tokenizer": ((None,), "a job takes the model's own"),
    "resume_from_checkpoint": (
        (None, False),
        "a job resumes automatically; to begin with a checkpoint, make it the model",
    ),
    "load_best_model_at_end": (
        (False,),
        "the best checkpoint is kept beside the last (checkpoints.keep_best)",
    ),
}
"""Name, its neutral values, and why it has no key."""

IGNORED: dict[str, str] = {
    "where and how it runs is a setting of the stack, or in [memory]": """
        average_tokens_across_devices tf32 torch_compile torch_compile_backend torch_compile_mode
        use_cpu accelerator_config parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph ddp_timeout local_rank torch_empty_cache_steps
        auto_find_batch_size gradient_checkpointing_kwargs enable_jit_checkpoint""",
    "the trainer computes log-probs in tiles; all logits never exist": """
        use_liger_kernel liger_kernel_config""",
    "metrics and completions of every step are in the run folder": """
        log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
        log_level_replica trackio_space_id trackio_bucket_id trackio_static_space_id log_multimodal
        num_completions_to_print log_unique_prompts log_completions_hub_repo skip_memory_metrics
        debug prediction_loss_only""",
    "checkpoints are in the run folder; `hone download` fetches one, `hf upload` pushes it": """
        output_dir save_on_each_node hub_token hub_private_repo hub_model_id hub_strategy
        hub_always_push hub_revision push_to_hub save_only_model""",
    "evaluation and data are batched by the services": """
        bf16_full_eval fp16_full_eval eval_do_concat_batches eval_use_gather_object
        eval_accumulation_steps include_for_metrics batch_eval_metrics dataloader_drop_last
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
        label_names length_column_name per_device_eval_batch_size dataloader_num_workers
        dataloader_pin_memory""",
    "a job with data.eval evaluates before training, every evaluation.every steps, and last": """
        eval_strategy eval_on_start""",
    "a job resumes automatically, with the rows that are left": """
        ignore_data_skip restore_callback_states_from_checkpoint""",
    'belongs to what a job has not: the loss "vespo", an entropy bonus, sync_ref_model': """
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef_min entropy_coef_max
        entropy_coef_delta entropy_target ref_model_mixup_alpha ref_model_sync_steps""",
    "sampling is always by vLLM; its place and size are settings of the stack": """
        use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_model_impl
        vllm_enable_sleep_mode vllm_group_port""",
    "how TRL works inside": """
        do_train do_eval do_predict pad_to_multiple_of cache_implementation
        use_transformers_continuous_batching use_transformers_paged
        transformers_continuous_batching_config remove_unused_columns disable_tqdm
        ds3_gather_for_generation use_cache""",
    "every step is logged, with its completions": """
        logging_steps logging_strategy logging_first_step log_completions""",
    "the stack knows its samplers": """
        vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout""",
    "the trainer is DeepSpeed ZeRO-2; see [memory]": """
        deepspeed fsdp fsdp_config ddp_backend optim_args""",
}
"""By the reason, the names that change nothing of what is learned, and have no key."""

WITHOUT_EFFECT = frozenset(name for names in IGNORED.values() for name in names.split())
