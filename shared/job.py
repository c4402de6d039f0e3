"""The job: what to train, as one TOML file, section by section. `job_file.py` reads the file; where
the job runs is in `config.py`, and the two never mix.

The text under a key is its documentation: `hone explain` and the OpenAPI document show it.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shared.plain import Plain

JOB_ID = r"^[a-z0-9][a-z0-9_-]{0,62}$"
"""Ids and names end up in paths and URLs, so they are made of these characters only."""

MAX_SOURCE_BYTES = 1 << 20

MAX_KEPT = 1024
"""Largest `sampling.top_k` with which the sampler says which tokens each one could have been: 4 KB
per token at most, where a completion's other data is 9 bytes."""

MAY_CHANGE = frozenset(
    {"name", "steps", "weight_sync", "memory", "evaluation", "checkpoints", "rollouts", "wandb"}
)
"""Keys of a job that do not say what is learned: a job may go on with others than it began with."""

SyncMethod = Literal["shm", "disk", "http", "delta", "lora", "reload", "restart", "nccl", "ipc"]
"""How weights get from trainer to sampler. Each method is an entry of two tables: METHODS in
services/trainer/disk/weights.py, LOADERS in services/rollout/weights/methods.py."""

SyncChoice = Literal["auto", SyncMethod]

MAX_SERVED_RANK = 512
"""Largest rank of an adapter that vLLM serves apart from the model."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take true for 1."""
        if isinstance(value, bool):
            taken = _members(cls.model_fields[info.field_name or ""].annotation)
            if bool not in taken and taken & {int, float}:
                raise ValueError("expected a number")
        return value


class DataSpec(Section):
    """Training and held-out problems, one per row. The columns beside the prompt go to the
    graders."""

    train: str = Field(min_length=1)
    """The training problems: a `.jsonl`, `.json`, `.csv` or `.parquet` file on the orchestrator's
    host, or a Hugging Face dataset id. Each pass takes them in another order."""

    train_split: str = "train"
    """Split of a Hugging Face dataset to train on. Files have none."""

    eval: str | None = Field(default=None, min_length=1)
    """The held-out problems, never trained on: a file or a dataset id, as for `train`. None: the
    job does no evaluation."""

    eval_split: str = "test"
    """Split of a Hugging Face dataset to evaluate on. Files have none."""

    config: str | None = None
    """Configuration of a Hugging Face dataset that has several, for example "main" of
    openai/gsm8k. It counts for `train` and `eval`."""

    revision: str | None = None
    """Commit, tag or branch of a Hugging Face dataset, for `train` and `eval`. None: the newest
    one, so a run that must be repeatable names a commit."""

    prompt_column: str = "prompt"
    """The column with the prompt: text, or a list of chat messages (`role`, `content`). Text goes
    to the model as it is; messages go through the model's chat template."""

    system_prompt: str | None = None
    """A system message before every prompt. Prompts that are text become a user message after it,
    so they go through the chat template too. None: no system message is added."""


class SamplingSpec(Section):
    """A step samples `group_size` completions for each of `prompts_per_step` prompts."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts per step. With the default `group_size` a step has 256 rollouts."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Completions per prompt, compared with each other. A group of 1 has nothing to be compared
    with and trains nothing; 8 to 16 are usual."""

    max_tokens: int = Field(default=512, ge=1)
    """Longest completion, in tokens. A completion that reaches it ends with `finish_reason`
    "length"."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits; the trainer divides its own by the same. 1 samples the policy itself."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples only from the most likely tokens that together have this probability. 1 samples from
    the whole vocabulary, so the distribution that is sampled is the one that is trained; less needs
    `top_k` too: see `correction.truncated_sampling`."""

    top_k: int = Field(default=0, ge=0)
    """Samples only from this many most likely tokens. 0 samples from the whole vocabulary; else as
    with `top_p`."""

    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, besides the model's own end token."""

    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end a completion, besides the model's own end token."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Samples only from tokens at least this share as likely as the likeliest. 0 samples from the
    whole vocabulary; else as with `top_p`."""

    template_args: dict[str, Plain] = {}
    """Arguments of the model's chat template, for example `enable_thinking`. Prompts that are text
    go through none."""

    overlong_prompts: Literal["error", "drop", "truncate"] = "error"
    """What becomes of a prompt that leaves no room for `max_tokens`. "error": its rollouts end in
    an error and train nothing. "drop": another prompt takes its place, in at most 10 rounds.
    "truncate": its first tokens are cut off. Each is counted (`overlong_prompts`)."""

    repeatable: bool = False
    """Seeds every completion by the job's seed, the step, the prompt's place in it and the
    completion's in its group (an evaluation's by its place alone), so that the same weights draw
    the same samples on one engine, in whatever order groups reach it. Two runs of a job then agree
    as far as nothing else differs: with `max_staleness` above 0 it is a matter of time which
    weights sample a token, and so is what a deadline cuts off; and numbers are rounded otherwise in
    batches of other sizes, so that a near tie may fall the other way. Off: vLLM draws for each
    seeded sequence by itself, which takes time."""

    refills: int = Field(default=0, ge=0, le=10)
    """Rounds per step in which groups without signal (all rewards equal) are replaced by groups of
    further prompts: the dynamic sampling of DAPO, arXiv 2503.14476. 0 replaces none, because each
    round costs sampling time."""


class RewardSpec(Section):
    """One reward: a grader by name, with its `params`, or your own code by `file` and `function`
    (docs/rewards.md)."""

    grader: str = "function"
    """Name of a grader; `GET /graders` of the reward service lists them. "function" is your own
    code in `file`."""

    name: str | None = None
    """What metrics and stored rollouts call this reward; no two of a job have the same name. None:
    the grader's name, or the function's."""

    weight: float = Field(default=1.0, ge=-1_000_000, le=1_000_000)
    """Factor of this reward in the sum that is the rollout's reward, from -1000000 to
    1000000. Below 0 it is a penalty."""

    shaping: bool = False
    """The reward is for form only (length, format). It counts in the sum, but not in judging if a
    group has signal: groups that differ in nothing else are not trained on."""

    params: dict[str, Plain] = {}
    """Parameters of the grader, checked when the job is submitted. `GET /graders` has their
    schema."""

    file: str | None = None
    """Python file with your own reward, relative to the job file or to the working directory. Its
    text travels with the job."""

    function: str = "reward"
    """Name in `file` of a function `def reward(completions, **columns) -> list[float]`, as TRL has
    it, or of a class."""

    source: str | None = Field(default=None, max_length=MAX_SOURCE_BYTES)
    """Text of `file`, at most 1 MiB, which `load_job` fills in. A job that is not submitted from a
    file sets it in place of `file`."""

    @property
    def label(self) -> str:
        """What metrics and stored rollouts call this reward."""
        return self.name or (self.function if self.grader == "function" else self.grader)

    @model_validator(mode="after")
    def _function_needs_source(self) -> RewardSpec:
        if self.grader == "function" and self.file is None and self.source is None:
            raise ValueError('a reward needs either grader = "..." or file = "your_rewards.py"')
        if self.grader != "function" and (self.file is not None or self.source is not None):
            raise ValueError(
                f"grader is {self.grader!r}, and there is code of your own; a reward has one of "
                "them"
            )
        return self


class AdvantageSpec(Section):
    """From rewards to advantages, `(reward - baseline) / std`, within each prompt's group."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: the "mean" of its group (arXiv 2402.03300), or
    "leave_one_out", the mean of the others in it (RLOO, arXiv 2402.14740). The mean is GRPO's."""

    std: Literal["group", "batch", "none"] = "group"
    """The standard deviation that the difference is divided by: of the "group", as in GRPO; of the
    whole "batch" (arXiv 2508.08221); or "none" (Dr.GRPO, arXiv 2503.20783), where groups whose
    rewards differ little also weigh little."""

    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With several rewards: their weighted sum is normalized, as in GRPO; or each is normalized in
    its group and then weighted and summed (GDPO, arXiv 2601.05242)."""

    mask_truncated: bool = False
    """Whether completions cut off by `sampling.max_tokens` are left out of training (overlong
    filtering, arXiv 2503.14476). They count in the group's baseline and in the loss's number of
    sequences, not in its number of tokens. Off: a completion that does not end is a failure to
    learn from."""


class TrainingSpec(Section):
    """The update: loss, optimizer and learning rate. Defaults are usual ones for 0.5B to 8B models.

    Losses and their equations are in services/trainer/learning/loss.py.
    """

    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "gspo"] = "dapo"
    """The policy loss. "dapo" averages over all tokens of the batch, so every token weighs the
    same."""

    importance: Literal["token", "sequence"] = "token"
    """The level of the importance ratio: of each token, as in PPO, or one per sequence, the
    geometric mean over its tokens. "gspo" is always of the sequence."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped to at least `1 - clip_low` where the advantage is negative; 0 to below
    1. 0.2 is PPO's; for "gspo", whose ratios are near 1, 3e-4 is usual. "cispo" and "sapo" have no
    lower bound."""

    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped to at most `1 + clip_high` where the advantage is positive; 0 or more.
    0.28 is DAPO's, above `clip_low` so that unlikely tokens can become likely. Usual are 4e-4 for
    "gspo" and 3 to 4 for "cispo", which bounds the weight of every token; "sapo" has no bound."""

    dual_clip: float | None = Field(default=None, gt=1)
    """The loss of a token with a negative advantage is at most this multiple of it (arXiv
    1912.09729); above 1, 3 is usual. None: no such bound, as in GRPO and DAPO. Not in "cispo" and
    "sapo"."""

    max_log_ratio: float = Field(default=20.0, gt=0, le=40)
    """The ratio's logarithm, and the difference of log-probs that the KL divergence is estimated
    from, are clamped to this on both sides, in nats; up to 40. Beyond it a token has no gradient of
    the ratio, and of the divergence that of the bound. 20 is far from what training makes, and
    keeps e to its power finite in float32."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate of "sapo" where the advantage is positive, above 0: a larger one
    fades tokens out sooner as their ratio leaves 1. The default is the paper's (arXiv
    2511.20347)."""

    tau_negative: float = Field(default=1.05, gt=0)
    """The same where the advantage is negative. The paper's 1.05 fades these sooner, because their
    gradient spreads over the whole vocabulary."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the model that the job began with, 0 or more. 0 loads no
    reference model and is usual where rewards are verified; 0.001 to 0.04 hold the policy near its
    start."""

    kl: Literal["k1", "k2", "k3", "k3_true"] = "k3"
    """How that divergence is estimated (services/trainer/learning/kl.py). "k3" is GRPO's; the
    gradient of "k1" is zero in expectation, that of "k3_true" the divergence's own."""

    epochs: int = Field(default=1, ge=1)
    """Passes over each batch, all against the log-probs before the first. 1 trains on-policy, where
    no bound is ever active."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch, each on an equal share of the batch. 1: one step on all of it,
    for the same reason."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """The peak learning rate. 1e-6 is usual for full weights from 0.5B on; LoRA takes 10 to 100
    times that."""

    min_learning_rate: float = Field(default=0.0, ge=0)
    """The rate of the last step, where `schedule` is not "constant"; up to `learning_rate`. 0
    decays to nothing."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes from its peak to `min_learning_rate`. "constant" stays at the peak, so the
    number of steps changes nothing of the earlier ones."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises from 0 to its peak. 0: none, a peak of 1e-6 needs none."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay per step and learning rate. 0: at such rates it would change little."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients, 0 to below 1; PyTorch's default."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients, 0 to below 1; PyTorch's default."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of an optimizer step is scaled down to at most this L2 norm. 1 is usual."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a step whose loss or gradient is NaN or infinite does to the job. It changes no weight
    in either case; "stop" shows the fault, "skip" counts it and goes on."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; the optimizer's are float32 always. "auto" takes bfloat16 where
    the hardware computes in it and float32 elsewhere."""

    @model_validator(mode="after")
    def _rates_in_order(self) -> TrainingSpec:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate is {self.min_learning_rate:g}, above learning_rate "
                f"{self.learning_rate:g}"
            )
        return self


class CorrectionSpec(Section):
    """What is done about sampler and trainer giving the same token different log-probs, from w =
    exp(trainer's log-prob - sampler's) before the first update. The difference is measured always,
    whatever is done.

    Equations are in services/trainer/learning/correction.py.
    """

    method: Literal["auto", "none", "token_tis", "sequence_tis", "sequence_mask", "icepop"] = "auto"
    """Weights on the loss. "token_tis" gives each token w, bounded; "sequence_tis" each sequence W,
    bounded; "sequence_mask" W, or 0 outside the bounds; "icepop" each token w, or 0 outside the
    bounds (arXiv 2510.18855). "auto" is "token_tis" where `max_staleness` > 0 and "none" elsewhere,
    where w is only the engines' rounding."""

    sequence_ratio: Literal["product", "geometric_mean"] = "product"
    """W of a sequence: the "product" of its w, the unbiased weight, which vanishes or explodes on
    long completions; or their "geometric_mean", biased, and as near to 1 for a long completion as
    for a short one."""

    ratio_base: Literal["trainer", "sampler"] = "trainer"
    """What the loss's importance ratio is taken to. With the "trainer"'s own log-probs before the
    first update, the ratio of that update is exactly 1 and bounds hold only what training changed.
    With the "sampler"'s, the ratio is also the correction, so `method` must be "auto" or "none",
    and noise between the engines is clipped as if it were a change."""

    low: float | None = Field(default=None, ge=0)
    """Lower bound of the weight, 0 or more. None: 0.5 for "icepop", 0.99 for "sequence_mask" of the
    geometric mean, else 0."""

    high: float | None = Field(default=None, gt=0)
    """Upper bound of the weight, above 0. None: 2 for the two TIS, 5 for "icepop", 3 for
    "sequence_mask" of the product and 1.01 of the geometric mean."""

    truncated_sampling: Literal["refuse", "accept"] = "refuse"
    """What becomes of `sampling.top_p` < 1, `sampling.top_k` > 0 or `sampling.min_p` > 0. The
    sampler's log-probs are then of the tokens that it kept. With `sampling.top_k` from 1 to 1024 it
    says which these are for each token, and the trainer takes its log-probs over the same tokens,
    so the trained distribution is the sampled one. "refuse" refuses a job without that bound, and a
    sampler that cannot say it. "accept" does not ask: the trainer's log-probs are of the whole
    vocabulary, w is too small by the probability that was cut off, and `method` weighs that."""

    @model_validator(mode="after")
    def _corrects_once(self) -> CorrectionSpec:
        if self.ratio_base == "sampler" and self.method not in ("auto", "none"):
            raise ValueError(
                f'ratio_base is "sampler" and method {self.method!r}: the mismatch would be '
                'corrected twice; expected method "auto" or "none"'
            )
        return self


class LoraSpec(Section):
    """Trains low-rank adapters (arXiv 2106.09685) in place of the model's own weights."""

    rank: int = Field(default=16, ge=1)
    """Rank r of the update B A that is added to each target layer's weight."""

    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank. The default is twice the default rank, as is usual."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which an input of an adapter is dropped in training. 0: the policy that is
    trained is exactly the one that was sampled. With several optimizer steps per batch the noise of
    dropout is in the ratios of all but the first, where bounds as narrow as those of "gspo" clip
    it."""

    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the layers that get adapters, for example ["q_proj", "v_proj"]. "all-linear": every
    linear layer but the output head."""


class MemorySpec(Section):
    """How an update fits into memory. Nothing here changes its result, rounding apart."""

    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens in one forward and backward pass of a rank, padding included. It is halved by
    itself when memory runs out. A single sequence that is longer has a pass of its own."""

    chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at a time: a chunk of them by a part of the vocabulary, in
    float32."""

    gradient_checkpointing: bool = True
    """Keeps only each layer's input and computes the layer again in the backward pass: about a
    third more time, and a fraction of the activation memory, which at 16,384 tokens and 7B
    parameters would be about 120 GB. Set false for small models and short sequences."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What the ranks share out, each stage including those before (arXiv 1910.02054): 0 nothing, 1
    optimizer state, 2 gradients, 3 weights."""

    offload_optimizer: bool = False
    """Keeps master weights and optimizer state in host memory, and updates them there with
    DeepSpeed's CPU Adam. Needs `zero_stage` 1, 2 or 3 and a C++ compiler."""

    packing: Literal["auto", "on", "off"] = "auto"
    """Puts several sequences into one row instead of padding. "auto": where the model runs flash
    attention, which keeps the sequences of a row apart at no cost."""

    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """The attention implementation, by its name in transformers. "auto": the one that transformers
    chooses for the model."""

    deepspeed: dict[str, Any] = {}
    """Merged over the configuration given to DeepSpeed, key by key. Only keys that change where
    things lie, when they are sent and what is logged are taken; others are refused."""


class EvaluationSpec(Section):
    """Held-out accuracy: the mean reward of problems of `data.eval`, before training, every `every`
    steps and after the last."""

    every: int = Field(default=50, ge=1)
    """Steps between two evaluations."""

    num_prompts: int | None = Field(default=None, ge=1)
    """How many problems, from the first row on. None: all of them."""

    samples: int = Field(default=1, ge=1)
    """Completions per problem. More than 1 needs a `temperature` above 0 to make a difference."""

    temperature: float = Field(default=0.0, ge=0)
    """Divides the logits. 0: greedy decoding, which gives the same answer each time."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens. None: that of training, `sampling.max_tokens`."""


class CheckpointSpec(Section):
    """Checkpoints: Hugging Face folders from which training also goes on."""

    every: int = Field(default=50, ge=0)
    """Steps between two checkpoints. The last step always has one; 0: only the last."""

    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept. The default survives damage to the newest."""

    keep_every: int = Field(default=0, ge=0)
    """Of older checkpoints, those whose step is divisible by this are kept too. 0: none."""


class RolloutsSpec(Section):
    """Stored rollouts: what was sampled and how it was graded, a file for each step."""

    keep_last: int = Field(default=1000, ge=0)
    """Of how many of the newest steps rollouts are kept, at least; older ones cannot be looked at
    or regraded any more. Those that a restart from any of the newest `checkpoints.keep_last`
    checkpoints replays are always kept. 0: all. The default bounds a run's disk at a few GB."""


class WandbSpec(Section):
    """Logs metrics to Weights & Biases as well. The key is the orchestrator's WANDB_API_KEY."""

    project: str
    """Project to log to."""

    entity: str | None = None
    """User or team that owns the project. None: the default of the key."""

    mode: Literal["online", "offline"] = "online"
    """"offline" writes to the run folder only, and needs no key."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""


class Job(Section):
    """Everything that is trained, under one name."""

    name: str = Field(pattern=JOB_ID, max_length=40)
    """Begins the job's id and its run folder; `runs/<name>` points at the newest run of the name.
    Lower-case letters, digits, "-" and "_", at most 40."""

    model: str = Field(min_length=1)
    """The model that training begins with: a folder in Hugging Face format, which trainer and
    sampler both see, or a Hugging Face id."""

    model_revision: str | None = None
    """Commit, tag or branch of a Hugging Face model. None: the newest one, so a run that must be
    repeatable names a commit."""

    steps: int = Field(ge=1)
    """Batches to train on. Each is one optimizer step unless `training.epochs` or
    `training.minibatches` make more of it."""

    seed: int = Field(default=0, ge=0)
    """Seeds the order of prompts, sampling, the deal into minibatches and dropout."""

    max_model_len: int | None = Field(default=None, gt=0)
    """Most tokens of prompt and completion together. None: what the model was made for. A lower
    bound lets the sampler's cache hold more sequences."""

    max_staleness: int = Field(default=0, ge=0, le=64)
    """Most steps by which the weights that sampled a batch may be older than those it trains. 0
    samples and trains in turn; from 1 on sampling runs while the trainer trains."""

    drain_before_sync: bool = False
    """Whether a sampler finishes the groups it has under way before it takes new weights, and
    begins no others meanwhile. False: it stops between two tokens and goes on with the new weights,
    so a completion may have been sampled by several versions, which `max_staleness` bounds. Without
    staleness nothing of the job is under way then."""

    weight_sync: SyncChoice = "auto"
    """How weights reach the samplers. "shm": shared memory of one host. "disk": a folder under
    `HONE_RUNS_DIR` that the hosts share. "http": from the trainer over the network, with nothing
    shared. "delta": likewise, and after the first time only the elements that changed. "lora": the
    adapter of a job with `[lora]` alone, beside the base model, which stays as it is; from shared
    memory, or over the network where the sampler does not see that. "reload": as "disk", with the
    engine's memory freed while the weights are exchanged (vLLM's sleep mode, which a CPU does not
    have). "restart": as "disk", by a new engine, which takes as long as a start: what the other
    methods are tested against. "nccl": from the trainer's GPU to those of the samplers (between
    CPUs by gloo). "ipc": read by the sampler in the trainer's memory, on the GPU that both use.
    These two need `HONE_TRAINER_URL` at the sampler as "http" does, which a version goes by that
    did not arrive, and neither LoRA nor ZeRO-3.

    "auto" tries, each time the job is loaded, "lora" for a job with `[lora]`, "ipc" or "nccl" where
    both sides compute on GPUs that allow it, and else "shm" and then "disk" with a sampler that is
    alone. If it sees neither folder, and with several samplers, it takes "delta" up to a learning
    rate of 1e-5, beyond which most elements change at each step, and "http" there. The choice and
    its reason are an event of the job."""

    sync_every: int = Field(default=1, ge=1, le=65)
    """Steps between two syncs, from 1 to `max_staleness` + 1. 1: after each step. More save time
    where a sync is long, and make samples older. An evaluation and the last step always sync."""

    data: DataSpec
    """The problems."""

    sampling: SamplingSpec = SamplingSpec()
    """How completions are sampled."""

    rewards: tuple[RewardSpec, ...] = Field(min_length=1)
    """What completions are rewarded for: at least one, each a `[[rewards]]` table. A rollout's
    reward is their weighted sum."""

    advantages: AdvantageSpec = AdvantageSpec()
    """From rewards to advantages."""

    training: TrainingSpec = TrainingSpec()
    """The update."""

    correction: CorrectionSpec = CorrectionSpec()
    """What is done about sampler and trainer giving a token different log-probs."""

    lora: LoraSpec | None = None
    """Low-rank adapters. None: all weights are trained."""

    memory: MemorySpec = MemorySpec()
    """How an update fits into memory."""

    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out accuracy."""

    checkpoints: CheckpointSpec = CheckpointSpec()
    """When checkpoints are written, and which are kept."""

    rollouts: RolloutsSpec = RolloutsSpec()
    """Which stored rollouts are kept."""

    wandb: WandbSpec | None = None
    """Weights & Biases. None: metrics are only in the run folder."""

    @model_validator(mode="after")
    def _reward_names_differ(self) -> Job:
        labels = [reward.label for reward in self.rewards]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(
                f'two rewards are called {twice[0]!r}; give one of them another name = "..."'
            )
        return self

    @model_validator(mode="after")
    def _keeps_what_is_sampled(self) -> Job:
        if self.weight_sync in ("reload", "restart") and self.max_staleness:
            raise ValueError(
                f'weight_sync is "{self.weight_sync}", which ends what is being sampled, and '
                f"max_staleness is {self.max_staleness}, expected 0"
            )
        return self

    @model_validator(mode="after")
    def _sends_what_is_whole(self) -> Job:
        if self.weight_sync in ("nccl", "ipc") and not self.has_live_weights:
            why = "lora is set" if self.lora else "memory.zero_stage is 3"
            raise ValueError(
                f'weight_sync is "{self.weight_sync}", which takes weights where they are trained, '
                f'and {why}: they are not whole there; expected "shm", "disk", "http" or "delta"'
            )
        return self

    @property
    def has_live_weights(self) -> bool:
        """Whether the weights that serve are those of the trainer's model as it is in memory."""
        return self.lora is None and self.memory.zero_stage < 3

    @model_validator(mode="after")
    def _has_an_adapter_to_sync(self) -> Job:
        if self.weight_sync == "lora" and self.lora is None:
            raise ValueError(
                'weight_sync is "lora" and the job has no [lora], so there is no adapter to sync; '
                'expected [lora], or weight_sync = "auto"'
            )
        if self.weight_sync == "lora" and self.lora and self.lora.rank > MAX_SERVED_RANK:
            raise ValueError(
                f'weight_sync is "lora" and lora.rank {self.lora.rank}, expected at most '
                f'{MAX_SERVED_RANK}, the largest that vLLM serves; "auto" merges larger ones'
            )
        return self

    @model_validator(mode="after")
    def _syncs_in_time(self) -> Job:
        if self.sync_every > self.max_staleness + 1:
            raise ValueError(
                f"sync_every is {self.sync_every} and max_staleness {self.max_staleness}; expected "
                f"sync_every up to {self.max_staleness + 1}: a step may not be sampled by older "
                "weights"
            )
        return self

    @model_validator(mode="after")
    def _whole_vocabulary(self) -> Job:
        top_p, top_k, min_p = self.sampling.top_p, self.sampling.top_k, self.sampling.min_p
        if self.needs_masks and not 1 <= top_k <= MAX_KEPT:
            raise ValueError(
                f"sampling.top_p is {top_p:g}, sampling.min_p {min_p:g} and sampling.top_k "
                f"{top_k}, expected a top_k from 1 to {MAX_KEPT} with them: the sampler says for "
                "each token which ones it could have been, so that the trainer trains the "
                "distribution sampled from, and top_k bounds how many these are. To train without, "
                'set correction.truncated_sampling = "accept"'
            )
        return self

    @property
    def served_rank(self) -> int | None:
        """The rank of the adapters that samplers may be sent; None: they get whole weights."""
        if self.lora is None or self.weight_sync not in ("auto", "lora"):
            return None
        return self.lora.rank if self.lora.rank <= MAX_SERVED_RANK else None

    @property
    def needs_masks(self) -> bool:
        """Whether the sampler is to say which tokens it could have sampled."""
        sampling = self.sampling
        truncates = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        return truncates and self.correction.truncated_sampling == "refuse"


def _members(annotation: Any) -> set[Any]:
    """Returns the types that an annotation is a union of, and of which literals' values are."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (Union, UnionType):
        return {member for part in get_args(annotation) for member in _members(part)}
    return {annotation}
