"""A step's batch, the examples that are made of it, and what the trainer does with them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from shared.job import Job
from shared.packed import Logprobs, Mask, TokenIds
from shared.wire.base import Fenced, Fencing, JobId, Listing, Orchestrator, Wire
from shared.wire.rewards import Score
from shared.wire.rollouts import Prompt, RolloutGroup, Span


class Batch(Wire):
    """A sampled and scored step, as stored in the run folder: axes `[P]` prompts, `[P][G]` rollouts
    and scores.

    `version` is the oldest weight version that sampled it. `dropped` `[D][G]` are the scores of
    groups without signal in whose place others were sampled, of the prompts with the indices
    `dropped_prompts` `[D]`, in `dropped_tokens` tokens. `graded` False: too many rewards were
    missing, so it was not trained on and will be graded again. With the job this is all a replay of
    the step needs. `schema_version` is of this very class; older ones are read as they are.
    """

    step: int
    version: int
    prompts: tuple[Prompt, ...]
    groups: tuple[RolloutGroup, ...]
    scores: tuple[tuple[Score, ...], ...]
    dropped: tuple[tuple[Score, ...], ...] = ()
    dropped_prompts: tuple[int, ...] = ()
    dropped_tokens: int = 0
    graded: bool = True
    schema_version: int = 2


class Example(Wire):
    """One completion with its advantage, as the trainer takes it.

    `token_ids`, `sampled`, `spans`, `kept_ids` and `kept_counts` are those of `Rollout`;
    `old_logprobs` `[T]` are the sampler's `logprobs`, in nats, each of the weights that sampled the
    token; empty: unknown, taken to be the trainer's own. `advantages` `[T]` are per token, in place
    of the one `advantage`; empty: that one. `spans` empty: no job's weights, as far as is known.
    """

    prompt_token_ids: TokenIds
    token_ids: TokenIds
    old_logprobs: Logprobs = Logprobs()
    advantage: float
    advantages: Logprobs = Logprobs()
    spans: tuple[Span, ...] = ()
    sampled: Mask = Mask()
    kept_ids: TokenIds = TokenIds()
    kept_counts: TokenIds = TokenIds()


class StepTotals(Wire):
    """A batch as it was sampled, groups without signal included: what losses are divided by.
    `num_tokens` counts sampled tokens."""

    num_sequences: int = Field(ge=0)
    num_tokens: int = Field(ge=0)


class TrainerJob(Fenced):
    """`PUT /job`: load this job, from its newest checkpoint in the run folder or else at its start.
    The same job again changes nothing but the fence; another one replaces it. `orchestrator` is
    whose job it is: the trainer takes it from the request's header."""

    job: Job
    orchestrator: Orchestrator | None = None


class TrainerState(Fencing):
    """`GET /state`: `step` is the last applied one; the weights' version is the same number. None:
    no job yet.

    `num_trainable` counts the parameters that change (fewer under LoRA). `skipped_steps` counts
    steps that changed no weight, because a loss or gradient was not finite. `resumed_step` is the
    checkpoint that the job went on from, and `damaged` says which newer ones could not be used.
    `restarts` counts how often the ranks came back after a failure, the last of which is
    `last_failure`. `boot_id` names this life of the ranks. `doing` says what takes long just now,
    where that is not what it was asked for. `gpu` is the UUID of the one that rank 0 computes on;
    a sampler on the same one reads its memory if it has the same `memory_space`
    (shared/meeting.py). `taken` says why who asks gets nothing: it has another orchestrator's job.
    """

    job_id: JobId | None
    step: int
    num_ranks: int
    dtype: str
    device: str
    num_parameters: int
    num_trainable: int = 0
    skipped_steps: int = 0
    resumed_step: int | None = None
    damaged: tuple[str, ...] = ()
    restarts: int = 0
    last_failure: str | None = None
    boot_id: str = ""
    doing: str | None = None
    gpu: str | None = None
    memory_space: str | None = None
    taken: str | None = None


class ReleaseRequest(Fenced):
    """`POST /release`: the job has left the trainer, which another orchestrator may take then. It
    stays loaded until another one is."""


class Released(Wire):
    """The job that has left the trainer."""

    job_id: JobId


class TrainStepRequest(Fenced):
    """`POST /train_step`: step `step` of the job, which must be the last applied one plus 1 (else
    409).

    No examples (no group had any signal) is a step too: it changes no weight. `totals` None: those
    of `examples`.
    """

    step: int = Field(ge=1)
    examples: tuple[Example, ...]
    totals: StepTotals | None = None


class StepResult(Wire):
    """What a step did. `loss` and `metrics` are over the whole step's valid tokens, all ranks and
    micro-batches.

    `num_updates` counts optimizer steps. `skipped`: some loss or gradient was not finite, and the
    step changed no weight.
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


class CheckpointRequest(Fenced):
    """`POST /checkpoints`: write the weights of `step` as a Hugging Face checkpoint into the job's
    run folder. Old ones go then, but not those of the steps `keep`."""

    step: int = Field(ge=0)
    keep: tuple[int, ...] = ()


class Checkpoint(Wire):
    """A complete checkpoint that plain `transformers` loads from `path`, and from which training
    can go on."""

    step: int
    path: str
    size_bytes: int


class CheckpointList(Listing[Checkpoint]):
    checkpoints: tuple[Checkpoint, ...]

    def listed(self) -> Sequence[Checkpoint]:
        return self.checkpoints


class CheckpointFile(Wire):
    """A file of a checkpoint: its `name` is the path below the checkpoint's folder, and `crc32`
    zlib's checksum of its bytes. Those below `trainer/` are what training goes on from; the others
    are what plain `transformers` loads."""

    name: str
    size_bytes: int
    crc32: int


class CheckpointFiles(Listing[CheckpointFile]):
    """The files of the checkpoint of `step`, by name."""

    step: int
    files: tuple[CheckpointFile, ...]

    def listed(self) -> Sequence[CheckpointFile]:
        return self.files
