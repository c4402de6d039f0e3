"""The job: what to train, as one TOML file, section by section. Where it runs is in `config.py`;
the two never mix.

`job_file.py` reads the file.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

JOB_ID = r"^[a-z0-9][a-z0-9_-]{0,62}$"
"""Ids and names end up in paths and URLs, so they are made of these characters only."""

MAX_SOURCE_BYTES = 1 << 20


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataSpec(Section):
    """Training and held-out problems: a `.jsonl`, `.json`, `.csv` or `.parquet` file on the
    orchestrator's host, or a Hugging Face dataset id with its split.

    `prompt_column` holds a string, or a list of chat messages, which the model's chat template
    renders. A string is sent as it is unless `system_prompt` is set, which makes a system and a
    user message of it.
    """

    train: str
    train_split: str = "train"
    eval: str | None = None
    eval_split: str = "test"
    config: str | None = None
    revision: str | None = None
    prompt_column: str = "prompt"
    system_prompt: str | None = None


class SamplingSpec(Section):
    """A step samples `group_size` completions for each of `prompts_per_step` prompts, of up to
    `max_tokens` tokens.

    Prompts whose group has no signal (all rewards equal) are replaced by further ones, in up to
    `refills` rounds a step (the dynamic sampling of DAPO, arXiv 2503.14476).
    """

    prompts_per_step: int = Field(default=32, ge=1)
    group_size: int = Field(default=8, ge=1, le=1024)
    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    refills: int = Field(default=0, ge=0, le=10)


class RewardSpec(Section):
    """One reward. `grader` names a registered one, which takes `params`; or `file` and `function`
    name your own.

    Your own is a Python function as TRL has it, `def reward(completions, **kwargs) -> list[float]`,
    with the dataset's columns as keyword arguments; or a class (docs/rewards.md). `load_job` sends
    the file's text along as `source`. A `shaping` reward (length, form) counts in the sum but not
    in judging whether a group has any signal: groups that differ in nothing else are dropped.
    """

    grader: str = "function"
    name: str | None = None
    weight: float = 1.0
    shaping: bool = False
    params: dict[str, Any] = {}
    file: str | None = None
    function: str = "reward"
    source: str | None = Field(default=None, max_length=MAX_SOURCE_BYTES)

    @property
    def label(self) -> str:
        """What metrics and stored rollouts call this reward."""
        return self.name or (self.function if self.grader == "function" else self.grader)

    @model_validator(mode="after")
    def _function_needs_source(self) -> RewardSpec:
        if self.grader == "function" and self.file is None and self.source is None:
            raise ValueError('a reward needs either grader = "..." or file = "your_rewards.py"')
        return self


class AdvantageSpec(Section):
    """From rewards to advantages, `(reward - baseline) / std`, within each prompt's group.

    `baseline`: "mean" of the group (arXiv 2402.03300), or "leave_one_out", the mean of the others
    (RLOO, arXiv 2402.14740). `std`: of the "group", of the whole "batch" (arXiv 2508.08221), or
    "none" (Dr.GRPO, arXiv 2503.20783). `combine`: several rewards are weighted and summed and the
    sum normalized, or each is normalized in its group and then weighted and summed (GDPO, arXiv
    2601.05242). `mask_truncated`: completions cut off by `max_tokens` count in the baseline but are
    not trained on (arXiv 2503.14476).
    """

    baseline: Literal["mean", "leave_one_out"] = "mean"
    std: Literal["group", "batch", "none"] = "group"
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    mask_truncated: bool = False


class TrainingSpec(Section):
    """The update. Defaults are the usual ones for 0.5B to 8B models.

    `loss` and its equations: services/trainer/learning/loss.py. `clip_low`, `clip_high` bound the
    importance ratio to `[1 - low, 1 + high]`, token by token or of the whole sequence
    (`importance`; "gspo" is always of the sequence); its logarithm is within
    +-`max_log_ratio` anyway. `dual_clip` bounds the loss of tokens with a negative advantage to that multiple of it (arXiv
    1912.09729). Of these "cispo" has `clip_high` only (3 to 4 is usual there) and "sapo" none, but its temperatures
    `tau_positive` and `tau_negative` (arXiv 2511.20347).

    `beta` weighs the KL divergence to the model that the job began with, estimated by `kl`; 0 loads
    no reference model. The gradient of "k1" is zero in expectation, that of "k3_true" the
    divergence's own. `epochs` passes over a batch in `minibatches` optimizer steps each, all
    against the log-probs before the first.

    `schedule` brings the learning rate from its peak to `min_learning_rate` at the last step;
    `warmup_steps` up to it. `on_nonfinite`: a step whose loss or gradient is NaN or infinite
    changes no weight; then the job ends, or skips it.
    """

    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "gspo"] = "dapo"
    importance: Literal["token", "sequence"] = "token"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.28, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    max_log_ratio: float = Field(default=20.0, gt=0, le=40)
    tau_positive: float = Field(default=1.0, gt=0)
    tau_negative: float = Field(default=1.05, gt=0)
    beta: float = Field(default=0.0, ge=0)
    kl: Literal["k1", "k2", "k3", "k3_true"] = "k3"
    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=1e-6, ge=0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def _rates_in_order(self) -> TrainingSpec:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate is {self.min_learning_rate:g}, above learning_rate "
                f"{self.learning_rate:g}"
            )
        return self


class CorrectionSpec(Section):
    """What is done about sampler and trainer giving the same token different log-probs: weights on
    the loss, from w = exp(trainer's log-prob - sampler's) before the first update. Measured always,
    whatever is done.

    "token_tis": min(w, high) for each token. "sequence_tis": min(product of w, high) for the
    sequence. "sequence_mask": sequences get their product, or 0 if it is outside `[low, high]`.
    "icepop": tokens get w, or 0 if it is outside `[low, high]` (arXiv 2510.18855). "auto":
    "token_tis" if `max_staleness` > 0, else "none". With "none" the loss's ratios are taken to the
    sampler's log-probs, else to the trainer's. Bounds that are not set: high 2 for TIS, 3 for
    sequence_mask, 5 for icepop; low 0.5 for icepop, else 0.
    """

    method: Literal["auto", "none", "token_tis", "sequence_tis", "sequence_mask", "icepop"] = "auto"
    low: float | None = Field(default=None, ge=0)
    high: float | None = Field(default=None, gt=0)


class LoraSpec(Section):
    """Train low-rank adapters (arXiv 2106.09685) and not the model. "all-linear" is every linear
    layer but the output head."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class MemorySpec(Section):
    """How an update fits into memory. Nothing here changes its result.

    `micro_batch_tokens` bounds the tokens of one forward pass, padding included, `chunk_tokens`
    those whose logits exist at a time. `zero_stage`: what the ranks share out (arXiv 1910.02054): 0
    nothing, 1 optimizer state, 2 gradients as well, 3 weights as well. `packing` puts several
    sequences into one row; "auto" where the attention implementation takes them apart without cost.
    `deepspeed` is merged over the configuration given to DeepSpeed, key by key.
    """

    micro_batch_tokens: int = Field(default=16384, ge=1)
    chunk_tokens: int = Field(default=1024, ge=1)
    gradient_checkpointing: bool = False
    zero_stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer: bool = False
    packing: Literal["auto", "on", "off"] = "auto"
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    deepspeed: dict[str, Any] = {}


class EvaluationSpec(Section):
    """Held-out accuracy: `num_prompts` problems of `data.eval` every `every` steps, and always
    before and after training.

    `temperature` 0 is greedy decoding. `num_prompts` None takes all of them.
    """

    every: int = Field(default=50, ge=1)
    num_prompts: int | None = Field(default=None, ge=1)
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)


class CheckpointSpec(Section):
    """A checkpoint every `every` steps (0: only the last), from which training can go on. The
    newest `keep_last` are kept, and of older ones those whose step divides by `keep_every` (0:
    none)."""

    every: int = Field(default=50, ge=0)
    keep_last: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0)


class WandbSpec(Section):
    """Log to Weights & Biases. The key comes from the orchestrator's WANDB_API_KEY; "offline" needs
    none."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    tags: tuple[str, ...] = ()


class Job(Section):
    """Everything that is trained, by one name. `max_staleness` (steps) 0 samples and trains in
    turn; k >= 1 lets sampling run ahead, so that a batch is sampled by weights at most k steps
    old."""

    name: str = Field(pattern=JOB_ID, max_length=40)
    model: str
    model_revision: str | None = None
    steps: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    max_model_len: int | None = Field(default=None, gt=0)
    max_staleness: int = Field(default=0, ge=0, le=64)
    weight_sync: Literal["shm", "disk"] = "shm"
    data: DataSpec
    sampling: SamplingSpec = SamplingSpec()
    rewards: tuple[RewardSpec, ...] = Field(min_length=1)
    advantages: AdvantageSpec = AdvantageSpec()
    training: TrainingSpec = TrainingSpec()
    correction: CorrectionSpec = CorrectionSpec()
    lora: LoraSpec | None = None
    memory: MemorySpec = MemorySpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoints: CheckpointSpec = CheckpointSpec()
    wandb: WandbSpec | None = None

    @model_validator(mode="after")
    def _reward_names_differ(self) -> Job:
        labels = [reward.label for reward in self.rewards]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(
                f'two rewards are called {twice[0]!r}; give one of them another name = "..."'
            )
        return self
