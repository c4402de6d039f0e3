"""prime-rl's `rl` with one TOML of trainer, orchestrator and inference.

`orchestrator.batch_size` counts completions. Sampling and training always overlap, and the loss is
taken to the sampler's log-probs.
"""

from __future__ import annotations

from typing import Any, cast

from hone.importing import table as t
from hone.importing.table import ConvertedValue, FillIn, Values

ORCH, SAMPLING, EVAL = "orchestrator.", "orchestrator.train.sampling.", "orchestrator.eval."
OPTIM, SCHEDULER, MODEL = (f"trainer.{part}." for part in ("optim", "scheduler", "model"))
FIXED = "a completion may take what its prompt leaves there; here this is fixed"


def _prompts(value: Any, values: Values) -> Any:
    count = t.minibatches(value, values[f"{ORCH}group_size"], "completions")
    return None if values.get(f"{ORCH}token_batch_size") else count


def _environment(sources: Any, _: Values) -> Any:
    """Returns the environment for a verifiers environment, whose agents `hone work` runs."""
    listed = cast(list[Any], sources) if isinstance(sources, list) else [sources]
    names = [name for name in map(_taskset, listed) if name]
    if len(names) != 1:
        raise t.NoCounterpart(f"{SEVERAL}; got {names or 'none with an id'}")
    rows = FillIn(f"write them by `python -m hone.agents.verifiers {names[0]} > rows.jsonl`")
    return ConvertedValue("worker", WORK.format(name=names[0])), rows


def _taskset(source: Any) -> Any:
    """Returns the id of a source's verifiers environment."""
    env = _table(_table(source).get("env"))
    return _table(env.get("taskset")).get("id") or env.get("id")


def _table(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


SEVERAL = "a job has the environment of one taskset; expected one source with an env.taskset.id"
WORK = (
    "agent.py has `from hone.agents.verifiers import environment` and `run = environment(taskset="
    '{{"id": "{name}"}})`, and `hone work agent.py` runs it (docs/agents.md)'
)


def _max_model_len(value: Any, values: Values) -> Any:
    return value, None if values.get(f"{SAMPLING}max_completion_tokens") else FillIn(FIXED)


def _loss(value: Any, values: Values) -> Any:
    note = (
        "the ratio is to the sampler's log-probs, as there; it is clipped, there tokens are masked"
    )
    return t.one_of(default="dapo")(value, values), ConvertedValue("sampler", note)


def _schedule(value: Any, values: Values) -> Any:
    warmup, least = values.get(f"{SCHEDULER}warmup_steps", 10), values.get(f"{SCHEDULER}min_lr")
    if value == "constant":
        return "constant", None, None
    if value != "linear":
        return value, warmup, least
    decay, steps = values.get(f"{SCHEDULER}decay_steps", 10), values.get("max_steps") or 0
    if 2 * decay > steps - warmup:
        return (
            ConvertedValue(value, "here it decays over all steps after the warm-up"),
            warmup,
            least,
        )
    return ConvertedValue("constant", f"there it decays over the last {decay} steps"), warmup, None


TABLE: dict[t.Convert | str, str] = {
    t.both: "monitors.wandb.name=name,wandb.name",
    _max_model_len: f"seq_len=max_model_len,sampling.max_tokens "
    f"{ORCH}seq_len=max_model_len,sampling.max_tokens",
    _prompts: f"{ORCH}batch_size=sampling.prompts_per_step",
    t.one_of(grpo="none"): f"{ORCH}algo.type=advantages.std",
    _loss: "trainer.loss.type=training.loss,correction.ratio_base",
    _schedule: f"{SCHEDULER}type=training.schedule,training.warmup_steps,"
    "training.min_learning_rate",
    t.one_of(nccl="nccl", filesystem="disk"): "weight_broadcast.type=weight_sync",
    t.attention: f"{MODEL}attn=memory.attention",
    t.positive: f"{EVAL}num_examples=evaluation.num_prompts",
    t.same: f"""model.name=model {MODEL}name=model run.name=name max_steps=steps
{ORCH}max_steps=steps {MODEL}seq_len=memory.micro_batch_tokens
inference.vllm.max_model_len=max_model_len
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
inference.vllm.gpu_memory_utilization=HONE_GPU_MEMORY_UTILIZATION""",
    _environment: f"{ORCH}train.source=environment.kind,data.train",
    "rows are written by hone.agents.verifiers: set data.eval": f"{EVAL}source",
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
{OPTIM}lr=1e-6 {OPTIM}weight_decay=0.01 ckpt.interval=0"""

OLDER = "wandb.=monitors.wandb."

PRIME_RL = t.framework("prime-rl", TABLE, IGNORED, DEFAULTS, OLDER, "prime_rl", "prime-rl")
