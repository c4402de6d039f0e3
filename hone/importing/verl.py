"""verl's PPO trainer: a YAML file, or hydra's overrides.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, each with `rollout.n` completions.
"""

from __future__ import annotations

from typing import Any

from hone.importing import table as t
from hone.importing.table import ConvertedValue, NoCounterpart, Values

A, R, M = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
OPTIM, STEPS, LOSS = f"{A}optim.", "trainer.total_training_steps", f"{A}policy_loss.loss_mode"
OVERLONG, CORRECTION = "reward.reward_kwargs.overlong_buffer_cfg.", "algorithm.rollout_correction."
MANAGER = "reward.reward_manager.name"

ESTIMATORS: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("grpo", "grpo_vectorized", "gdpo"), ("mean", "group")),
    **dict.fromkeys(("rloo", "rloo_vectorized"), ("leave_one_out", "none")),
    "reinforce_plus_plus_baseline": ("mean", ConvertedValue("batch", t.BATCH_STD)),
}
WHITENED = "there the sum's mean and deviation are over all tokens, here over completions"


def _estimator(value: Any, values: Values) -> Any:
    if value not in ESTIMATORS:
        raise NoCounterpart(f"the estimators here are {', '.join(ESTIMATORS)}")
    baseline, std = ESTIMATORS[value]
    if std == "group" and not values["algorithm.norm_adv_by_std_in_grpo"]:
        std = "none"
    return (
        baseline,
        std,
        ConvertedValue("normalize_then_sum", WHITENED) if value == "gdpo" else None,
    )


def _prompts(count: Any, _: Values) -> Any:
    return count or t.FillIn("0, which takes the whole data set there; expected prompts of a step")


def _minibatches(trained: Any, values: Values) -> Any:
    sampled = values["data.train_batch_size"]
    return t.minibatches(sampled, trained, "prompts") if sampled else None


def _teacher(model: Any, values: Values) -> Any:
    return model if values.get("distillation.enabled") else None


def _wandb(project: Any, values: Values) -> Any:
    return project if "wandb" in t.loggers(values) else None


def _logger(_: Any, values: Values) -> Any:
    found = [name for name in t.TRACKERS if name in t.loggers(values)]
    others = [
        name for name in t.loggers(values) if name not in (*found, "console", "file", "wandb")
    ]
    if others:
        raise NoCounterpart(f"the trackers here are wandb, {', '.join(t.TRACKERS)}, not {others}")
    return found or None


def _loss(mode: Any, values: Values) -> Any:
    averages = values[f"{A}loss_agg_mode"]
    if mode == "cispo":
        return ConvertedValue(
            "cispo", "there the weight has a lower bound too, and loss_agg_mode counts"
        )
    if mode in ("gspo", "sapo"):
        differs = values.get(f"{A}use_kl_loss") and averages != "seq-mean-token-mean"
        return ConvertedValue(mode, t.KL_OF_TOKENS if differs else "")
    if mode != "vanilla":
        raise NoCounterpart("the losses here are vanilla, gspo, sapo and cispo of them")
    if averages == "token-mean":
        return t.token_mean(_minibatches(values[f"{A}ppo_mini_batch_size"], values))
    if averages == "seq-mean-token-sum":
        return ConvertedValue("dr_grpo", "here divided by sampling.max_tokens, there not")
    known = {"seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
    return t.one_of(**known)(averages, values)


def _kl_loss(value: Any, values: Values) -> Any:
    kind = values[f"{A}kl_loss_type"]
    known = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    if value and kind.removesuffix("+") not in known:
        raise NoCounterpart(f"the estimates are {', '.join(known)}, not {kind!r}")
    estimate = "k3_true" if kind.endswith("+") else known.get(kind)
    coefficient = values[f"{A}kl_loss_coef"]
    return (coefficient, estimate) if value else None


def _kl_reward(value: Any, values: Values) -> Any:
    if value and values.get(f"{A}use_kl_loss"):
        raise NoCounterpart("a job has one KL divergence: see use_kl_loss")
    note = f"{t.KL_IN_REWARD}, and not divided by the group's deviation as there"
    coefficient = values["algorithm.kl_ctrl.kl_coef"]
    return (coefficient, ConvertedValue("k3_true", note)) if value else None


def _correction(value: Any, values: Values) -> Any:
    bounds = str(values.get(f"{CORRECTION}rollout_is_threshold") or 2.0)
    *low, high = (float(part) for part in bounds.split("_"))
    if low:
        return {"token": "icepop", "sequence": "sequence_mask"}[value], low[0], high
    return {"token": "token_tis", "sequence": "sequence_tis"}[value], None, high


def _cut(value: Any, values: Values) -> Any:
    if values.get("data.filter_overlong_prompts"):
        return "drop"
    return t.one_of(left="truncate", error="error")(value, values)


def _overlong(value: Any, values: Values) -> Any:
    manager, length = values[MANAGER], values["data.max_response_length"]
    most = values.get("reward.reward_kwargs.max_resp_len") or length
    buffer, penalty = values.get(f"{OVERLONG}len"), values.get(f"{OVERLONG}penalty_factor")
    if value is False:
        return None
    if value is not True:
        raise NoCounterpart("expected true or false")
    if manager != "dapo":
        raise NoCounterpart(f"reward manager 'dapo' applies this penalty; it is {manager!r}")
    if most < length:
        raise NoCounterpart(f"the penalty grows beyond {most} tokens of {length}; here it does not")
    return t.overlong(buffer, most, penalty)


def _reward(path: Any, values: Values) -> Any:
    signature = "compute_score(data_source, solution_str, ground_truth, extra_info)"
    return t.own_reward(path, values["reward.custom_reward_function.name"], signature)


def _lora(value: Any, values: Values) -> Any:
    targets = t.modules(values[f"{M}target_modules"])
    return (value, float(values[f"{M}lora_alpha"]), targets) if value else None


def _schedule(value: Any, values: Values) -> Any:
    known = t.one_of("constant", "cosine")(value, values)
    least = (values.get(f"{OPTIM}min_lr_ratio") or 0.0) * values[f"{OPTIM}lr"]
    return known, None if known == "constant" else least or None


def _refills(value: Any, values: Values) -> Any:
    rounds = values.get("algorithm.filter_groups.max_num_gen_batches") or t.MOST_REFILLS
    return ConvertedValue(min(rounds, t.MOST_REFILLS), t.NO_SIGNAL) if value else None


def _epochs(value: Any, values: Values) -> Any:
    return None if values.get(STEPS) else float(value)


def _length(value: Any, values: Values) -> Any:
    return value + values["data.max_response_length"]


def _clip_low(value: Any, values: Values) -> Any:
    return None if values[LOSS] == "cispo" else value


def _dual_clip(value: Any, values: Values) -> Any:
    return value if values[LOSS] == "vanilla" else None


def _warmup(value: Any, values: Values) -> Any:
    return t.warmup_share(value, values.get(STEPS))


def _temperature(value: Any, values: Values) -> Any:
    return float(value) if values[f"{R}val_kwargs.do_sample"] else 0.0


TABLE: dict[t.Convert | str, str] = {
    t.one_source: "data.train_files=data.train data.val_files=data.eval",
    t.prompt_column: "data.prompt_key=data.columns",
    t.positive: "data.train_max_samples=data.max_samples "
    f"data.val_max_samples=evaluation.num_prompts {OPTIM}lr_warmup_steps=training.warmup_steps",
    _epochs: "trainer.total_epochs=data.epochs",
    _length: "data.max_prompt_length=max_model_len",
    _cut: "data.truncation=sampling.overlong_prompts",
    t.accepted: f"{R}top_p=sampling.top_p,correction.truncated_sampling "
    f"{R}top_k=sampling.top_k,correction.truncated_sampling",
    _refills: "algorithm.filter_groups.enable=sampling.refills",
    _reward: "reward.custom_reward_function.path=rewards",
    _overlong: f"{OVERLONG}enable=rewards",
    _estimator: "algorithm.adv_estimator=advantages.baseline,advantages.std,advantages.combine",
    _kl_reward: "algorithm.use_kl_in_reward=training.beta,training.kl",
    _kl_loss: f"{A}use_kl_loss=training.beta,training.kl",
    _correction: f"{CORRECTION}rollout_is=correction.method,correction.low,correction.high",
    _loss: f"{LOSS}=training.loss",
    _clip_low: f"{A}clip_ratio_low=training.clip_low",
    _dual_clip: f"{A}clip_ratio_c=training.dual_clip",
    _prompts: "data.train_batch_size=sampling.prompts_per_step",
    _teacher: "distillation.teacher_models.teacher_model.model_path=teacher.model",
    _wandb: "trainer.project_name=wandb.project",
    _logger: "trainer.logger=trackers",
    _minibatches: f"{A}ppo_mini_batch_size=training.minibatches",
    _warmup: f"{OPTIM}lr_warmup_steps_ratio=training.warmup_steps",
    _schedule: f"{OPTIM}lr_scheduler_type=training.schedule,training.min_learning_rate",
    t.pair: f"{OPTIM}betas=training.adam_beta1,training.adam_beta2",
    t.dtype: f"{A}fsdp_config.dtype=training.dtype",
    _lora: f"{M}lora_rank=lora.rank,lora.alpha,lora.target_modules",
    t.every: "trainer.test_freq=evaluation.every",
    _temperature: f"{R}val_kwargs.temperature=evaluation.temperature",
    t.only_last: "trainer.save_freq=checkpoints.every",
    t.same: f"""{M}path=model trainer.experiment_name=name {STEPS}=steps data.seed=data.shuffle_seed
data.shuffle=data.shuffle data.apply_chat_template_kwargs=sampling.template_args
{R}n=sampling.group_size
data.max_response_length=sampling.max_tokens
{R}response_length=sampling.max_tokens {R}temperature=sampling.temperature
{R}full_determinism=sampling.repeatable {A}clip_ratio_high=training.clip_high
{A}tau_pos=training.tau_positive {A}tau_neg=training.tau_negative {A}ppo_epochs=training.epochs
{OPTIM}lr=training.learning_rate {OPTIM}weight_decay=training.weight_decay
{OPTIM}clip_grad=training.max_grad_norm {A}grad_clip=training.max_grad_norm
{A}ppo_max_token_len_per_gpu=memory.micro_batch_tokens {R}val_kwargs.n=evaluation.samples
{A}fsdp_config.optimizer_offload=memory.offload_optimizer
{M}enable_gradient_checkpointing=memory.gradient_checkpointing
trainer.max_actor_ckpt_to_keep=checkpoints.keep_last
{R}tensor_model_parallel_size=HONE_TENSOR_PARALLEL_SIZE
{R}gpu_memory_utilization=HONE_GPU_MEMORY_UTILIZATION""",
    t.SINGLE_TURN: f"data.tool_config_path {R}multi_turn.enable=false",
    "see [data]": "data.custom_cls.path",
    "a completion is sampled, and ends at the end token": f"{R}do_sample=true {R}ignore_eos=false",
    "groups are compared by their rewards": "algorithm.filter_groups.metric=score",
    t.NO_MODEL: "reward.reward_model.enable|reward_model.enable=false",
    t.CRITIC: "algorithm.gamma=1 algorithm.lam=1 algorithm.use_pf_ppo=false",
    "see [correction]": f"{CORRECTION}rollout_rs {CORRECTION}rollout_is_batch_normalize=false "
    f"{CORRECTION}bypass_mode=false {CORRECTION}loss_type=ppo_clip {A}router_replay.mode=disabled",
    "see [training]": f"algorithm.kl_ctrl.type=fixed {A}loss_scale_factor {OPTIM}num_cycles=0.5 "
    f"{OPTIM}optimizer=AdamW/adam",
    t.NO_ENTROPY: f"{A}entropy_coeff=0",
    "see max_staleness": "trainer.v1.trainer_mode=sync",
    t.TEACHER: "distillation.enabled=false",
    "a sequence is not split over GPUs": f"{A}ulysses_sequence_parallel_size=1",
    "see [evaluation]": "trainer.val_before_train=true trainer.val_only=false "
    f"{R}val_kwargs.top_p=1 {R}val_kwargs.top_k=-1/0",
    "code of a model is not run": f"{M}trust_remote_code=false",
}

IGNORED = f"""data.*num_workers data.return_* ray_init.* {MANAGER} {R}prompt_length
{R}name {R}mode {R}max_num_* {R}log_prob_* {R}enable_* {R}enforce_eager
{R}*parallel_size {R}free_cache_engine {R}calculate_log_probs {A}use_dynamic_bsz {A}strategy
{A}ppo_micro_batch_size* {A}*fsdp_config.* {A}megatron.* {A}checkpoint.* {M}use_remove_padding
{M}use_shm actor_rollout_ref.ref.* actor_rollout_ref.hybrid_engine critic.* trainer.critic_warmup
trainer.resume_mode trainer.*_dir trainer.nnodes trainer.n_gpus_per_node trainer.device
trainer.balance_batch ray_kwargs.* hydra.* defaults *_target_"""

DEFAULTS = f"""algorithm.adv_estimator=gae algorithm.norm_adv_by_std_in_grpo=true
algorithm.kl_ctrl.kl_coef=0.001 data.train_batch_size=1024 data.max_prompt_length=512
data.max_response_length=512 data.truncation=error {MANAGER}=naive
reward.custom_reward_function.name=compute_score {R}n=1 {R}val_kwargs.do_sample=false
{R}val_kwargs.temperature=0 {LOSS}=vanilla {A}loss_agg_mode=token-mean {A}clip_ratio_low=0.2
{A}clip_ratio_high=0.2 {A}clip_ratio_c=3.0 {A}kl_loss_coef=0.001 {A}kl_loss_type=low_var_kl
{A}ppo_mini_batch_size=256 {OPTIM}lr=1e-6 {OPTIM}weight_decay=0.01 {M}lora_alpha=16
{M}target_modules=all-linear trainer.total_epochs=30
trainer.save_freq=-1"""

OLDER = f"""{OPTIM}warmup_style={OPTIM}lr_scheduler_type
custom_reward_function.=reward.custom_reward_function. reward_manager.name={MANAGER}
reward_model.reward_manager={MANAGER} reward_model.reward_kwargs.=reward.reward_kwargs.
reward_model.overlong_buffer.={OVERLONG} reward_model.overlong_buffer_cfg.={OVERLONG}
reward_model.max_resp_len=reward.reward_kwargs.max_resp_len"""

VERL = t.framework("verl", TABLE, IGNORED, DEFAULTS, OLDER, "verl")
