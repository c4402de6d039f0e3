"""prime-rl's `rl` with one TOML of trainer, orchestrator and inference.

`orchestrator.batch_size` counts completions. Sampling and training always overlap, and the loss is
taken to the sampler's log-probs.
"""

from __future__ import annotations

from typing import Any, cast

from hone.importing.converting import (
    ADAMW,
    ALL_TOKENS,
    GPUS,
    OTHER_PLACE,
    attention,
    minibatches,
    positive,
)
from hone.importing.table import (
    FillIn,
    Framework,
    LacksError,
    Row,
    Said,
    Values,
    inside,
    none,
    setting,
    to,
)

ORCHESTRATOR = "orchestrator."
SAMPLING, EVAL = f"{ORCHESTRATOR}train.sampling.", f"{ORCHESTRATOR}eval."
OPTIM, SCHEDULER, MODEL = (f"trainer.{part}." for part in ("optim", "scheduler", "model"))
ENVIRONMENT = "rows and rewards are inside the verifiers environment"


def _prompts(value: Any, values: Values) -> Any:
    if values.get(f"{ORCHESTRATOR}token_batch_size"):
        return None
    return minibatches(value, values[f"{ORCHESTRATOR}group_size"], "completions")


def _max_model_len(value: Any, values: Values) -> Any:
    if values.get(f"{SAMPLING}max_completion_tokens"):
        return value, None
    return value, FillIn("a completion may take what its prompt leaves there; here this bounds it")


def _taskset(source: Any) -> dict[str, Any]:
    first = cast(dict[str, Any], (source or [{}])[0])
    return first.get("env", {}).get("taskset", {})


def _source(value: Any, _: Values) -> Any:
    """Returns the data set that the environment's arguments name, if any."""
    if len(value) > 1:
        return FillIn(f"{len(value)} environments; a job has one data set"), None, None
    taskset = _taskset(value)
    name = taskset.get("id")
    rewards = FillIn(f"the environment {name!r} has the rewards: write them as a function")
    if "dataset_name" not in taskset:
        return FillIn(f"the environment {name!r} has the rows"), None, rewards
    return taskset["dataset_name"], taskset.get("dataset_subset"), rewards


def _held_out(value: Any, _: Values) -> Any:
    name = _taskset(value).get("id")
    rows = _taskset(value).get("dataset_name") or FillIn(f"the environment {name!r} has the rows")
    return rows, FillIn("as the model's file says there, if eval.sampling does not; here 0")


def _dtype(value: Any, _: Values) -> Any:
    kept = "float32, passes in bfloat16, there too" if value == "float32" else "float32 here"
    return Said("bfloat16", f"the optimizer's weights are {kept}")


def _loss(value: Any, _: Values) -> Any:
    if value != "default":
        raise LacksError("the losses are in `hone explain training.loss`")
    note = (
        "the ratio is to the sampler's log-probs, as there; it is clipped, where there tokens are "
        "left out whose probability moved by more than trainer.loss.dppo_mask_low and _high"
    )
    return "dapo", Said("sampler", note)


def _algorithm(value: Any, _: Values) -> Any:
    if value != "grpo":
        raise LacksError("the algorithm is GRPO")
    return Said("none", "there an advantage is the reward less the group's mean")


def _schedule(value: Any, values: Values) -> Any:
    if value == "constant":
        return "constant", None, None
    warmup, least = values.get(f"{SCHEDULER}warmup_steps", 10), values.get(f"{SCHEDULER}min_lr")
    if value != "linear":
        return value, warmup, least
    decay, steps = values.get(f"{SCHEDULER}decay_steps", 10), values.get("max_steps") or 0
    if 2 * decay > steps - warmup:
        return Said(value, "here it decays over all steps after the warm-up"), warmup, least
    return Said("constant", f"there it decays over the last {decay} steps"), warmup, None


def _sync(value: Any, _: Values) -> Any:
    known = {"nccl": "nccl", "filesystem": "disk"}
    if value not in known:
        raise LacksError("`hone explain weight_sync` lists the ways")
    return known[value]


ROWS: dict[str, Row] = {
    "model.name": to("model"),
    f"{MODEL}name": to("model"),
    "monitors.wandb.name": to("name, wandb.name", lambda value, _: (value, value)),
    "run.name": to("name"),
    "max_steps": to("steps"),
    f"{ORCHESTRATOR}max_steps": to("steps"),
    # data and rewards
    f"{ORCHESTRATOR}train.source": to("data.train, data.config, rewards", _source, ENVIRONMENT),
    f"{EVAL}source": to("data.eval, evaluation.temperature", _held_out, ENVIRONMENT),
    "seq_len": to(
        "max_model_len, sampling.max_tokens", _max_model_len, "of prompt and completion together"
    ),
    f"{ORCHESTRATOR}seq_len": to("max_model_len, sampling.max_tokens", _max_model_len),
    f"{MODEL}seq_len": to("memory.micro_batch_tokens", note="the length of a packed row there"),
    "inference.vllm.max_model_len": to("max_model_len"),
    # sampling
    f"{ORCHESTRATOR}group_size": to("sampling.group_size"),
    f"{ORCHESTRATOR}batch_size": to(
        "sampling.prompts_per_step", _prompts, "completions there, prompts here"
    ),
    f"{ORCHESTRATOR}token_batch_size": none("a step has a number of prompts"),
    f"{SAMPLING}temperature": to("sampling.temperature"),
    f"{SAMPLING}max_completion_tokens": to("sampling.max_tokens"),
    f"{SAMPLING}extra_body.*": none("see [sampling]"),
    f"{ORCHESTRATOR}train.filter_zero_advantages": inside(
        "completions without an advantage have no gradient, and count in the mean over tokens"
    ),
    f"{ORCHESTRATOR}train.*": inside(ENVIRONMENT),
    f"{ORCHESTRATOR}concurrency.*": inside("each sampler says how many completions fit"),
    f"{ORCHESTRATOR}renderer.*": inside("prompts go through the model's chat template"),
    # advantages and loss
    f"{ORCHESTRATOR}algo.type": to("advantages.std", _algorithm),
    f"{ORCHESTRATOR}algo.length_penalty.*": none("see the graders `length` and `overlong`"),
    f"{ORCHESTRATOR}algo.*": none("the algorithm is GRPO"),
    "trainer.loss.type": to("training.loss, correction.ratio_base", _loss),
    "trainer.loss.dppo_mask_low": none("see training.clip_low"),
    "trainer.loss.dppo_mask_high": none("see training.clip_high"),
    "trainer.loss.adv_tau": none("advantages are not scaled", 1),
    "trainer.loss.kl_tau": none("nothing holds the policy to the sampler but the clipped ratio", 0),
    "trainer.loss.*": none("a loss is a row of services/trainer/learning/loss.py"),
    f"{OPTIM}type": none(ADAMW, "adamw"),
    f"{OPTIM}lr": to("training.learning_rate"),
    f"{OPTIM}weight_decay": to("training.weight_decay"),
    f"{OPTIM}max_norm": to("training.max_grad_norm"),
    f"{OPTIM}betas1": to("training.adam_beta1"),
    f"{OPTIM}betas2": to("training.adam_beta2"),
    f"{OPTIM}*": none(ADAMW),
    f"{SCHEDULER}type": to(
        "training.schedule, training.warmup_steps, training.min_learning_rate", _schedule
    ),
    f"{SCHEDULER}*": inside("see trainer.scheduler.type"),
    f"{ORCHESTRATOR}max_off_policy_steps": to(
        "max_staleness", note="older groups are dropped there; here none is sampled"
    ),
    "weight_broadcast.type": to("weight_sync", _sync),
    # memory
    f"{MODEL}attn": to("memory.attention", attention),
    f"{MODEL}optim_cpu_offload": to("memory.offload_optimizer"),
    f"{MODEL}optimization_dtype": to("training.dtype", _dtype),
    f"{MODEL}ac": to("memory.gradient_checkpointing", lambda _, __: True),
    f"{MODEL}ac.*": inside("see memory.gradient_checkpointing"),
    f"{MODEL}lora": to("lora.rank", lambda _, __: 16),
    f"{MODEL}lora.rank": to("lora.rank"),
    f"{MODEL}lora.alpha": to("lora.alpha"),
    f"{MODEL}lora.dropout": to("lora.dropout"),
    f"{MODEL}lora.target_modules": to("lora.target_modules"),
    f"{MODEL}lora.modules_to_save": none("only adapters are trained", []),
    f"{MODEL}cp": none("a sequence is not split over GPUs", 1),
    f"{MODEL}fp8*": none("training is in bfloat16 or float32"),
    f"{MODEL}quantization.*": none("training is in bfloat16 or float32"),
    f"{MODEL}trust_remote_code": none("code of a model is not run", False),
    "model.vlm.*": none("prompts are text"),
    "trainer.*": inside(OTHER_PLACE),
    # evaluation, checkpoints, logs
    f"{EVAL}interval": to("evaluation.every"),
    f"{EVAL}num_examples": to("evaluation.num_prompts", positive),
    f"{EVAL}group_size": to("evaluation.samples"),
    f"{EVAL}sampling.temperature": to("evaluation.temperature"),
    f"{EVAL}sampling.max_completion_tokens": to("evaluation.max_tokens"),
    f"{EVAL}sampling.*": none(ALL_TOKENS),
    f"{EVAL}skip_first_step": none("a job with data.eval evaluates before training", False),
    f"{EVAL}*": inside(OTHER_PLACE),
    "ckpt": to("checkpoints.every", lambda _, __: 0, "only at the end, as there"),
    "ckpt.interval": to("checkpoints.every"),
    "ckpt.keep_last": to("checkpoints.keep_last"),
    "ckpt.keep_interval": to("checkpoints.keep_every"),
    "ckpt.*": inside("the run folder is under HONE_RUNS_DIR"),
    "resume.*": inside("a job continues automatically; a paused one by `hone resume`"),
    "monitors.wandb.project": to("wandb.project"),
    "monitors.wandb.entity": to("wandb.entity"),
    "monitors.wandb.tags": to("wandb.tags"),
    "monitors.*": inside("metrics are in the run folder, and in W&B with [wandb]"),
    # where it runs
    "inference.vllm.tensor_parallel_size": setting("HONE_TENSOR_PARALLEL_SIZE"),
    "inference.vllm.gpu_memory_utilization": setting("HONE_GPU_MEMORY_UTILIZATION"),
    "inference*": inside("samplers are vLLM; their settings are the stack's"),
    "deployment*": inside(GPUS),
    "slurm*": inside(GPUS),
    **dict.fromkeys(
        (
            *("log*", "env_vars*", "output_dir", "clean", "dry_run", "rollout_transport*"),
            *("weight_broadcast.*", "tokenizer.*", "run.*", "trainer", f"{ORCHESTRATOR}*"),
        ),
        inside(OTHER_PLACE),
    ),
}

DEFAULTS: dict[str, Any] = {
    "seq_len": 2048,
    f"{ORCHESTRATOR}group_size": 1,
    f"{ORCHESTRATOR}batch_size": 128,
    f"{ORCHESTRATOR}max_off_policy_steps": 8,
    f"{ORCHESTRATOR}algo.type": "grpo",
    f"{EVAL}interval": 100,
    "trainer.loss.type": "default",
    "trainer.loss.kl_tau": 1e-3,
    f"{OPTIM}lr": 1e-6,
    f"{OPTIM}weight_decay": 0.01,
    "ckpt": {},
}

PRIME_RL = Framework(
    name="prime-rl",
    title="prime-rl",
    rows=ROWS,
    defaults=DEFAULTS,
    marks=("prime_rl", "prime-rl"),
)
