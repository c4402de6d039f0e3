"""OpenRLHF's `train_ppo_ray`: its dotted names, and by "|" the flat ones before 2026.

A rollout batch counts prompts, a training batch completions. The loss is the mean over the tokens
of an optimizer step; KL is in the reward unless `algo.kl.use_loss` is set.
"""

from __future__ import annotations

from typing import Any

from hone.importing import table as t
from hone.importing.table import ConvertedValue, FillIn, NoCounterpart, Values
from hone.trainer.single import SCHEDULES


def _loss(value: Any, values: Values) -> Any:
    if value == "gspo":
        return ConvertedValue("gspo", t.KL_OF_TOKENS if values.get("algo.kl.use_loss") else "")
    if value != "ppo":
        raise NoCounterpart("the losses here are ppo and gspo of them")
    return t.token_mean(_minibatches(values["train.batch_size"], values))


def _minibatches(trained: Any, values: Values) -> Any:
    sampled = values["rollout.batch_size"] * values["rollout.n_samples_per_prompt"]
    return t.minibatches(sampled, trained, "completions")


DR_GRPO = "as there, the loss stays a mean over tokens; Dr.GRPO's is loss = dr_grpo"
ESTIMATORS: dict[str, tuple[str, Any]] = {
    "group_norm": ("mean", "group"),
    "dr_grpo": ("mean", ConvertedValue("none", DR_GRPO)),
    "rloo": ("leave_one_out", "none"),
    "reinforce_baseline": ("mean", ConvertedValue("batch", t.BATCH_STD)),
}


def _estimator(value: Any, values: Values) -> Any:
    if value not in ESTIMATORS:
        raise NoCounterpart(f"{value!r} needs a value model or no baseline; the job is GRPO's")
    no_std = value == "reinforce_baseline" and values.get("algo.advantage.no_std_norm")
    return ("mean", "none") if no_std else ESTIMATORS[value]


def _kl(value: Any, values: Values) -> Any:
    in_loss = values.get("algo.kl.use_loss")
    kind = values["algo.kl.estimator"] if in_loss else ConvertedValue("k3_true", t.KL_IN_REWARD)
    return (value, kind) if value else (0.0, None)


def _correction(value: Any, values: Values) -> Any:
    if not value:
        return ("none",) if values.get("train.async_enable") else None
    if values["actor.policy_loss_type"] == "gspo":
        return "none", None, None, None, "sampler"
    kind = values["algo.advantage.is_correction_type"]
    bounds = values["algo.advantage.is_correction_threshold"]
    if kind == "seq-mask-tis":
        note = "there a kept sequence's tokens have weights of their own, here its sequence's"
        return ConvertedValue("sequence_mask", note), *bounds, "geometric_mean"
    return {"tis": "token_tis", "icepop": "icepop"}[kind], *bounds


def _max_len(value: Any, values: Values) -> Any:
    why = (
        f"a completion may take what its prompt leaves of {value} tokens there; here this is fixed"
    )
    return value, None if values.get("rollout.max_new_tokens") else FillIn(why)


def _schedule(value: Any, values: Values) -> Any:
    name = t.one_of(**SCHEDULES)(value, values)
    if value != "cosine_with_min_lr":
        return name, None
    return name, values["actor.min_lr_ratio"] * values["actor.adam.lr"] or None


def _lora(value: Any, values: Values) -> Any:
    alpha, dropout = float(values["ds.lora.alpha"]), values["ds.lora.dropout"] or None
    targets = t.modules(values["ds.lora.target_modules"])
    return (value, alpha, dropout, targets) if value else None


def _max_prompt(value: Any, values: Values) -> Any:
    return value + values.get("generate_max_len", 1024), "truncate"


def _refills(value: Any, _: Values) -> Any:
    return ConvertedValue(t.MOST_REFILLS, t.NO_SIGNAL) if value else None


def _reward(path: Any, _: Values) -> Any:
    return t.own_reward(path, "reward_func", "reward_func(queries, prompts, labels)")


def _overlong(value: Any, values: Values) -> Any:
    most = values.get("rollout.max_new_tokens") or values.get("generate_max_len")
    return t.overlong(value, most, values["reward.overlong_penalty_factor"])


def _warmup(value: Any, _: Values) -> Any:
    return t.warmup_share(value, None)


def _eval_split(value: Any, values: Values) -> Any:
    return value if values.get("eval.dataset") else None


TABLE: dict[t.Convert | str, str] = {
    t.one_source: "data.prompt_dataset|prompt_data=data.train eval.dataset|eval_dataset=data.eval",
    t.prompt_column: "data.input_key|input_key=data.columns",
    _max_len: "data.max_len|max_len=max_model_len,sampling.max_tokens",
    _max_prompt: "prompt_max_len=max_model_len,sampling.overlong_prompts",
    t.number: "train.num_episodes|num_episodes=data.epochs",
    t.accepted: "rollout.top_p|top_p=sampling.top_p,correction.truncated_sampling",
    _refills: "algo.dynamic_filtering_enable|dynamic_filtering=sampling.refills",
    _reward: "reward.remote_url|remote_rm_url=rewards",
    _overlong: "reward.overlong_buffer_len|overlong_buffer_len=rewards",
    _estimator: "algo.advantage.estimator|advantage_estimator=advantages.baseline,advantages.std",
    _loss: "actor.policy_loss_type|policy_loss_type=training.loss",
    t.both: "actor.eps_clip|eps_clip=training.clip_low,training.clip_high",
    t.pair: """actor.eps_clip_low_high|eps_clip_low_high=training.clip_low,training.clip_high
    actor.adam.betas|adam_betas=training.adam_beta1,training.adam_beta2""",
    _kl: "algo.kl.init_coef|init_kl_coef=training.beta,training.kl",
    _correction: "algo.advantage.is_correction_enable|enable_vllm_is_correction=correction.method,"
    "correction.low,correction.high,correction.sequence_ratio,correction.ratio_base",
    _minibatches: "train.batch_size|train_batch_size=training.minibatches",
    _schedule: "actor.lr_scheduler|lr_scheduler=training.schedule,training.min_learning_rate",
    _warmup: "actor.lr_warmup_ratio|lr_warmup_ratio=training.warmup_steps",
    t.dtype: "ds.param_dtype|param_dtype=training.dtype",
    t.attention: "ds.attn_implementation|attn_implementation=memory.attention",
    _lora: "ds.lora.rank|lora_rank=lora.rank,lora.alpha,lora.dropout,lora.target_modules",
    _eval_split: "eval.split|eval_split=data.eval_split",
    t.every: "eval.steps|eval_steps=evaluation.every",
    t.only_last: "ckpt.save_steps|save_steps=checkpoints.every",
    t.same: """data.max_samples|max_samples=data.max_samples
actor.model_name_or_path|pretrain=model logger.wandb.run_name|wandb_run_name=name
train.seed|seed=seed data.prompt_split|prompt_split=data.train_split
rollout.batch_size|rollout_batch_size=sampling.prompts_per_step
rollout.n_samples_per_prompt|n_samples_per_prompt=sampling.group_size
generate_max_len=sampling.max_tokens rollout.max_new_tokens|max_new_tokens=sampling.max_tokens
rollout.temperature|temperature=sampling.temperature actor.dual_clip|dual_clip=training.dual_clip
train.max_epochs|max_epochs=training.epochs
actor.adam.lr|actor_learning_rate=training.learning_rate
actor.adam.weight_decay|l2=training.weight_decay actor.max_norm|max_norm=training.max_grad_norm
ds.zero_stage|zero_stage=memory.zero_stage ds.adam_offload|adam_offload=memory.offload_optimizer
actor.gradient_checkpointing_enable|gradient_checkpointing=memory.gradient_checkpointing
eval.temperature|eval_temperature=evaluation.temperature
eval.n_samples_per_prompt|eval_n_samples_per_prompt=evaluation.samples
ckpt.max_num|max_ckpt_num=checkpoints.keep_last
train.full_determinism_enable|full_determinism=sampling.repeatable
vllm.gpu_memory_utilization|vllm_gpu_memory_utilization=HONE_GPU_MEMORY_UTILIZATION
vllm.tensor_parallel_size|vllm_tensor_parallel_size=HONE_TENSOR_PARALLEL_SIZE
train.colocate_all|colocate_all_models=HONE_COLOCATE""",
    "one data set; join several in a file": "data.prompt_probs|prompt_data_probs",
    t.SINGLE_TURN: "train.agent_func_path|agent_func_path",
    t.NO_SIGNAL: "algo.dynamic_filtering_range|dynamic_filtering_reward_range=[0,1]/(0,1)",
    "see the grader `overlong`": "reward.stop_properly_penalty_coef|stop_properly_penalty_coef",
    t.NO_MODEL: "reward.model_name_or_path|reward_pretrain",
    "only advantages are normalized": "reward.clip_range|reward_clip_range=[-10,10]/(-10,10) "
    "reward.normalize_enable|normalize_reward=false",
    t.CRITIC: "algo.advantage.gamma|gamma=1 algo.advantage.lambd|lambd=1",
    t.NO_ENTROPY: "actor.entropy_coef|entropy_loss_coef=0",
    "there is no loss of routers": "actor.aux_loss_coef|aux_loss_coef=0",
    "see [wandb]": "logger.wandb.key|use_wandb=false/null",
    "see max_staleness": "train.async_enable|async_train=false",
    "the coefficient is fixed": "algo.kl.target|kl_target",
    "the optimizer is AdamW": "actor.adam.eps=1e-8 actor.optim=adam",
    "base weights are not quantized": "ds.load_in_4bit|load_in_4bit=false",
    "a sequence is not split over GPUs": "ds.ring_attn_size|ring_attn_size=1 "
    "ds.tensor_parallel_size|ds_tensor_parallel_size=1",
    "see checkpoints.keep_best": "ckpt.best_metric_key|best_metric_key=none/null",
    "no average of weights is kept": "train.enable_ema|enable_ema=false",
    "there is no loss of pretraining data": "ptx_coef",
}

IGNORED = """ckpt.* load_checkpoint save_path ckpt_path logger.* vllm.* vllm_num_engines vllm_sync_*
critic.* critic_* ref.* *.num_nodes *.num_gpus_per_node *_num_nodes *_num_gpus_per_node
train.colocate_* colocate_* bf16 ds.* packing_samples train.micro_batch_size
micro_train_batch_size rollout.micro_batch_size
train.max_tokens_per_gpu train_max_tokens_per_gpu train.dynamic_batch_enable use_dynamic_batch
micro_rollout_batch_size"""

OLDER = """apply_chat_template=data.apply_chat_template use_kl_loss=algo.kl.use_loss
overlong_penalty_factor=reward.overlong_penalty_factor kl_estimator=algo.kl.estimator
no_advantage_std_norm=algo.advantage.no_std_norm
vllm_is_correction_type=algo.advantage.is_correction_type
vllm_is_truncated_threshold=algo.advantage.is_correction_threshold
lora_alpha=ds.lora.alpha lora_dropout=ds.lora.dropout target_modules=ds.lora.target_modules"""

DEFAULTS = """rollout.batch_size=1024 rollout.n_samples_per_prompt=1 train.batch_size=128
train.num_episodes=1 train.seed=42 data.max_len=2048 data.input_key=input
reward.overlong_penalty_factor=1 algo.advantage.estimator=gae
algo.advantage.is_correction_enable=false algo.advantage.is_correction_type=tis
algo.advantage.is_correction_threshold=[0.5,5.0] algo.kl.init_coef=0.01 algo.kl.estimator=k1
actor.policy_loss_type=ppo actor.eps_clip=0.2 actor.adam.lr=1e-6 actor.adam.betas=[0.9,0.95]
actor.lr_scheduler=cosine_with_min_lr actor.min_lr_ratio=0.1 actor.lr_warmup_ratio=0.03
actor.gradient_checkpointing_enable=false ds.param_dtype=bf16 ds.lora.alpha=16 ds.lora.dropout=0
ds.lora.target_modules=all-linear eval.split=train eval.temperature=0.6
eval.n_samples_per_prompt=4 ckpt.save_steps=-1 ckpt.max_num=3
"""

OPENRLHF = t.framework("OpenRLHF", TABLE, IGNORED, DEFAULTS, OLDER, "openrlhf")
