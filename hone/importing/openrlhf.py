"""OpenRLHF's `train_ppo_ray`, with dotted names of today and the flat ones before.

A rollout batch counts prompts, a training batch completions. The loss is the mean over the tokens
of an optimizer step; KL is in the reward unless `algo.kl.use_loss` is set.
"""

from __future__ import annotations

from typing import Any

from hone.importing.converting import (
    ADAMW,
    BATCH_STD,
    COUNTED_BY_TOKENS,
    CRITIC,
    GPUS,
    KL_IN_REWARD,
    KL_OF_TOKENS,
    MOST_REFILLS,
    NO_ENTROPY,
    NO_ROUTERS,
    OTHER_PLACE,
    SINGLE_TURN,
    accepted,
    attention,
    correct,
    dtype,
    either,
    every,
    least_rate,
    minibatches,
    modules,
    one_source,
    only_last,
    overlong,
    own_reward,
    pair,
    prompt_column,
    token_mean,
    warmup_share,
)
from hone.importing.openrlhf_names import ALIASES
from hone.importing.table import (
    FillIn,
    Framework,
    LacksError,
    Said,
    Values,
    inside,
    none,
    setting,
    to,
)
from hone.trainer.single import SCHEDULES

RESUMES = "a job that is interrupted continues automatically, a paused one by `hone resume`"
IN_RUN_FOLDER = "everything of a job is in its run folder, under HONE_RUNS_DIR"


def _loss(value: Any, values: Values) -> Any:
    if value == "gspo":
        return Said("gspo", KL_OF_TOKENS if values.get("algo.kl.use_loss") else "")
    return token_mean(_minibatches(None, values))


def _minibatches(_: Any, values: Values) -> Any:
    sampled = values["rollout.batch_size"] * values["rollout.n_samples_per_prompt"]
    return minibatches(sampled, values["train.batch_size"], "completions")


ESTIMATORS: dict[str, tuple[str, Any]] = {
    "group_norm": ("mean", "group"),
    "dr_grpo": (
        "mean",
        Said("none", "as there, the loss stays a mean over tokens; Dr.GRPO's is loss = dr_grpo"),
    ),
    "rloo": ("leave_one_out", "none"),
    "reinforce_baseline": ("mean", Said("batch", BATCH_STD)),
}


def _estimator(value: Any, values: Values) -> tuple[Any, Any]:
    if value not in ESTIMATORS:
        raise LacksError(f"{value!r} needs a value model or no baseline; the job is GRPO's")
    baseline, std = ESTIMATORS[value]
    if value == "reinforce_baseline" and values.get("algo.advantage.no_std_norm"):
        std = "none"
    return baseline, std


def _kl(value: Any, values: Values) -> Any:
    if not value:
        return 0.0, None
    if values.get("algo.kl.use_loss"):
        return value, values["algo.kl.estimator"]
    return value, Said("k3_true", KL_IN_REWARD)


def _correction(value: Any, values: Values) -> Any:
    if not value:
        return correct("none") if values.get("train.async_enable") else None
    if values["actor.policy_loss_type"] == "gspo":
        return *correct("none"), "sampler"
    kind = values["algo.advantage.is_correction_type"]
    low, high = values["algo.advantage.is_correction_threshold"]
    if kind == "seq-mask-tis":
        note = "there a kept sequence's tokens have weights of their own, here its sequence's"
        return correct("sequence_mask", low, high, note, "geometric_mean")
    return correct({"tis": "token_tis", "icepop": "icepop"}[kind], low, high)


def _max_len(value: Any, values: Values) -> Any:
    why = (
        f"a completion may take what its prompt leaves of {value} tokens there; here this bounds "
        "it, 512 if nothing is said"
    )
    return value, None if values.get("rollout.max_new_tokens") else FillIn(why)


def _template(value: Any, values: Values) -> Any:
    if values.get("data.apply_chat_template"):
        return None
    return str(value).replace("\\n", "\n").replace("{}", "{{ prompt }}")


def _schedule(value: Any, values: Values) -> Any:
    ratio = "actor.min_lr_ratio" if value == "cosine_with_min_lr" else ""
    return least_rate(SCHEDULES, ratio, "actor.adam.lr")(value, values)


def _lora(value: Any, values: Values) -> Any:
    if not value:
        return None, None, None, None
    targets = modules(values["ds.lora.target_modules"])
    return value, float(values["ds.lora.alpha"]), values["ds.lora.dropout"] or None, targets


def _staleness(value: Any, values: Values) -> Any:
    if not value:
        return None, None
    drains = not values.get("train.partial_rollout_enable")
    note = "the queue there bounds batches, this how old the weights of a sample may be"
    return Said(values["train.async_queue_size"], note), drains


def _dynamic(value: Any, _: Values) -> Any:
    return Said(MOST_REFILLS, "rounds at most; there until the batch is full") if value else None


def _micro_batch(value: Any, values: Values) -> Any:
    return value if values.get("train.dynamic_batch_enable") else None


def _wandb(_: Any, values: Values) -> Any:
    return values["logger.wandb.project"], values.get("logger.wandb.org")


ROWS = {
    "actor.model_name_or_path": to("model"),
    "logger.wandb.run_name": to("name"),
    "train.seed": to("seed"),
    # data
    "data.prompt_dataset": to("data.train", one_source),
    "data.prompt_split": to("data.train_split"),
    "data.input_key": to(
        "data.columns",
        prompt_column,
        "a list of messages goes through the chat template; for a column of text set `messages`",
    ),
    "data.apply_chat_template": inside("lists of messages always go through the chat template"),
    "data.input_template": to("data.template", _template),
    "data.label_key": inside("rewards get every column of the row by its own name"),
    "data.max_samples": to(
        "data.max_samples", lambda value, _: None if value >= 10**8 else int(value)
    ),
    "data.max_len": to("max_model_len, sampling.max_tokens", _max_len),
    "prompt_max_len": to(
        "max_model_len, sampling.overlong_prompts",
        lambda value, values: (value + values.get("generate_max_len", 1024), "truncate"),
        "longer prompts are cut off there too",
    ),
    "generate_max_len": to("sampling.max_tokens"),
    "data.prompt_probs": none("one data set; join several in a file"),
    "train.num_episodes": to("data.epochs", lambda value, _: float(value)),
    # sampling
    "rollout.batch_size": to("sampling.prompts_per_step", note="prompts, there too"),
    "rollout.n_samples_per_prompt": to("sampling.group_size"),
    "rollout.max_new_tokens": to("sampling.max_tokens"),
    "rollout.temperature": to("sampling.temperature"),
    "rollout.top_p": to("sampling.top_p, correction.truncated_sampling", accepted),
    "algo.dynamic_filtering_enable": to("sampling.refills", _dynamic),
    "algo.dynamic_filtering_range": none(
        "a group without signal is one whose rewards are all equal", [0, 1], (0, 1)
    ),
    # rewards
    "reward.remote_url": to("rewards", own_reward("reward_func(queries, prompts, labels)")),
    "train.agent_func_path": none(SINGLE_TURN),
    "reward.overlong_buffer_len": to(
        "rewards",
        lambda value, values: overlong(
            value,
            values.get("rollout.max_new_tokens") or values.get("generate_max_len"),
            values["reward.overlong_penalty_factor"],
        ),
    ),
    "reward.overlong_penalty_factor": inside("see reward.overlong_buffer_len"),
    "reward.stop_properly_penalty_coef": none("see the grader `overlong`"),
    "reward.model_name_or_path": none("no reward model is hosted; the grader `score_model` asks"),
    "reward.clip_range": none("rewards are not clipped", [-10, 10], (-10, 10)),
    "reward.normalize_enable": none("only advantages are normalized", False),
    # advantages and loss
    "algo.advantage.estimator": to("advantages.baseline, advantages.std", _estimator),
    "algo.advantage.no_std_norm": inside("see algo.advantage.estimator"),
    "algo.advantage.gamma": none("a completion has one reward, undiscounted", 1),
    "algo.advantage.lambd": none(CRITIC, 1),
    "actor.policy_loss_type": to(
        "training.loss", _loss, '"ppo" is a mean over tokens: "dapo", "bnpo" with minibatches'
    ),
    "actor.eps_clip": to("training.clip_low, training.clip_high", either),
    "actor.eps_clip_low_high": to("training.clip_low, training.clip_high", pair),
    "actor.dual_clip": to("training.dual_clip"),
    "actor.entropy_coef": none(NO_ENTROPY, 0),
    "actor.aux_loss_coef": none(NO_ROUTERS, 0),
    "algo.kl.init_coef": to("training.beta, training.kl", _kl),
    "algo.kl.use_loss": inside("see algo.kl.init_coef"),
    "algo.kl.estimator": inside("see algo.kl.init_coef"),
    "algo.kl.target": none("the coefficient is fixed"),
    "algo.kl.horizon": inside("belongs to algo.kl.target"),
    "algo.advantage.is_correction_enable": to(
        "correction.method, correction.sequence_ratio, correction.low, correction.high, "
        "correction.ratio_base",
        _correction,
        'for "gspo" the ratio is to the sampler\'s log-probs, there too',
    ),
    "algo.advantage.is_correction_type": inside("see algo.advantage.is_correction_enable"),
    "algo.advantage.is_correction_threshold": inside("see algo.advantage.is_correction_enable"),
    "train.batch_size": to(
        "training.minibatches", _minibatches, "completions of one optimizer step there"
    ),
    "train.max_epochs": to("training.epochs"),
    "actor.adam.lr": to("training.learning_rate"),
    "actor.adam.betas": to("training.adam_beta1, training.adam_beta2", pair),
    "actor.adam.eps": none("AdamW's epsilon is 1e-8", 1e-8),
    "actor.adam.weight_decay": to("training.weight_decay"),
    "actor.optim": none(ADAMW, "adam"),
    "actor.muon.*": none(ADAMW),
    "actor.lr_scheduler": to("training.schedule, training.min_learning_rate", _schedule),
    "actor.min_lr_ratio": inside("see actor.lr_scheduler"),
    "actor.lr_warmup_ratio": to("training.warmup_steps", warmup_share(None)),
    "actor.max_norm": to("training.max_grad_norm"),
    "train.async_enable": to("max_staleness, drain_before_sync", _staleness),
    "train.async_queue_size": inside("see train.async_enable"),
    "train.partial_rollout_enable": inside("see train.async_enable"),
    # memory
    "ds.zero_stage": to("memory.zero_stage"),
    "ds.adam_offload": to("memory.offload_optimizer"),
    "ds.param_dtype": to("training.dtype", dtype),
    "ds.attn_implementation": to("memory.attention", attention),
    "ds.packing_samples": to("memory.packing", lambda value, _: "on" if value else None),
    "actor.gradient_checkpointing_enable": to("memory.gradient_checkpointing"),
    "train.max_tokens_per_gpu": to("memory.micro_batch_tokens", _micro_batch),
    "train.dynamic_batch_enable": inside("micro-batches are always bounded by tokens"),
    "train.micro_batch_size": inside(COUNTED_BY_TOKENS),
    "rollout.micro_batch_size": inside(COUNTED_BY_TOKENS),
    "ds.lora.rank": to("lora.rank, lora.alpha, lora.dropout, lora.target_modules", _lora),
    "ds.lora.*": inside("see ds.lora.rank"),
    "ds.load_in_4bit": none("base weights are not quantized", False),
    "ds.ring_attn_size": none("a sequence is not split over GPUs", 1),
    "ds.tensor_parallel_size": none("the trainer does not split a layer over GPUs", 1),
    "ds.use_liger_kernel": inside("logits are always computed in tiles"),
    # evaluation, checkpoints, logs
    "eval.dataset": to("data.eval", one_source),
    "eval.split": to("data.eval_split", lambda value, values: values.get("eval.dataset") and value),
    "eval.steps": to("evaluation.every", every),
    "eval.temperature": to("evaluation.temperature"),
    "eval.n_samples_per_prompt": to("evaluation.samples"),
    "ckpt.save_steps": to("checkpoints.every", only_last),
    "ckpt.max_num": to("checkpoints.keep_last"),
    "ckpt.best_metric_key": to(
        "checkpoints.keep_best",
        lambda value, _: Said("reward", f"{value!r} there") if value not in ("", "none") else None,
    ),
    "ckpt.load_enable": inside(RESUMES),
    "ckpt.*": inside(IN_RUN_FOLDER),
    "logger.wandb.key": to(
        "wandb.project, wandb.entity", _wandb, "the key itself is WANDB_API_KEY, a setting"
    ),
    "logger.*": inside("metrics are in the run folder, and in W&B with [wandb]"),
    # where it runs
    "vllm.gpu_memory_utilization": setting("HONE_GPU_MEMORY_UTILIZATION"),
    "vllm.tensor_parallel_size": setting("HONE_TENSOR_PARALLEL_SIZE"),
    "train.colocate_all": setting("HONE_COLOCATE"),
    "ds.value_head_prefix": inside(CRITIC),
    "critic.*": inside(CRITIC),
    "vllm.*": inside(OTHER_PLACE),
    "ref.*": inside(GPUS),
    "reward.*": inside(GPUS),
    "*.num_nodes": inside(GPUS),
    "*.num_gpus_per_node": inside(GPUS),
    "train.enable_ema": none("no average of weights is kept", False),
    "train.ema_beta": inside("belongs to train.enable_ema"),
    "train.full_determinism_enable": to("sampling.repeatable"),
    "train.colocate_*": inside(GPUS),
    "ds.*": inside(OTHER_PLACE),
    "rollout.*": inside(OTHER_PLACE),
    "data.image_key": none("prompts are text"),
    "data.max_images_per_prompt": none("prompts are text", 0),
    "actor.freeze_visual_encoder": none("prompts are text", False),
    "actor.gradient_checkpointing_reentrant": inside(OTHER_PLACE),
    "data.*": inside(OTHER_PLACE),
    "local_rank": inside(GPUS),
    "ptx_coef": none("there is no loss of pretraining data"),
    "use_ms": none("models and data are files, or come from the Hugging Face Hub", False),
    "perf": inside("`hone plan`, and the metrics time/*"),
}

DEFAULTS = {
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.num_episodes": 1,
    "train.seed": 42,
    "train.async_queue_size": 1,
    "data.max_len": 2048,
    "data.input_key": "input",
    "reward.overlong_penalty_factor": 1,
    "algo.advantage.estimator": "gae",
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_type": "tis",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "actor.policy_loss_type": "ppo",
    "actor.eps_clip": 0.2,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.min_lr_ratio": 0.1,
    "actor.lr_warmup_ratio": 0.03,
    "actor.gradient_checkpointing_enable": False,
    "ds.param_dtype": "bf16",
    "ds.lora.alpha": 16,
    "ds.lora.dropout": 0,
    "ds.lora.target_modules": "all-linear",
    "eval.split": "train",
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "logger.wandb.project": "openrlhf_train_ppo",
}

OPENRLHF = Framework(
    name="openrlhf",
    title="OpenRLHF",
    rows=ROWS,
    defaults=DEFAULTS,
    aliases=ALIASES,
    marks=("openrlhf",),
)
