"""prime-rl's `rl` with one TOML of trainer, orchestrator and inference.

`orchestrator.batch_size` counts completions. Sampling and training always overlap, and the loss is
taken to the sampler's log-probs.
"""

from __future__ import annotations

from typing import Any

from hone.importing import table as t
from hone.importing.table import Row, Values

ORCH, SAMPLING, EVAL = "orchestrator.", "orchestrator.train.sampling.", "orchestrator.eval."
OPTIM, SCHEDULER, MODEL = (f"trainer.{part}." for part in ("optim", "scheduler", "model"))


def _schedule(value: Any, values: Values) -> Any:
    warmup, steps = values[f"{SCHEDULER}warmup_steps"], values.get("max_steps") or 0
    if value == "constant":
        return "constant", None, None
    if value == "linear" and 2 * values[f"{SCHEDULER}decay_steps"] <= steps - warmup:
        return "constant", warmup, None
    return value, warmup, values[f"{SCHEDULER}min_lr"]


PRIME_RL = t.framework(
    "prime-rl",
    unchanged=f"""
        model.name=model {MODEL}name=model run.name=name max_steps=steps {ORCH}max_steps=steps
        monitors.wandb.name|wandb.name=name monitors.wandb.project|wandb.project=wandb.project
        {ORCH}group_size=sampling.group_size {SAMPLING}temperature=sampling.temperature
        {SAMPLING}max_completion_tokens=sampling.max_tokens
        {ORCH}max_off_policy_steps=max_staleness {OPTIM}lr=training.learning_rate
        {OPTIM}weight_decay=training.weight_decay {OPTIM}max_norm=training.max_grad_norm
        {OPTIM}betas1=training.adam_beta1 {OPTIM}betas2=training.adam_beta2
        {MODEL}lora.rank=lora.rank {MODEL}lora.alpha=lora.alpha {MODEL}lora.dropout=lora.dropout
        {MODEL}lora.target_modules=lora.target_modules {EVAL}interval=evaluation.every
        {EVAL}group_size=evaluation.samples {EVAL}sampling.temperature=evaluation.temperature
        {EVAL}sampling.max_completion_tokens=evaluation.max_tokens
        ckpt.interval=checkpoints.every ckpt.keep_last=checkpoints.keep_last""",
    converted={
        "seq_len": Row("max_model_len", note=t.NO_RESERVE),
        f"{ORCH}batch_size": Row(
            "sampling.prompts_per_step",
            lambda completions, values: t.num_batches(completions, values[f"{ORCH}group_size"]),
        ),
        f"{ORCH}algo.type": Row("advantages.std", t.one_of({"grpo": "none"})),
        "trainer.loss.type": Row(
            "training.loss,correction.ratio_base",
            t.one_of({"default": ("dapo", "sampler")}),
            "the ratio is to the sampler's log-probs, as there; it is clipped, there tokens are "
            "masked",
        ),
        f"{SCHEDULER}type": Row(
            "training.schedule,training.warmup_steps,training.min_learning_rate",
            _schedule,
            "linear decays over the last decay_steps there, here over all steps after the warm-up",
        ),
    },
    missing={
        'set environment.kind = "worker", which needs no rewards, and as data.train what `python '
        "-m hone.agents.verifiers ID` writes; `hone work` plays it: docs/agents.md": f"""
            {ORCH}train.source {EVAL}source""",
        "a step has a number of prompts": f"{ORCH}token_batch_size",
        "nothing holds the policy to the sampler but the clipped ratio": "trainer.loss.kl_tau=0",
        t.OF_STACK: """inference.vllm.tensor_parallel_size
            inference.vllm.gpu_memory_utilization""",
        "the optimizer is AdamW": f"{OPTIM}type=adamw",
        "code of a model is not run": f"{MODEL}trust_remote_code=false",
    },
    ignored=f"""
        resume.* monitors.* inference* deployment* slurm* log* env_vars* output_dir clean dry_run
        weight_broadcast.* {MODEL}attn {MODEL}cp {MODEL}seq_len {MODEL}optim_cpu_offload
        orchestrator.log* trainer.log* orchestrator.output_dir trainer.output_dir""",
    defaults=f"""
        seq_len=2048 {ORCH}group_size=1 {ORCH}batch_size=128 {ORCH}max_off_policy_steps=8
        {ORCH}algo.type=grpo {EVAL}interval=100 trainer.loss.type=default
        trainer.loss.kl_tau=1e-3 {OPTIM}lr=1e-6 {OPTIM}weight_decay=0.01 ckpt.interval=0
        {SCHEDULER}warmup_steps=10 {SCHEDULER}decay_steps=10 {SCHEDULER}min_lr=null""",
)
