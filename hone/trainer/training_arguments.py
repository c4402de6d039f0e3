"""The other fields of transformers' TrainingArguments and TRL's GRPOConfig: names that have no key,
and why. `REFUSED` and `WITHOUT_EFFECT` of `parameters.py` take them up."""

from __future__ import annotations

from typing import Any

PLACE = "where and how it runs is a setting of the stack, or in [memory]"
LOGS = "metrics and completions of every step are in the run folder"
KEPT = "checkpoints are in the run folder; `hone download` fetches one"
BATCHED = "evaluation and data are batched by the services"
ENTROPY = "belongs to the entropy bonus, which there is not"
INSIDE = "how TRL works inside"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "optim_target_modules": ((None,), "the optimizer is AdamW, for all trained weights"),
    "prediction_loss_only": ((False,), "evaluations always say their rewards"),
    "full_determinism": ((False,), "see sampling.repeatable, and `seed`"),
    "dataloader_in_order": ((True,), "see data.shuffle"),
    "train_sampling_strategy": (("random",), "see data.shuffle"),
    "eval_delay": ((0,), "a job with data.eval evaluates before training"),
    "metric_for_best_model": ((None,), "see checkpoints.keep_best and stop.metric"),
    "greater_is_better": ((None, True), "of the metrics of evaluations more is better"),
    "max_tool_calling_iterations": ((None,), "a job samples one completion for a prompt"),
    "use_cache": ((False,), "training needs no cache of keys and values"),
    "save_only_model": ((False,), "every checkpoint can be resumed from"),
}

WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            *("average_tokens_across_devices", "tf32", "torch_compile", "torch_compile_backend"),
            *("torch_compile_mode", "use_cpu", "accelerator_config", "parallelism_config"),
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
            *("ddp_static_graph", "ddp_timeout", "local_rank", "torch_empty_cache_steps"),
            *("auto_find_batch_size", "gradient_checkpointing_kwargs", "enable_jit_checkpoint"),
        ),
        PLACE,
    ),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        "the trainer computes log-probs in tiles; all logits never exist",
    ),
    **dict.fromkeys(
        (
            *("log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
            *("log_level", "log_level_replica", "trackio_space_id", "trackio_bucket_id"),
            *("trackio_static_space_id", "log_multimodal", "num_completions_to_print"),
            *("log_unique_prompts", "log_completions_hub_repo", "skip_memory_metrics", "debug"),
        ),
        LOGS,
    ),
    **dict.fromkeys(
        (
            *("output_dir", "save_on_each_node", "hub_token", "hub_private_repo"),
            *("hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        ),
        KEPT,
    ),
    **dict.fromkeys(
        (
            *("bf16_full_eval", "fp16_full_eval", "eval_do_concat_batches"),
            *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
            *("batch_eval_metrics", "dataloader_drop_last", "dataloader_persistent_workers"),
            *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
            *("label_names", "length_column_name"),
        ),
        BATCHED,
    ),
    **dict.fromkeys(
        ("eval_strategy", "eval_on_start"),
        "a job with data.eval evaluates before training, every evaluation.every steps and at the "
        "end",
    ),
    **dict.fromkeys(
        ("ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "a job resumes by itself, with the rows that are left",
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        'belongs to the loss "vespo", which there is not',
    ),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), ENTROPY
    ),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "belongs to sync_ref_model"),
    **dict.fromkeys(
        ("vllm_model_impl", "vllm_enable_sleep_mode", "vllm_group_port"),
        "sampling is always by vLLM; its place and size are settings of the stack",
    ),
    **dict.fromkeys(
        (
            *("do_train", "do_eval", "do_predict", "pad_to_multiple_of", "cache_implementation"),
            *("use_transformers_continuous_batching", "use_transformers_paged"),
            "transformers_continuous_batching_config",
        ),
        INSIDE,
    ),
}
