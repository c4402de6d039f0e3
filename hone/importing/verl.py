"""verl's PPO trainer: a YAML file, or hydra's overrides.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, each with `rollout.n` completions.
"""

from __future__ import annotations

from typing import Any

from hone.importing import table as t
from hone.importing.table import NoCounterpart, Row, Values

A, R, M = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
OPTIM, LOSS, LORA = f"{A}optim.", f"{A}policy_loss.loss_mode", f"{M}lora_rank"
KL_LOSS, TEST = f"{A}use_kl_loss", f"{R}val_kwargs."
PROMPTS, STEPS = "data.train_batch_size", "trainer.total_training_steps"
OVERLONG = "reward_kwargs.overlong_buffer_cfg."

KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _estimator(value: Any, values: Values) -> Any:
    std = "group" if values["algorithm.norm_adv_by_std_in_grpo"] else "none"
    return t.one_of({"grpo": ("mean", std), "rloo": ("leave_one_out", "none")})(value, values)


def _minibatches(trained: Any, values: Values) -> Any:
    return t.num_batches(values[PROMPTS], trained)


def _loss(mode: Any, values: Values) -> Any:
    if mode in ("gspo", "sapo"):
        return mode
    if mode != "vanilla":
        raise NoCounterpart("the losses here are vanilla, gspo and sapo of them")
    is_one = _minibatches(values[f"{A}ppo_mini_batch_size"], values) == 1
    known = {"seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
    known["token-mean"] = "dapo" if is_one else "bnpo"
    return t.one_of(known)(values[f"{A}loss_agg_mode"], values)


def _schedule(value: Any, values: Values) -> Any:
    least = (values[f"{OPTIM}min_lr_ratio"] or 0.0) * values[f"{OPTIM}lr"]
    return value, least if value == "cosine" else None


VERL = t.framework(
    "verl",
    unchanged=f"""
        {M}path=model trainer.experiment_name=name {STEPS}=steps {PROMPTS}=sampling.prompts_per_step
        data.seed=data.shuffle_seed data.shuffle=data.shuffle
        data.apply_chat_template_kwargs=sampling.template_args
        data.max_response_length=sampling.max_tokens {R}response_length=sampling.max_tokens
        {R}n=sampling.group_size {R}temperature=sampling.temperature {R}top_p=sampling.top_p
        {A}clip_ratio_low=training.clip_low {A}clip_ratio_high=training.clip_high
        {A}ppo_epochs=training.epochs {OPTIM}lr=training.learning_rate
        {OPTIM}weight_decay=training.weight_decay {OPTIM}clip_grad=training.max_grad_norm
        {A}grad_clip=training.max_grad_norm {A}tau_pos=training.tau_positive
        {A}tau_neg=training.tau_negative {OPTIM}betas=training.adam_beta1,training.adam_beta2
        {TEST}n=evaluation.samples""",
    converted={
        "data.train_files": Row("data.train", t.one_source),
        "data.val_files": Row("data.eval", t.one_source),
        "data.prompt_key": Row("data.columns", lambda name, _: {"prompt": name}),
        "data.truncation": Row(
            "sampling.overlong_prompts", t.one_of({"left": "truncate", "error": "error"})
        ),
        "data.filter_overlong_prompts": Row(
            "sampling.overlong_prompts", t.one_of({True: "drop", False: None})
        ),
        "trainer.total_epochs": Row(
            "data.epochs", lambda epochs, values: None if values.get(STEPS) else epochs
        ),
        "data.max_prompt_length": Row("max_model_len", t.plus("data.max_response_length")),
        "algorithm.filter_groups.enable": Row("sampling.refills", t.one_of(t.REFILLS)),
        "algorithm.adv_estimator": Row("advantages.baseline,advantages.std", _estimator),
        f"{A}ppo_mini_batch_size": Row("training.minibatches", _minibatches),
        LOSS: Row("training.loss", _loss),
        f"{A}clip_ratio_c": Row(
            "training.dual_clip", lambda bound, values: bound if values[LOSS] == "vanilla" else None
        ),
        f"{A}kl_loss_coef": Row("training.beta", t.where(KL_LOSS)),
        f"{A}kl_loss_type": Row("training.kl", t.where(KL_LOSS, t.one_of(KL))),
        f"{OPTIM}lr_scheduler_type": Row("training.schedule,training.min_learning_rate", _schedule),
        f"{OPTIM}lr_warmup_steps": Row("training.warmup_steps", lambda steps, _: max(steps, 0)),
        LORA: Row("lora.rank", lambda rank, _: rank or None),
        f"{M}lora_alpha": Row("lora.alpha", t.where(LORA)),
        f"{M}target_modules": Row("lora.target_modules", t.where(LORA)),
        "trainer.test_freq": Row("evaluation.every", t.every),
        f"{TEST}temperature": Row("evaluation.temperature", t.where(f"{TEST}do_sample")),
        "trainer.save_freq": Row("checkpoints.every", lambda every, _: max(every, 0)),
    },
    missing={
        t.OWN_REWARD: "reward.custom_reward_function.path|custom_reward_function.path",
        t.OVERLONG: f"""
            reward.{OVERLONG}enable|reward_model.{OVERLONG}enable=false reward.{OVERLONG}len
            reward.{OVERLONG}penalty_factor reward_model.overlong_buffer.enable=false""",
        t.NO_MODEL: "reward.reward_model.enable|reward_model.enable=false",
        t.SINGLE_TURN: f"data.tool_config_path {R}multi_turn.enable=false",
        t.CRITIC: "algorithm.gamma=1 algorithm.lam=1",
        t.NO_ENTROPY: f"{A}entropy_coeff=0",
        t.KL_IN_REWARD: "algorithm.use_kl_in_reward=false",
        t.OF_STACK: f"{R}tensor_model_parallel_size {R}gpu_memory_utilization",
        "groups are compared by their rewards": "algorithm.filter_groups.metric=score",
        "see [correction]": "algorithm.rollout_correction.rollout_is",
        "see sampling.top_k and [correction]": f"{R}top_k=-1/0",
        "a share of the steps: set training.warmup_steps": f"{OPTIM}lr_warmup_steps_ratio=0",
        "see training.dtype": f"{A}fsdp_config.dtype=bfloat16",
        "see [teacher]": "distillation.enabled=false",
        "see [evaluation]": f"""trainer.val_before_train=true trainer.val_only=false
            {TEST}top_p=1 {TEST}top_k=-1/0""",
        "see [wandb] and trackers": "trainer.logger=console/[console] trainer.project_name",
        "see max_staleness": "trainer.v1.trainer_mode=sync",
        "code of a model is not run": f"{M}trust_remote_code=false",
    },
    ignored=f"""
        algorithm.kl_ctrl.* *custom_reward_function.name reward*.reward_manager* ray_*
        data.*num_workers data.return_* {R}prompt_length {R}name {R}mode {R}max_num_*
        {R}log_prob_* {R}enable_* {R}enforce_eager {R}*parallel_size {R}free_cache_engine
        {R}calculate_log_probs {A}*dynamic_bsz {A}strategy {A}ppo_*per_gpu {A}ulysses_*
        {A}ppo_micro_batch_size {A}*fsdp_config.* {A}megatron.* {A}checkpoint.*
        {M}enable_gradient_checkpointing {M}use_remove_padding {M}use_shm actor_rollout_ref.ref.*
        actor_rollout_ref.hybrid_engine critic.* trainer.critic_warmup trainer.resume_mode
        trainer.*_dir trainer.nnodes trainer.n_gpus_per_node trainer.device trainer.balance_batch
        hydra.* defaults *_target_""",
    defaults=f"""
        algorithm.adv_estimator=gae algorithm.norm_adv_by_std_in_grpo=true {PROMPTS}=1024
        data.max_prompt_length=512 data.max_response_length=512 data.truncation=error {R}n=1
        {TEST}do_sample=false {TEST}temperature=0 {LOSS}=vanilla {A}loss_agg_mode=token-mean
        {A}clip_ratio_low=0.2 {A}clip_ratio_high=0.2 {A}clip_ratio_c=3.0 {KL_LOSS}=false
        {A}kl_loss_coef=0.001 {A}kl_loss_type=low_var_kl {A}ppo_mini_batch_size=256
        {OPTIM}lr=1e-6 {OPTIM}min_lr_ratio=0.0 {OPTIM}weight_decay=0.01 {M}lora_alpha=16
        {M}target_modules=all-linear trainer.total_epochs=30 trainer.save_freq=-1""",
    older=f"{OPTIM}warmup_style={OPTIM}lr_scheduler_type",
)
