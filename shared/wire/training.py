"""A step's batch, its examples, and the trainer's requests and answers. And operations of a program
on its model, as stored in the run folder."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from shared.job import Job
from shared.wire.base import Beside, Fenced, Fencing, JobId, Listing, Orchestrator, Weight, Wire
from shared.wire.packed import Logprobs, Mask, TokenIds
from shared.wire.rewards import Score
from shared.wire.rollouts import MAX_TOP, AdapterWeights, Prompt, RolloutGroup, Sampling, Span


class Batch(Wire):
    """A sampled and scored step, as stored in the run folder: axes `[P]` prompts, `[P][G]` rollouts
    and scores.

    `version` is the oldest weight version that sampled it, None if none is known. `dropped`
    `[D][G]` are the scores of replaced groups, which had no signal; `dropped_prompts` `[D]` are
    their prompts' indices, and `dropped_tokens` their tokens. `graded` False: too many rewards were
    missing, so the batch was not trained on and will be graded again. A replay of the step needs
    only the job and this.
    `schema_version` is the version of this class; older versions are read too.
    """

    step: int
    version: int | None
    prompts: tuple[Prompt, ...]
    groups: tuple[RolloutGroup, ...]
    scores: tuple[tuple[Score, ...], ...]
    dropped: tuple[tuple[Score, ...], ...] = ()
    dropped_prompts: tuple[int, ...] = ()
    dropped_tokens: int = 0
    graded: bool = True
    schema_version: int = 2


class Example(Wire):
    """One completion with its advantage, as the trainer receives it.

    `token_ids`, `sampled`, `spans`, `kept_ids` and `kept_counts` are as in `Rollout`;
    `old_logprobs` `[T]` are the sampler's `logprobs`, in nats, each by the weights that sampled the
    token; empty: unknown, taken to be the trainer's own. `advantages` `[T]` are per token and
    replace `advantage`; empty: `advantage` counts for all tokens. `spans` empty: sampled by no
    job's weights, as far as is known.

    `ratio_mask` `[T]` is 1 where a token counts in the ratio of the sequence, of the loss "gspo";
    empty: every token does. `context_ids` `[T]` are the model's input at the completion's positions
    if that differs from `token_ids`, which are then only targets. Empty: `token_ids`.
    """

    prompt_token_ids: TokenIds
    token_ids: TokenIds
    context_ids: TokenIds = TokenIds()
    ratio_mask: Mask = Mask()
    old_logprobs: Logprobs = Logprobs()
    advantage: float
    advantages: Logprobs = Logprobs()
    spans: tuple[Span, ...] = ()
    sampled: Mask = Mask()
    kept_ids: TokenIds = TokenIds()
    kept_counts: TokenIds = TokenIds()


class StepTotals(Wire):
    """The denominators of losses: the size of a batch as it was sampled, groups without signal
    included. `num_tokens` counts sampled tokens."""

    num_sequences: int = Field(ge=0)
    num_tokens: int = Field(ge=0)


class TrainerJob(Fenced):
    """`PUT /job`: load this job, from its newest checkpoint in the run folder or else at its start.
    The same job again changes only the fence. Another job replaces it, unless its attempt is one of
    `beside`: then the two take turns on one base model, each with its own adapter. When both have
    work, they get tokens in proportion to `weight`; the jobs of one API `key` share one weight.
    `orchestrator` is the job's owner: the trainer takes it from the request's header."""

    job: Job
    beside: Beside = ()
    weight: Weight = 1.0
    key: str | None = None
    orchestrator: Orchestrator | None = None


class TrainerState(Fencing):
    """`GET /state`: `step` is the last applied step, which is also the weights' version. None: no
    job yet.

    `num_trainable` counts the parameters that change (fewer under LoRA). `without` says which
    optimization the model cannot use, and why ("": it uses all). `skipped_steps` counts steps that
    changed no weight, because a loss or gradient was not finite. `resumed_step` is the checkpoint
    that the job resumed from, and `damaged` names newer checkpoints that could not be used.
    `restarts` counts restarts of the ranks after a failure, and `last_failure` is the latest
    failure. `boot_id` identifies this start of the ranks. `sharing` are the jobs that are loaded
    and take turns, and `turn_s` is how many seconds the last change of turns took (None: there was
    none). `gpu` is the UUID of rank 0's GPU; a sampler on the same GPU can read its memory if both
    have the same `memory_space` (shared/weights/meeting.py). `taken` is why the caller is refused:
    the trainer has another orchestrator's job.
    """

    job_id: JobId | None
    step: int
    num_ranks: int
    dtype: str
    device: str
    num_parameters: int
    num_trainable: int = 0
    without: str = ""
    skipped_steps: int = 0
    resumed_step: int | None = None
    damaged: tuple[str, ...] = ()
    sharing: tuple[JobId, ...] = ()
    turn_s: float | None = None
    restarts: int = 0
    last_failure: str | None = None
    boot_id: str = ""
    gpu: str | None = None
    memory_space: str | None = None
    taken: str | None = None


class ReleaseRequest(Fenced):
    """`POST /release`: the job leaves the trainer, and another orchestrator may take it. The job
    stays loaded until another one is loaded."""


class Released(Wire):
    """The job that has left the trainer."""

    job_id: JobId


class TrainStepRequest(Fenced):
    """`POST /train_step`: step `step` of the job, which must be the last applied one plus 1 (else
    409).

    A step without examples (no group had any signal) is valid and changes no weight. `totals` None:
    the totals of `examples`.
    """

    step: int = Field(ge=1)
    examples: tuple[Example, ...]
    totals: StepTotals | None = None


class ForwardRequest(Fenced):
    """`POST /forward`: the log-probs that the weights of `step`, the last applied one, give the
    sampled tokens of examples. Changes nothing."""

    step: int = Field(ge=0)
    examples: tuple[Example, ...] = Field(min_length=1)


class ForwardResult(Wire):
    """Log-probs `[N]` of the sampled tokens of all examples, one example after the other, in nats,
    at the job's temperature. `reference_logprobs` are of the model that the job began with; empty:
    the job does not need it."""

    logprobs: Logprobs
    reference_logprobs: Logprobs = Logprobs()


TokenLossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]

RATIO_BOUNDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
"""Default bounds of the ratio. "gspo" has none: the bounds in its paper (arXiv 2507.18071) suit
one length of answers."""


class TokenLoss(Wire):
    """A loss that is a sum over tokens (services/trainer/learning/loss.py has the formulas).
    `ratio_low` and `ratio_high` bound the ratio of "ppo", "cispo" and "gspo"; None: the default of
    `RATIO_BOUNDS`. `beta` belongs to "dro"."""

    name: TokenLossName
    ratio_low: float | None = Field(default=None, ge=0)
    ratio_high: float | None = Field(default=None, gt=0)
    beta: float = Field(default=0.05, ge=0)

    max_log_ratio: ClassVar[float] = 20.0
    """The ratio's logarithm is clamped to this on both sides, so that no ratio is infinite."""

    @property
    def ratio_of(self) -> Literal["token", "gspo_token"]:
        """The level of the importance ratio."""
        return "gspo_token" if self.name == "gspo" else "token"

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest ratio, defaults filled in."""
        low, high = RATIO_BOUNDS.get(self.name, (0.0, math.inf))
        return (
            low if self.ratio_low is None else self.ratio_low,
            high if self.ratio_high is None else self.ratio_high,
        )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.name == "gspo" and None in (self.ratio_low, self.ratio_high):
            raise ValueError('"gspo" has no default bounds; expected ratio_low and ratio_high')
        low, high = self.bounds
        if not low < high:
            raise ValueError(
                f"the ratio's bounds are {low:g} and {high:g}; expected the lower one below the "
                "upper one"
            )
        return self


class Optimization(Wire):
    """An optimizer step of AdamW. `max_grad_norm` 0: the gradient is not clipped. Weight decay is
    on matrices only."""

    learning_rate: float = Field(ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=0.0, ge=0)


class ForwardBackwardRequest(Fenced):
    """`POST /forward_backward`: operation `step` of the job, which must be the last applied one
    plus 1 (else 409), adds the gradient of the examples' loss to the next optimizer step's. An
    example's advantages are the tokens' weights or advantages."""

    step: int = Field(ge=1)
    examples: tuple[Example, ...] = Field(min_length=1)
    loss: TokenLoss


class ForwardBackwardResult(Wire):
    """The result of operation `step`: the sum over the examples' sampled tokens, and their
    log-probs `[N]` at temperature 1, one example after the other, in nats."""

    step: int
    loss: float
    logprobs: Logprobs
    train_s: float


class OptimStepRequest(Fenced):
    """`POST /optim_step`: operation `step` of the job, which must be the last applied one plus 1
    (else 409), changes the weights by the gradient since the last optimizer step."""

    step: int = Field(ge=1)
    optimization: Optimization


class OptimStepResult(Wire):
    """The result of operation `step`. `grad_norm` is before clipping; `num_calls` counts the
    `/forward_backward` operations in the gradient."""

    step: int
    grad_norm: float
    num_calls: int
    train_s: float


class StepResult(Wire):
    """The result of a step. `loss` and `metrics` are over the whole step's valid tokens, all ranks
    and micro-batches.

    `num_updates` counts optimizer steps. `skipped`: some loss or gradient was not finite, and the
    step changed no weight. `logprobs` and `entropies` `[N]` are of the sampled tokens of all
    examples, one example after the other, at the sampling temperature and in nats: log-probs by the
    weights before the step, entropies by the weights that the token was trained on last; empty if
    they are no longer known.
    """

    step: int
    num_updates: int = 1
    skipped: bool = False
    loss: float
    grad_norm: float
    learning_rate: float
    num_examples: int
    num_tokens: int
    train_s: float
    metrics: dict[str, float] = {}
    logprobs: Logprobs = Logprobs()
    entropies: Logprobs = Logprobs()


class TrainedTokens(Wire):
    """The trainer's log-probs and entropies for the tokens of a step's rollouts, as stored in the
    run folder: axes `[P]` prompts, `[P][G]` rollouts, `[P][G][T]` tokens of a rollout's own row.
    NaN for a token that was not trained on; empty for such a row. `logprobs` and `entropies` are as
    in `StepResult`."""

    step: int
    logprobs: tuple[tuple[Logprobs, ...], ...]
    entropies: tuple[tuple[Logprobs, ...], ...]


class CheckpointRequest(Fenced):
    """`POST /checkpoints`: write the weights of `step` as a Hugging Face checkpoint into the job's
    run folder. Old checkpoints are removed then, except the checkpoints of the steps `keep`."""

    step: int = Field(ge=0)
    keep: tuple[int, ...] = ()


class Checkpoint(Wire):
    """A complete checkpoint. Plain `transformers` loads it from `path`, and training can resume
    from it."""

    step: int
    path: str
    size_bytes: int


class CheckpointList(Listing[Checkpoint]):
    checkpoints: tuple[Checkpoint, ...]


class CheckpointFile(Wire):
    """A file of a checkpoint: its `name` is the path below the checkpoint's folder, and `crc32`
    zlib's checksum of its bytes. Training resumes from the files below `trainer/`; plain
    `transformers` loads the others."""

    name: str
    size_bytes: int
    crc32: int


class CheckpointFiles(Listing[CheckpointFile]):
    """The files of the checkpoint of `step`, by name."""

    step: int
    files: tuple[CheckpointFile, ...]


SavedKind = Literal["checkpoint", "snapshot", "export"]
"""The kinds of saved weights: a checkpoint, weights for samplers, or a checkpoint for download."""


class ProgramOperation(Wire):
    """One operation: its kind and arguments, and the digest of the request's body; a "refused" one
    does nothing, because its request could not be read. `name` is the name of the saved weights;
    "": they have none. `num_targets` has for each datum the number of targets of each of its
    tokens, which is the number of consecutive examples of the datum; 0: one target, without an
    axis; empty: all have 0. `loss_name` is the program's name of the loss, where `loss` is computed
    in its place. `ttl_s` is for how many seconds the saved weights are kept; None: without
    limit."""

    kind: Literal[
        "forward",
        "forward_backward",
        "optim_step",
        "checkpoint",
        "snapshot",
        "export",
        "unload",
        "refused",
    ]
    digest: str
    examples: tuple[Example, ...] = ()
    num_targets: tuple[int, ...] = ()
    loss: TokenLoss | None = None
    loss_name: str = ""
    optimization: Optimization | None = None
    name: str = ""
    ttl_s: float | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether the trainer counts the operation: it changes the gradient or the weights."""
        return self.kind in ("forward_backward", "optim_step")

    @property
    def saves(self) -> SavedKind | None:
        """The kind of weights that the operation saves; None: it saves none."""
        return self.kind if self.kind in ("checkpoint", "snapshot", "export") else None


class OperationOutcome(Wire):
    """The outcome of an operation. `error` says why it failed, for errors that the program can fix.
    `step` is the trainer's last operation at its end, and so the weights' version. `path` and
    `size_bytes` belong to a checkpoint. `adapter` belongs to a snapshot, in the run folder; None:
    the model has no adapter that samplers support, and only its newest snapshot can be sampled."""

    step: int = 0
    error: str | None = None
    loss: float = 0.0
    logprobs: Logprobs = Logprobs()
    grad_norm: float = 0.0
    path: str = ""
    size_bytes: int = 0
    adapter: AdapterWeights | None = None


class LogStart(Wire):
    """The beginning of a log of operations: operations before `number` are final, because every
    checkpoint from which the trainer may resume contains them. The trainer counted `done` of
    them."""

    number: int = 1
    done: int = 0


class SavedWeights(Wire):
    """Weights that operation `number` saved: of version `step`, in the folder `path` or, of a
    snapshot, as an `adapter` if there is one. Times are Unix seconds."""

    number: int
    kind: SavedKind
    name: str
    step: int
    made_at: float
    expires_at: float | None = None
    size_bytes: int = 0
    path: str = ""
    adapter: AdapterWeights | None = None


class SamplingSession(Wire):
    """The weights that a session samples by: the snapshot of version `step`, by its `adapter` if it
    has one; or the base model (`own_weights`). `of_path` is the path by which it was opened."""

    step: int = 0
    adapter: AdapterWeights | None = None
    own_weights: bool = False
    of_path: str | None = None


class SampleOrder(Wire):
    """A program's order of samples in a session. `prompt_logprobs` is the number of the prompt's
    last tokens whose log-probs are requested; 0: all; None: none. `top_prompt_logprobs` and
    `top_logprobs` are as in `GenerateRequest`."""

    session: SamplingSession
    prompt_token_ids: TokenIds
    sampling: Sampling
    prompt_logprobs: int | None = None
    top_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)


class DeliveredSamples(Wire):
    """The samples of an order, or the error."""

    group: RolloutGroup | None = None
    error: str | None = None
