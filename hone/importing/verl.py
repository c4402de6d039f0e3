"""verl's PPO trainer: a YAML file, or hydra's overrides.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, each with `rollout.n` completions.
"""

from __future__ import annotations

from typing import Any

from hone.importing import verl_values as becomes
from hone.importing.converting import (
    ADAMW,
    ALL_TOKENS,
    COUNTED_BY_TOKENS,
    CRITIC,
    GPUS,
    NO_ENTROPY,
    OTHER_PLACE,
    SINGLE_TURN,
    accepted,
    dtype,
    every,
    least_rate,
    one_source,
    only_last,
    pair,
    positive,
    prompt_column,
    top_k,
    warmup_share,
)
from hone.importing.table import Framework, Row, inside, none, setting, to
from hone.importing.verl_values import ACTOR, MODEL, ROLLOUT

STEPS = "trainer.total_training_steps"

ROWS: dict[str, Row] = {
    f"{MODEL}path": to("model"),
    "trainer.experiment_name": to("name"),
    STEPS: to("steps"),
    "trainer.total_epochs": to(
        "data.epochs", lambda value, values: None if values.get(STEPS) else float(value)
    ),
    # data
    "data.train_files": to("data.train", one_source),
    "data.val_files": to("data.eval", one_source),
    "data.prompt_key": to("data.columns", prompt_column),
    "data.train_max_samples": to("data.max_samples", positive),
    "data.val_max_samples": to("evaluation.num_prompts", positive),
    "data.shuffle": to("data.shuffle"),
    "data.seed": to("data.shuffle_seed"),
    "data.max_prompt_length": to(
        "max_model_len", becomes.max_model_len, "of prompt and completion together"
    ),
    "data.filter_overlong_prompts": inside("see data.truncation"),
    "data.truncation": to(
        "sampling.overlong_prompts", becomes.cut, "data.filter_overlong_prompts drops them"
    ),
    "data.apply_chat_template_kwargs": to("sampling.template_args"),
    "data.apply_chat_template_kwargs.*": none("write them into sampling.template_args"),
    "data.reward_fn_key": inside("a job names its rewards; the row's data_source does not"),
    "data.custom_cls.*": none("rows are files, with data.template, messages and filter"),
    "data.tool_config_path": none(SINGLE_TURN),
    "data.image_key": inside("prompts are text"),
    "data.*": inside(OTHER_PLACE),
    # sampling
    "data.train_batch_size": to("sampling.prompts_per_step", note="prompts, there too"),
    "data.gen_batch_size": inside("sampling.refills samples further prompts as they are needed"),
    f"{ROLLOUT}n": to("sampling.group_size"),
    "data.max_response_length": to("sampling.max_tokens"),
    f"{ROLLOUT}temperature": to("sampling.temperature"),
    f"{ROLLOUT}top_p": to("sampling.top_p, correction.truncated_sampling", accepted),
    f"{ROLLOUT}top_k": to("sampling.top_k, correction.truncated_sampling", top_k),
    f"{ROLLOUT}full_determinism": to("sampling.repeatable"),
    f"{ROLLOUT}ignore_eos": none("a completion ends at the model's end token", False),
    f"{ROLLOUT}multi_turn.enable": none(SINGLE_TURN, False),
    f"{ROLLOUT}multi_turn.*": inside("belongs to multi_turn.enable"),
    "algorithm.filter_groups.enable": to("sampling.refills", becomes.refills),
    "algorithm.filter_groups.metric": none("groups are compared by their rewards", "score"),
    "algorithm.filter_groups.*": inside("see algorithm.filter_groups.enable"),
    # rewards
    "reward.custom_reward_function.path": to("rewards", becomes.reward),
    "custom_reward_function.path": to("rewards", becomes.reward),
    "*custom_reward_function.name": inside("see custom_reward_function.path"),
    "*reward_kwargs.overlong_buffer_cfg.enable": to("rewards", becomes.overlong),
    "*reward_kwargs.*": inside("see overlong_buffer_cfg.enable"),
    "*reward_manager": inside("each of the [[rewards]] is graded alone"),
    "*reward_manager.name": inside("each of the [[rewards]] is graded alone"),
    "*reward_model.enable": none("no reward model is hosted; `score_model` asks one", False),
    "*sandbox_fusion.url": inside("code runs in the reward service's own sandbox"),
    "reward*": inside(OTHER_PLACE),
    # advantages and loss
    "algorithm.adv_estimator": to(
        "advantages.baseline, advantages.std, advantages.combine", becomes.estimator
    ),
    "algorithm.norm_adv_by_std_in_grpo": inside("see algorithm.adv_estimator"),
    "algorithm.use_kl_in_reward": to("training.beta, training.kl", becomes.kl_reward),
    "algorithm.kl_ctrl.type": none("the coefficient is fixed", "fixed"),
    "algorithm.kl_ctrl.*": inside("see algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": inside("see algorithm.use_kl_in_reward"),
    "algorithm.gamma": none("a completion has one reward, undiscounted", 1),
    "algorithm.lam": none(CRITIC, 1),
    "algorithm.use_pf_ppo": none("samples are not weighted by their reward", False),
    "algorithm.rollout_correction.rollout_is": to(
        "correction.method, correction.sequence_ratio, correction.low, correction.high",
        becomes.correction,
    ),
    "algorithm.rollout_correction.rollout_is_threshold": inside("see rollout_is"),
    "algorithm.rollout_correction.rollout_rs": none('see correction.method = "sequence_mask"'),
    "algorithm.rollout_correction.rollout_rs_threshold": inside("belongs to rollout_rs"),
    "algorithm.rollout_correction.bypass_mode": to(
        "correction.ratio_base", lambda value, _: "sampler" if value else None
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": none(
        "weights are not normalized", False
    ),
    "algorithm.rollout_correction.loss_type": none("bypassed, the loss is clipped", "ppo_clip"),
    f"{ACTOR}policy_loss.loss_mode": to(
        "training.loss", becomes.loss, '"vanilla" is averaged as loss_agg_mode says'
    ),
    f"{ACTOR}loss_agg_mode": inside("see policy_loss.loss_mode"),
    f"{ACTOR}policy_loss.*": inside("belongs to a loss that is not here"),
    f"{ACTOR}loss_scale_factor": none("dr_grpo divides by sampling.max_tokens"),
    f"{ACTOR}clip_ratio": inside("clip_ratio_low and clip_ratio_high have defaults that go first"),
    f"{ACTOR}clip_ratio_low": to(
        "training.clip_low", becomes.clip_low, '"cispo" has no lower bound here'
    ),
    f"{ACTOR}clip_ratio_high": to("training.clip_high"),
    f"{ACTOR}clip_ratio_c": to("training.dual_clip", becomes.dual_clip),
    f"{ACTOR}tau_pos": to("training.tau_positive"),
    f"{ACTOR}tau_neg": to("training.tau_negative"),
    f"{ACTOR}use_kl_loss": to("training.beta, training.kl", becomes.kl_loss),
    f"{ACTOR}kl_loss_coef": inside("see use_kl_loss"),
    f"{ACTOR}kl_loss_type": inside("see use_kl_loss"),
    f"{ACTOR}entropy_coeff": none(NO_ENTROPY, 0),
    f"{ACTOR}ppo_mini_batch_size": to(
        "training.minibatches", becomes.minibatches, "prompts of one optimizer step there"
    ),
    f"{ACTOR}ppo_epochs": to("training.epochs"),
    f"{ACTOR}optim.lr": to("training.learning_rate"),
    f"{ACTOR}optim.lr_warmup_steps": to("training.warmup_steps", positive),
    f"{ACTOR}optim.lr_warmup_steps_ratio": to("training.warmup_steps", warmup_share(STEPS)),
    f"{ACTOR}optim.lr_scheduler_type": to(
        "training.schedule, training.min_learning_rate",
        least_rate(
            {"constant": "constant", "cosine": "cosine"},
            f"{ACTOR}optim.min_lr_ratio",
            f"{ACTOR}optim.lr",
        ),
    ),
    f"{ACTOR}optim.min_lr_ratio": inside("see lr_scheduler_type"),
    f"{ACTOR}optim.num_cycles": none("a cosine is half a period", 0.5),
    f"{ACTOR}optim.weight_decay": to("training.weight_decay"),
    f"{ACTOR}optim.betas": to("training.adam_beta1, training.adam_beta2", pair),
    f"{ACTOR}optim.optimizer": none(ADAMW, "AdamW", "adam"),
    f"{ACTOR}optim.lr_decay_style": to(
        "training.schedule, training.min_learning_rate", becomes.megatron_schedule
    ),
    f"{ACTOR}optim.min_lr": inside("see lr_decay_style"),
    f"{ACTOR}optim.lr_decay_steps": none("the rate decays over all steps"),
    f"{ACTOR}optim.override_optimizer_config*": none(ADAMW, {}),
    f"{ACTOR}optim.clip_grad": to("training.max_grad_norm"),
    f"{ACTOR}optim.*": inside(OTHER_PLACE),
    f"{ACTOR}grad_clip": to("training.max_grad_norm"),
    "trainer.v1.trainer_mode": to("max_staleness, correction.method", becomes.staleness),
    "trainer.v1.separate_async.parameter_sync_step": inside(
        "counts the minibatches of a batch; weights are synced after each batch, there too"
    ),
    "trainer.v1.*": inside("see trainer.v1.trainer_mode"),
    # memory
    f"{ACTOR}ppo_max_token_len_per_gpu": to("memory.micro_batch_tokens"),
    f"{ACTOR}use_dynamic_bsz": inside("micro-batches are always bounded by tokens"),
    f"{ACTOR}ppo_micro_batch_size*": inside(COUNTED_BY_TOKENS),
    f"{ACTOR}fsdp_config.optimizer_offload": to("memory.offload_optimizer"),
    f"{ACTOR}fsdp_config.dtype": to("training.dtype", dtype),
    f"{ACTOR}ulysses_sequence_parallel_size": none("a sequence is not split over GPUs", 1),
    f"{ACTOR}fsdp_config.*": inside("the trainer is DeepSpeed ZeRO: [memory]"),
    f"{ACTOR}megatron.*": inside("the trainer is DeepSpeed ZeRO: [memory]"),
    f"{ACTOR}router_replay.mode": none("routers are not replayed", "disabled"),
    f"{ACTOR}*": inside(OTHER_PLACE),
    f"{MODEL}enable_gradient_checkpointing": to("memory.gradient_checkpointing"),
    f"{MODEL}use_remove_padding": to(
        "memory.packing", becomes.packing, '"auto" packs where it is free'
    ),
    f"{ACTOR}use_prefix_grouper": to(
        "memory.shared_prefix", lambda value, _: None, "prompts are computed once by default"
    ),
    f"{MODEL}lora_rank": to("lora.rank, lora.alpha, lora.target_modules", becomes.lora),
    f"{MODEL}lora_alpha": inside("see lora_rank"),
    f"{MODEL}target_modules": inside("see lora_rank"),
    f"{MODEL}lora.rank": to("lora.rank, lora.alpha, lora.dropout", becomes.megatron_lora),
    f"{MODEL}lora.target_modules": none("names of Megatron's layers: see lora.target_modules"),
    f"{MODEL}lora.*": inside("see lora.rank"),
    f"{MODEL}*exclude_modules": none("adapters are on all of lora.target_modules", []),
    f"{MODEL}*adapter_path": none("to begin with an adapter, merge it into the model"),
    f"{MODEL}custom_chat_template": none("the model's own chat template is used"),
    f"{MODEL}trust_remote_code": none("code of a model is not run", False),
    f"{MODEL}*": inside(OTHER_PLACE),
    # evaluation, checkpoints, logs
    "trainer.test_freq": to("evaluation.every", every),
    "trainer.val_before_train": none("a job with data.eval evaluates before training", True),
    "trainer.val_only": none("see `hone eval`", False),
    f"{ROLLOUT}val_kwargs.temperature": to("evaluation.temperature", becomes.evaluated),
    f"{ROLLOUT}val_kwargs.n": to("evaluation.samples"),
    f"{ROLLOUT}val_kwargs.do_sample": inside("see val_kwargs.temperature"),
    f"{ROLLOUT}val_kwargs.top_p": none(ALL_TOKENS, 1),
    f"{ROLLOUT}val_kwargs.top_k": none(ALL_TOKENS, -1, 0),
    "trainer.save_freq": to("checkpoints.every", only_last),
    "trainer.max_actor_ckpt_to_keep": to("checkpoints.keep_last"),
    "trainer.logger": to("wandb.project, wandb.name", becomes.wandb),
    "trainer.project_name": inside("see trainer.logger"),
    "trainer.critic_warmup": inside(CRITIC),
    "trainer.resume_mode": inside("a job continues automatically; a paused one by `hone resume`"),
    "trainer.resume_from_path": none("to begin with a checkpoint, make it the model"),
    "trainer.default_local_dir": inside("the run folder is under HONE_RUNS_DIR"),
    "trainer.*": inside(GPUS),
    # where it runs
    f"{ROLLOUT}tensor_model_parallel_size": setting("HONE_TENSOR_PARALLEL_SIZE"),
    f"{ROLLOUT}gpu_memory_utilization": setting("HONE_GPU_MEMORY_UTILIZATION"),
    f"{ROLLOUT}*": inside("samplers are vLLM; their settings are the stack's"),
    "actor_rollout_ref.*": inside(OTHER_PLACE),
    "critic.*": inside(CRITIC),
    "defaults": inside(OTHER_PLACE),
    **dict.fromkeys(
        ("ray_kwargs*", "global_profiler*", "skip.*", "transfer_queue*", "model_engine", "hydra.*"),
        inside(OTHER_PLACE),
    ),
    "distillation.enabled": none("no teacher is distilled", False),
    "distillation*": inside("belongs to distillation.enabled"),
    "algorithm.pf_ppo.*": inside("belongs to algorithm.use_pf_ppo"),
    "*_target_": inside(OTHER_PLACE),
    "*@*": inside(OTHER_PLACE),
    "config-*": inside("hydra's file; its defaults are verl's"),
}

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    f"{ROLLOUT}n": 1,
    f"{ROLLOUT}val_kwargs.do_sample": False,
    f"{ROLLOUT}val_kwargs.temperature": 0,
    f"{ACTOR}policy_loss.loss_mode": "vanilla",
    f"{ACTOR}loss_agg_mode": "token-mean",
    f"{ACTOR}clip_ratio_low": 0.2,
    f"{ACTOR}clip_ratio_high": 0.2,
    f"{ACTOR}clip_ratio_c": 3.0,
    f"{ACTOR}kl_loss_coef": 0.001,
    f"{ACTOR}kl_loss_type": "low_var_kl",
    f"{ACTOR}ppo_mini_batch_size": 256,
    f"{ACTOR}optim.lr": 1e-6,
    f"{ACTOR}optim.weight_decay": 0.01,
    f"{MODEL}lora_alpha": 16,
    f"{MODEL}target_modules": "all-linear",
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.save_freq": -1,
    "trainer.v1.sampler.max_off_policy_threshold": 8,
}

VERL = Framework(
    name="verl",
    title="verl",
    rows=ROWS,
    defaults=DEFAULTS,
    aliases={f"{ACTOR}optim.warmup_style": f"{ACTOR}optim.lr_scheduler_type"},
    marks=("verl",),
)
