"""OpenRLHF's `train_ppo_ray`: its dotted names, and by "|" the flat ones before 2026.

A rollout batch counts prompts, a training batch completions. The loss is the mean over the tokens
of an optimizer step; KL is in the reward unless `algo.kl.use_loss` is set.
"""

from __future__ import annotations

from typing import Any

from hone.importing import table as t
from hone.importing.table import Row, Values
from hone.trainer.single import SCHEDULES

LORA = "ds.lora.rank"
ESTIMATORS = {
    "group_norm": ("mean", "group"),
    "dr_grpo": ("mean", "none"),
    "rloo": ("leave_one_out", "none"),
    "reinforce_baseline": ("mean", "batch"),
}


def _minibatches(trained: Any, values: Values) -> Any:
    completions = values["rollout.batch_size"] * values["rollout.n_samples_per_prompt"]
    return t.num_batches(completions, trained)


def _loss(value: Any, values: Values) -> Any:
    is_one = _minibatches(values["train.batch_size"], values) == 1
    return t.one_of({"ppo": "dapo" if is_one else "bnpo", "gspo": "gspo"})(value, values)


def _kl(value: Any, values: Values) -> Any:
    return value, values["algo.kl.estimator"] if values["algo.kl.use_loss"] else "k3_true"


def _schedule(value: Any, values: Values) -> Any:
    least = values["actor.min_lr_ratio"] * values["actor.adam.lr"]
    name = t.one_of(SCHEDULES)(value, values)
    return name, least if value == "cosine_with_min_lr" else None


OPENRLHF = t.framework(
    "OpenRLHF",
    unchanged="""
        actor.model_name_or_path|pretrain=model train.seed|seed=seed
        data.prompt_split|prompt_split=data.train_split
        data.max_samples|max_samples=data.max_samples train.num_episodes|num_episodes=data.epochs
        rollout.batch_size|rollout_batch_size=sampling.prompts_per_step
        rollout.n_samples_per_prompt|n_samples_per_prompt=sampling.group_size
        generate_max_len=sampling.max_tokens
        rollout.max_new_tokens|max_new_tokens=sampling.max_tokens
        rollout.temperature|temperature=sampling.temperature rollout.top_p|top_p=sampling.top_p
        train.max_epochs|max_epochs=training.epochs actor.dual_clip|dual_clip=training.dual_clip
        actor.adam.lr|actor_learning_rate=training.learning_rate
        actor.adam.betas|adam_betas=training.adam_beta1,training.adam_beta2
        actor.adam.weight_decay|l2=training.weight_decay
        actor.max_norm|max_norm=training.max_grad_norm
        eval.temperature|eval_temperature=evaluation.temperature
        eval.n_samples_per_prompt|eval_n_samples_per_prompt=evaluation.samples
        ckpt.max_num|max_ckpt_num=checkpoints.keep_last""",
    converted={
        "data.prompt_dataset|prompt_data": Row("data.train", t.one_source),
        "eval.dataset|eval_dataset": Row("data.eval", t.one_source),
        "eval.split|eval_split": Row("data.eval_split", t.where("eval.dataset")),
        "data.input_key|input_key": Row("data.columns", lambda name, _: {"prompt": name}),
        "data.max_len|max_len": Row("max_model_len", note=t.NO_RESERVE),
        "prompt_max_len": Row("max_model_len", t.plus("generate_max_len")),
        "algo.dynamic_filtering_enable|dynamic_filtering": Row(
            "sampling.refills", t.one_of(t.REFILLS)
        ),
        "algo.advantage.estimator|advantage_estimator": Row(
            "advantages.baseline,advantages.std",
            t.one_of(ESTIMATORS),
            "reinforce_baseline divides the advantages of all tokens there, here by the rewards' "
            "deviation",
        ),
        "actor.policy_loss_type|policy_loss_type": Row("training.loss", _loss),
        "train.batch_size|train_batch_size": Row("training.minibatches", _minibatches),
        "actor.eps_clip|eps_clip": Row(
            "training.clip_low,training.clip_high", lambda at, _: (at, at)
        ),
        "actor.eps_clip_low_high|eps_clip_low_high": Row("training.clip_low,training.clip_high"),
        "algo.kl.init_coef|init_kl_coef": Row("training.beta,training.kl", _kl, t.KL_IN_REWARD),
        "actor.lr_scheduler|lr_scheduler": Row(
            "training.schedule,training.min_learning_rate", _schedule
        ),
        f"{LORA}|lora_rank": Row("lora.rank", lambda rank, _: rank or None),
        "ds.lora.alpha|lora_alpha": Row("lora.alpha", t.where(LORA)),
        "ds.lora.dropout|lora_dropout": Row("lora.dropout", t.where(LORA)),
        "ds.lora.target_modules|target_modules": Row("lora.target_modules", t.where(LORA)),
        "eval.steps|eval_steps": Row("evaluation.every", t.every),
        "ckpt.save_steps|save_steps": Row("checkpoints.every", lambda every, _: max(every, 0)),
    },
    missing={
        t.OWN_REWARD: "reward.remote_url|remote_rm_url",
        t.OVERLONG: """reward.overlong_buffer_len|overlong_buffer_len
            reward.overlong_penalty_factor|overlong_penalty_factor""",
        t.NO_MODEL: "reward.model_name_or_path|reward_pretrain",
        t.SINGLE_TURN: "train.agent_func_path|agent_func_path",
        t.CRITIC: "algo.advantage.gamma|gamma=1 algo.advantage.lambd|lambd=1",
        t.NO_ENTROPY: "actor.entropy_coef|entropy_loss_coef=0",
        t.OF_STACK: """vllm.tensor_parallel_size|vllm_tensor_parallel_size
            vllm.gpu_memory_utilization|vllm_gpu_memory_utilization""",
        "a share of the steps: set training.warmup_steps": """
            actor.lr_warmup_ratio|lr_warmup_ratio=0""",
        "see [correction]": """algo.advantage.is_correction_enable|enable_vllm_is_correction=false
            algo.advantage.is_correction_type|vllm_is_correction_type""",
        "see max_staleness": "train.async_enable|async_train=false",
        "see training.dtype": "ds.param_dtype|param_dtype=bf16",
        "see [wandb] and trackers": "logger.wandb.key|use_wandb=false",
    },
    ignored="""
        ckpt.* load_checkpoint save_path ckpt_path save_hf_ckpt logger.* wandb_* vllm.*
        vllm_num_engines vllm_sync_* *_enable_sleep enforce_eager critic.* critic_* ref.*
        *num_nodes *num_gpus_per_node train.colocate_* colocate_* bf16 ds.* zero_stage
        adam_offload attn_implementation *gradient_checkpointing* packing_samples
        *micro_*batch_size *max_tokens_per_gpu train.dynamic_batch_enable use_dynamic_batch""",
    defaults="""
        rollout.batch_size=1024 rollout.n_samples_per_prompt=1 train.batch_size=128
        train.num_episodes=1 train.seed=42 data.max_len=2048 data.input_key=input ckpt.save_steps=-1
        algo.advantage.estimator=gae algo.kl.init_coef=0.01 algo.kl.use_loss=false
        algo.kl.estimator=k1 actor.policy_loss_type=ppo actor.eps_clip=0.2 actor.adam.lr=1e-6
        actor.adam.betas=[0.9,0.95] actor.lr_scheduler=cosine_with_min_lr actor.min_lr_ratio=0.1
        actor.lr_warmup_ratio=0.03 ds.lora.alpha=16 ds.lora.target_modules=all-linear
        eval.split=train eval.temperature=0.6 eval.n_samples_per_prompt=4 ckpt.max_num=3""",
    older="use_kl_loss=algo.kl.use_loss kl_estimator=algo.kl.estimator",
)
