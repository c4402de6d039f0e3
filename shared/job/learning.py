"""How the policy learns: `[advantages]`, `[training]`, `[correction]`, `[lora]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shared.job.section import MAX_TEXT, Section, Text

MAX_SERVED_RANK = 512
"""Largest rank of an adapter that vLLM serves beside the model."""

LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-5
"""Default learning rates of full weights and of adapters."""

SFT_FACTOR = 10.0
"""Default learning rates of supervised steps, as a multiple: a given answer's gradient has less
noise than a reward's."""


class AdvantageSpec(Section):
    """How rewards become advantages, `(reward - baseline) / std`, within each prompt's group."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: the "mean" of its group (arXiv 2402.03300), or
    "leave_one_out", the mean of the group's other rewards (RLOO, arXiv 2402.14740). The mean is
    GRPO's."""

    std: Literal["group", "batch", "none"] = "group"
    """The difference is divided by this standard deviation: of the "group", as in GRPO; of the
    whole "batch" (arXiv 2508.08221); or "none" (Dr.GRPO, arXiv 2503.20783): then groups whose
    rewards differ little also count little."""

    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With several rewards: either their weighted sum is normalized, as in GRPO, or each is
    normalized in its group, then weighted and summed (GDPO, arXiv 2601.05242)."""

    credit: Literal["episode", "returns", "turns"] = "episode"
    """Which tokens of a conversation a reward credits. "episode": all, with the rollout's
    advantage. The other two give each turn, an answer of the model, an advantage of its own, from
    the rewards of this turn and of later ones. "returns" compares them with all turns of the group
    (arXiv 2511.14846), "turns" with the same turn in the group's other rollouts (arXiv 2505.11821).
    Equations are in services/orchestrator/grpo/advantages.py."""

    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """The factor with which a reward counts for the turn before the turn that earned it, 0 to 1,
    with `credit` by turns. 1: every turn is credited with all later rewards in full. 0: a turn is
    credited only with its own reward."""

    mask_truncated: bool = False
    """Whether completions cut off by `sampling.max_tokens` are left out of training (overlong
    filtering, arXiv 2503.14476). They count in the group's baseline and in the loss's number of
    sequences, not in its number of tokens. Off: a completion that does not end is a failure to
    learn from."""


class TrainingSpec(Section):
    """The update: loss, optimizer and learning rate. Defaults are usual ones for 0.5B to 8B models.

    Losses and their equations are in services/trainer/learning/loss.py.
    """

    objective: Literal["rl", "sft", "dpo", "program"] = "rl"
    """What is learned: completions that earn rewards ("rl"), the answers that the data gives
    ("sft", the mean negative log-likelihood of a step's tokens), or of two given answers to prefer
    one ("dpo", arXiv 2305.18290). With the latter two a step takes `sampling.prompts_per_step` rows
    and samples nothing, log-probs are at temperature 1, and `[[rewards]]` only grade held-out
    completions. `data.answer`, and the columns `chosen` and `rejected`, say what the answers
    are. "program": a program says each step, by Tinker's API, which makes such a job itself."""

    start_from: str | None = Field(default=None, min_length=1, max_length=4096)
    """A checkpoint of another job, by its full path below `HONE_RUNS_DIR`, as
    `hone download JOB --list` shows it, whose trained weights this job begins with: of the same
    base model, and with an adapter of the same rank, alpha and layers if there is one. None: the
    model alone. `beta` and `dpo_beta` measure from `model` in any case."""

    start_optimizer: bool = False
    """Whether the optimizer state of `start_from` is loaded too. False: the optimizer begins
    without state."""

    dpo_beta: float = Field(default=0.1, gt=0)
    """How strongly "dpo" holds the policy near `model`: the factor on the log-ratios of its loss,
    above 0. 0.1 is usual; a lower one lets the policy move further."""

    train_on: Literal["answer", "all"] = "answer"
    """Which tokens supervised steps learn: the "answer"'s, or "all" but the first, the prompt's
    too."""

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
    from, are clamped to this on both sides, in nats; up to 40. Beyond it the ratio gives a token no
    gradient, and the divergence gives the gradient at the bound. 20 is far beyond values in
    training, and e^20 is finite in float32."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate of "sapo" where the advantage is positive, above 0: a larger one
    fades tokens out sooner as their ratio leaves 1. The default is the paper's (arXiv
    2511.20347)."""

    tau_negative: float = Field(default=1.05, gt=0)
    """The same where the advantage is negative. The paper's 1.05 fades these tokens out sooner,
    because their gradient spreads over the whole vocabulary."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the model that the job began with, 0 or more. 0 loads no
    reference model and is usual where rewards are verified; 0.001 to 0.04 hold the policy near its
    start."""

    kl: Literal["k1", "k2", "k3", "k3_true"] = "k3"
    """How that divergence is estimated (services/trainer/learning/loss.py). "k3" is GRPO's; the
    gradient of "k1" is zero in expectation, the gradient of "k3_true" is the divergence's own."""

    epochs: int = Field(default=1, ge=1)
    """Passes over each batch, all against the log-probs before the first. 1 trains on-policy: no
    clipping bound is ever active."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch, each on an equal share of the batch. 1: one step on all of it,
    for the same reason."""

    learning_rate: float | None = Field(default=None, ge=0)
    """The peak learning rate. None: 1e-6, which is usual for full weights from 0.5B on, and 1e-5
    for a job with `[lora]`: adapters take 10 to 100 times the rate of full weights. With
    `objective` "sft" ten times that."""

    min_learning_rate: float = Field(default=0.0, ge=0)
    """The rate of the last step, where `schedule` is not "constant"; up to `learning_rate`. 0
    decays to nothing."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes from its peak to `min_learning_rate`. "constant" stays at the peak, so the
    number of steps does not change the earlier steps."""

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
    """The effect on the job of a step whose loss or gradient is NaN or infinite. It changes no
    weight in either case; "stop" shows the fault, "skip" counts it and continues."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations; optimizer state is always float32. "auto" takes bfloat16
    where the hardware computes in it and float32 elsewhere."""

    @property
    def supervised(self) -> TrainingSpec:
        """The update of a supervised step: the job's own, or that of a warm-up."""
        if self.objective != "rl":
            return self
        return self.model_copy(update={"objective": "sft", "beta": 0.0})

    @property
    def has_reference(self) -> bool:
        """Whether the update needs the model that the job began with."""
        return self.beta > 0 or self.objective == "dpo"

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest ratio."""
        return (0.0 if self.loss == "cispo" else 1 - self.clip_low), 1 + self.clip_high

    @property
    def ratio_of(self) -> Literal["token", "sequence"]:
        """The level of the importance ratio, the loss's own or the chosen one."""
        return "sequence" if self.loss == "gspo" else self.importance


class WarmupSpec(Section):
    """Supervised steps before the first one that samples, on the same rows: the model learns the
    form of an answer from given ones before it is rewarded for its own."""

    steps: int = Field(default=0, ge=0)
    """How many of the job's first steps are supervised: fewer than `steps`, which counts them too.
    Each takes `sampling.prompts_per_step` rows, and their answers are as `data.answer` says. 0:
    none."""

    learning_rate: float | None = Field(default=None, ge=0)
    """The learning rate of these steps, all the same. None: 1e-5 for full weights, 1e-4 for a job
    with `[lora]`. The schedule of `[training]` begins after them."""


class CorrectionSpec(Section):
    """The correction where sampler and trainer give the same token different log-probs, from w =
    exp(trainer's log-prob - sampler's) before the first update. The difference is measured with
    every method.

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
    """The denominator of the loss's importance ratio. "trainer": its own log-probs before the first
    update; the first update's ratio is exactly 1, and bounds limit only what training changed.
    "sampler": the sampler's log-probs; the ratio is then also the correction, so `method` must be
    "auto" or "none", and noise between the engines is clipped as if it were a change."""

    low: float | None = Field(default=None, ge=0)
    """Lower bound of the weight, 0 or more. None: 0.5 for "icepop", 0.99 for "sequence_mask" of the
    geometric mean, else 0."""

    high: float | None = Field(default=None, gt=0)
    """Upper bound of the weight, above 0. None: 2 for the two TIS, 5 for "icepop", 3 for
    "sequence_mask" of the product and 1.01 of the geometric mean."""

    truncated_sampling: Literal["refuse", "accept"] = "refuse"
    """How `sampling.top_p` < 1, `sampling.top_k` > 0 or `sampling.min_p` > 0 are treated. The
    sampler's log-probs are then over the tokens that it kept. With `sampling.top_k` from 1 to 1024
    the sampler lists these tokens, and the trainer takes its log-probs over the same tokens, so the
    trained distribution is the sampled one. "refuse" refuses a job without such a `top_k`, and a
    sampler that cannot list them. "accept" takes both: the trainer's log-probs are then over the
    whole vocabulary, w is too small by the probability that was cut off, and `method` corrects
    that."""

    @model_validator(mode="after")
    def _corrects_once(self) -> CorrectionSpec:
        if self.ratio_base == "sampler" and self.method not in ("auto", "none"):
            raise ValueError(
                f'ratio_base is "sampler" and method {self.method!r}: the mismatch would be '
                'corrected twice; expected method "auto" or "none"'
            )
        return self


class TeacherSpec(Section):
    """On-policy distillation: a teacher's log-probs of the tokens that the policy sampled are a
    reward for each token, alone or beside `[[rewards]]`. HONE_TEACHER_URL has the teacher's
    endpoint, never the job.

    Equations are in services/orchestrator/grpo/examples.py.
    """

    model: str = Field(min_length=1, max_length=MAX_TEXT)
    """The teacher's name at the endpoint HONE_TEACHER_URL. Its vocabulary must be the vocabulary of
    the job's model, because it reads the sampled token ids."""

    weight: float = Field(default=1.0, gt=0)
    """The weight of the teacher beside the rewards' advantages, above 0: a difference of a nat
    between policy and teacher lowers a token's advantage by this. 1: without rewards, the gradient
    is that of the reverse KL divergence. Advantages of rewards are about 1 in size; 0.1 to 1 is
    usual beside them."""

    max_log_ratio: float = Field(default=10.0, gt=0)
    """The difference between the policy's and the teacher's log-prob of a token is clamped to this
    on both sides, in nats, above 0. Without it a token to which the teacher gives almost no
    probability would outweigh all others. 10 is verl's value: a token of which the policy is sure
    and to which the teacher gives a probability of 0.00005."""


MAX_LAYERS = 4096
"""Most names of layers: seven for each layer of the largest models, with a margin."""


class LoraSpec(Section):
    """Trains low-rank adapters (arXiv 2106.09685) in place of the model's own weights."""

    rank: int = Field(default=16, ge=1, le=8192)
    """Rank r of the update B A that is added to each target layer's weight."""

    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank. The default is twice the default rank, as is usual."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which an input of an adapter is dropped in training. 0: the trained policy
    is exactly the sampled one. With several optimizer steps per batch, dropout's noise is in the
    ratios of all steps but the first, and narrow bounds as for "gspo" clip it."""

    target_modules: (
        Literal["all-linear"] | Annotated[tuple[Text, ...], Field(max_length=MAX_LAYERS)]
    ) = "all-linear"
    """Names of the layers that get adapters, for example ["q_proj", "v_proj"]. "all-linear": every
    linear layer but the output head. Layers that no text goes through, as in a vision tower, never
    get one."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _all_or_names(cls, value: Any) -> Any:
        if value != "all-linear" and type(value) not in (list, tuple):
            raise ValueError('expected "all-linear" or a list of modules, as ["q_proj", "v_proj"]')
        if not value:
            raise ValueError("no layer would get an adapter; expected at least one")
        return value
