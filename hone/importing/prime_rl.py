"""prime-rl's `rl` with one TOML of trainer, orchestrator and inference.

`orchestrator.batch_size` counts completions. Sampling and training always overlap, and the loss is
taken to the sampler's log-probs.
"""

from __future__ import annotations

from typing import Any, cast

from hone.importing import table as t
from hone.importing.table import FillIn, LacksError, Row, Said, Values

ORCH, SAMPLING, EVAL = "orchestrator.", "orchestrator.train.sampling.", "orchestrator.eval."
OPTIM, SCHEDULER, MODEL = (f"trainer.{part}." for part in ("optim", "scheduler", "model"))
FIXED = "a completion may take what its prompt leaves there; here this is fixed"


def _prompts(value: Any, values: Values) -> Any:
    count = t.minibatches(value, values[f"{ORCH}group_size"], "completions")
    return None if values.get(f"{ORCH}token_batch_size") else count


def _max_model_len(value: Any, values: Values) -> Any:
    return value, None if values.get(f"{SAMPLING}max_completion_tokens") else FillIn(FIXED)


def _taskset(source: Any) -> dict[str, Any]:
    first = cast(dict[str, Any], (source or [{}])[0])
    return first.get("env", {}).get("taskset", {})


def _source(value: Any, _: Values) -> Any:
    """Returns the data set that the environment's arguments name, if any."""
    if len(value) > 1:
        return FillIn(f"{len(value)} environments; a job has one data set"), None, None
    taskset = _taskset(value)
    named = f"the environment {taskset.get('id')!r} has the"
    rewards = FillIn(f"{named} rewards: write them as a function")
    if "dataset_name" not in taskset:
        return FillIn(f"{named} rows"), None, rewards
    return taskset["dataset_name"], taskset.get("dataset_subset"), rewards


def _held_out(value: Any, _: Values) -> Any:
    rows = _taskset(value).get("dataset_name")
    why = f"the environment {_taskset(value).get('id')!r} has the rows"
    return rows or FillIn(why), FillIn("the model's default there, if not given; here 0")


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
    warmup, least = values.get(f"{SCHEDULER}warmup_steps", 10), values.get(f"{SCHEDULER}min_lr")
    if value == "constant":
        return "constant", None, None
    if value != "linear":
        return value, warmup, least
    decay, steps = values.get(f"{SCHEDULER}decay_steps", 10), values.get("max_steps") or 0
    if 2 * decay > steps - warmup:
        return Said(value, "here it decays over all steps after the warm-up"), warmup, least
    return Said("constant", f"there it decays over the last {decay} steps"), warmup, None


SAME = f"""model.name=model {MODEL}name=model run.name=name max_steps=steps {ORCH}max_steps=steps
{MODEL}seq_len=memory.micro_batch_tokens inference.vllm.max_model_len=max_model_len
{ORCH}group_size=sampling.group_size {SAMPLING}temperature=sampling.temperature
{SAMPLING}max_completion_tokens=sampling.max_tokens {OPTIM}lr=training.learning_rate
{OPTIM}weight_decay=training.weight_decay {OPTIM}max_norm=training.max_grad_norm
{OPTIM}betas1=training.adam_beta1 {OPTIM}betas2=training.adam_beta2
{ORCH}max_off_policy_steps=max_staleness {MODEL}optim_cpu_offload=memory.offload_optimizer
{MODEL}lora.rank=lora.rank {MODEL}lora.alpha=lora.alpha {MODEL}lora.dropout=lora.dropout
{MODEL}lora.target_modules=lora.target_modules {EVAL}interval=evaluation.every
{EVAL}group_size=evaluation.samples {EVAL}sampling.temperature=evaluation.temperature
{EVAL}sampling.max_completion_tokens=evaluation.max_tokens ckpt.interval=checkpoints.every
ckpt.keep_last=checkpoints.keep_last ckpt.keep_interval=checkpoints.keep_every
monitors.wandb.project=wandb.project monitors.wandb.entity=wandb.entity
monitors.wandb.tags=wandb.tags inference.vllm.tensor_parallel_size=HONE_TENSOR_PARALLEL_SIZE
inference.vllm.gpu_memory_utilization=HONE_GPU_MEMORY_UTILIZATION"""

CONVERTED = {
    "monitors.wandb.name": Row("name, wandb.name", lambda v, _: (v, v)),
    f"{ORCH}train.source": Row("data.train, data.config, rewards", _source),
    f"{EVAL}source": Row("data.eval, evaluation.temperature", _held_out),
    "seq_len": Row("max_model_len, sampling.max_tokens", _max_model_len, "with the completion"),
    f"{ORCH}seq_len": Row("max_model_len, sampling.max_tokens", _max_model_len),
    f"{ORCH}batch_size": Row(
        "sampling.prompts_per_step", _prompts, "completions there, prompts here"
    ),
    f"{ORCH}algo.type": Row("advantages.std", _algorithm),
    "trainer.loss.type": Row("training.loss, correction.ratio_base", _loss),
    f"{SCHEDULER}type": Row(
        "training.schedule, training.warmup_steps, training.min_learning_rate", _schedule
    ),
    "weight_broadcast.type": Row("weight_sync", t.one_of(nccl="nccl", filesystem="disk")),
    f"{MODEL}attn": Row("memory.attention", t.attention),
    f"{MODEL}optimization_dtype": Row("training.dtype", _dtype),
    f"{MODEL}ac": Row("memory.gradient_checkpointing", lambda _, __: True),
    f"{MODEL}lora": Row("lora.rank", lambda _, __: 16),
    f"{EVAL}num_examples": Row("evaluation.num_prompts", t.positive),
    "ckpt": Row("checkpoints.every", lambda _, __: 0, "only at the end, as there"),
}

LACKING = {
    "a step has a number of prompts": f"{ORCH}token_batch_size",
    "see [training]": "trainer.loss.dppo_mask_low trainer.loss.dppo_mask_high "
    "trainer.loss.adv_tau=1",
    "nothing holds the policy to the sampler but the clipped ratio": "trainer.loss.kl_tau=0",
    "the optimizer is AdamW": f"{OPTIM}type=adamw",
    "only adapters are trained": f"{MODEL}lora.modules_to_save=[]",
    "a sequence is not split over GPUs": f"{MODEL}cp=1",
    "code of a model is not run": f"{MODEL}trust_remote_code=false",
    "a job with data.eval evaluates before training": f"{EVAL}skip_first_step=false",
}

IGNORED = """resume.* monitors.* inference* deployment* slurm* log* env_vars* output_dir clean
dry_run orchestrator.log* trainer.log* orchestrator.output_dir trainer.output_dir"""

DEFAULTS = f"""seq_len=2048 {ORCH}group_size=1 {ORCH}batch_size=128 {ORCH}max_off_policy_steps=8
{ORCH}algo.type=grpo {EVAL}interval=100 trainer.loss.type=default trainer.loss.kl_tau=1e-3
{OPTIM}lr=1e-6 {OPTIM}weight_decay=0.01 ckpt={{}}"""

PRIME_RL = t.framework(
    "prime-rl",
    SAME,
    CONVERTED,
    LACKING,
    ignored=IGNORED,
    defaults=DEFAULTS,
    marks=("prime_rl", "prime-rl"),
)
