"""The jobs API: bodies that contain the job itself, such as a submission and a job's record; its
stored rollouts; and the report of a job of 0 steps, which compares models on held-out problems. And
the plan of a job's probable needs (`POST /v1/jobs/plan`, `hone plan`, part of a dry run), which
`shared/plan/` computes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from shared.documented import Plain
from shared.job import Job, RewardSpec
from shared.job.job import MAX_REWARDS
from shared.wire.base import JobId, Listing, Message, Wire
from shared.wire.jobs import JobSummary
from shared.wire.packed import Logprobs, Mask
from shared.wire.rewards import Part
from shared.wire.rollouts import FinishReason

PlacementKind = Literal["split", "turns", "shared", "cpu"]


class PromptLengths(Wire):
    """The tokens of the `longest` of `num` prompts of a job, None if they were not counted, for the
    reason `why_not`. `is_all`: the job has no other prompts."""

    longest: int | None = None
    num: int = 0
    is_all: bool = False
    why_not: str = ""


class TrainerMemory(Wire):
    """Peak memory of a GPU of the trainer, in GiB: `peak_gib` is weights, reference, gradients,
    optimizer and overhead, and the largest sum of activations, logits, update and buffers that
    exist at once. `host_gib` is each rank's part in the host's memory: offloaded states, or copies
    before several updates."""

    weights_gib: float
    reference_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    update_gib: float
    buffers_gib: float
    overhead_gib: float
    peak_gib: float
    host_gib: float


class SamplerMemory(Wire):
    """Memory of a GPU of the sampler, in GiB. `cache_gib` holds the `sequences` that are sampled at
    once, at their longest; a smaller cache samples fewer at once. `least_cache_gib` holds one
    sequence of `max_model_len` and is required."""

    weights_gib: float
    cache_gib: float
    least_cache_gib: float
    overhead_gib: float
    cache_bytes_per_token: int
    sequences: int

    @property
    def least_gib(self) -> float:
        return self.weights_gib + self.overhead_gib + self.least_cache_gib


class StepTime(Wire):
    """Seconds of a step, from the GPUs' data sheets. `step_s` is the sum, or the longer of sampling
    and training if they run at the same time."""

    sample_s: float
    train_s: float
    step_s: float


class Cost(Wire):
    """The job's cost, in `currency`: `total` for all steps, None while their number is not
    known."""

    currency: str
    per_hour: float
    per_step: float
    total: float | None


class Placement(Wire):
    """How trainer and sampler use the GPUs. "split": each has its own. "turns": both use the same
    ones, one after the other (HONE_COLOCATE). "shared": both use the same ones at once. "cpu":
    none. `fits` is False for the reasons in `why_not`. `recomputes`: with gradient checkpointing.
    `settings` are the settings, by name, that select it."""

    kind: PlacementKind
    trainer_ranks: int
    num_samplers: int
    tensor_parallel: int
    fits: bool
    why_not: tuple[str, ...] = ()
    trainer_room_gib: float
    sampler_room_gib: float
    trainer: TrainerMemory
    recomputes: bool = False
    sampler: SamplerMemory
    time: StepTime | None = None
    settings: dict[str, str] = {}


class Plan(Wire):
    """A job's needs on `gpus`, from arithmetic alone. `placement` is the fastest placement that
    fits; if none fits, the placement that lacks the least memory. `others` are the placements that
    were not chosen. `notes` say what is unknown or assumed."""

    model: str
    num_parameters: int
    num_trainable: int
    learning_rate: float
    dtype: str
    gpus: str
    fits: bool
    placement: Placement
    others: tuple[Placement, ...] = ()
    steps: int
    prompt_tokens: int
    completion_tokens: int
    cost: Cost | None = None
    notes: tuple[str, ...] = ()


class SubmitRequest(Wire):
    """`POST /v1/jobs`. `job` is a whole job file's content; files it names must be readable by the
    orchestrator."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "job": {
                        "name": "demo",
                        "model": "Qwen/Qwen2.5-0.5B-Instruct",
                        "steps": 160,
                        "data": {"train": "owner/problems"},
                        "rewards": [
                            {
                                "grader": "python_value",
                                "params": {"target": "target", "numbers": "numbers"},
                            }
                        ],
                    }
                }
            ]
        }
    )

    job: Job


class JobRecord(JobSummary):
    """The whole record of a job. `run_dir` holds everything it wrote. `data` identifies the content
    of its data, by "train" and "eval": a file's digest, or a dataset's commit on the Hub. The job
    continues only with that content. `summary` is its result, once it has succeeded; of a job of 0
    steps its `evaluation` is an EvaluationReport. `warnings` were found at its submission: allowed
    values that are probably mistakes."""

    run_dir: str
    summary: dict[str, Any] | None = None
    data: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    job: Job


class PreviewedPrompt(Wire):
    """A prompt as a job would send it: `index` is its row, and `content` the prompt made of it.
    `text` is the model's input, chat template included, in `num_tokens` tokens; None if its
    tokenizer is not known here. `answers` are the answers that a supervised job learns, the
    preferred one first."""

    index: int
    content: str | tuple[Message, ...]
    text: str | None = None
    num_tokens: int | None = None
    answers: tuple[str | Message, ...] = ()


class DryRun(Wire):
    """`POST /v1/jobs/dry_run`: the job as it would run, and its first prompts. `num_train` is None
    for a stream; `data` are the versions as in a job's record. `not_counted` says why prompts have
    no `num_tokens`, and `not_planned` why there is no `plan`. `trial` has the rewards' values for
    empty completions and reference answers, and what is probably wrong with the rewards; empty if
    the reward service did not answer in time. `warnings` are as in a job's record."""

    job: Job
    columns: tuple[str, ...]
    num_train: int | None
    num_held_out: int
    data: dict[str, str]
    prompts: tuple[PreviewedPrompt, ...]
    not_counted: str = ""
    plan: Plan | None = None
    not_planned: str = ""
    trial: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class TokenColumns(Wire):
    """The tokens of a completion, `[T]` each: `texts`, the sampler's `logprobs` in nats (empty if
    not measured), `sampled` as in `Rollout`, and the `teacher_logprobs` where there are any, None
    for a token that was not sampled. `trainer_logprobs` and `entropies` are as in `StepResult`,
    None for a token that was not trained on; empty: not known. `num_left_out` counts the tokens
    after them that a long completion has."""

    texts: tuple[str, ...]
    logprobs: Logprobs = Logprobs()
    sampled: Mask = Mask()
    teacher_logprobs: tuple[float | None, ...] = ()
    trainer_logprobs: tuple[float | None, ...] = ()
    entropies: tuple[float | None, ...] = ()
    num_left_out: int = 0


class RolloutDetail(Wire):
    """Details of a stored rollout: the `messages` after the prompt of a conversation, `error` if it
    went wrong, its environment's `info`, the row of its problem, and its tokens. None: `no_tokens`
    says why they cannot be shown."""

    messages: tuple[Message, ...] = ()
    error: str | None = None
    info: dict[str, Plain] = {}
    row: dict[str, Plain] = {}
    num_tokens: int
    tokens: TokenColumns | None = None
    no_tokens: str = ""


class GradedRollout(Wire):
    """A stored rollout, for people to read. With credit by turns, `turn_advantages` are the turns'
    (None: not trained on), and `advantage` is their mean. `forked` has for each of its branches why
    the history was rewritten. `detail` is None unless it was requested."""

    prompt_index: int
    prompt: str | tuple[Message, ...]
    completion: str
    finish_reason: FinishReason
    versions: tuple[int, ...]
    reward: float | None
    parts: dict[str, Part]
    advantage: float | None
    turn_advantages: tuple[float | None, ...] = ()
    forked: tuple[str, ...] = ()
    detail: RolloutDetail | None = None


class GroupSummary(Wire):
    """A prompt's group of a step, in lists `[G]`. Its rollouts are the step's rollouts from
    position `first` on. `spread` is the standard deviation of its rewards, None for fewer than two.
    `prompt` is the beginning of the prompt's last message; `num_tokens` counts sampled tokens, and
    `versions` are the weights that sampled it. `found`: the positions, in the group, of the
    rollouts that match the search."""

    prompt_index: int
    prompt: str
    first: int
    rewards: tuple[float | None, ...]
    advantages: tuple[float | None, ...]
    finish_reasons: tuple[FinishReason, ...]
    num_tokens: tuple[int, ...]
    versions: tuple[int, ...] = ()
    spread: float | None = None
    replica: str = ""
    found: tuple[int, ...] = ()


class GroupList(Listing[GroupSummary]):
    """`GET /v1/jobs/{id}/rollouts/groups`: the groups of `step`. `steps` are the steps with stored
    rollouts, and `dropped` how many groups without signal were replaced."""

    step: int
    groups: tuple[GroupSummary, ...]
    steps: tuple[int, ...]
    dropped: int = 0


class ProblemStep(Wire):
    """A problem's group in one step."""

    step: int
    group: GroupSummary


class ProblemHistory(Listing[ProblemStep]):
    """`GET /v1/jobs/{id}/problems/{index}`: the groups of one problem, newest step first. Pass
    `next_before` as `?before=` for earlier steps; None: there are none."""

    prompt_index: int
    steps: tuple[ProblemStep, ...]
    next_before: int | None = None


class RolloutList(Listing[GradedRollout]):
    """A page of a step's graded rollouts, or of the stored completions of the evaluation after it,
    all of one prompt in a row. `next_after` goes back as `?after=` for the next page; None at the
    end. In a run folder, only the first held-out completion of a problem has the prompt."""

    step: int
    rollouts: tuple[GradedRollout, ...]
    next_after: int | None = None


class RegradeRequest(Wire):
    """`POST /v1/jobs/{id}/regrade`: grades the stored rollouts of `first_step` to `last_step`, both
    included, by other `rewards`. Nothing is written to the run. `num_examples` bounds the rollouts
    shown."""

    first_step: int = Field(ge=1)
    last_step: int = Field(ge=1)
    rewards: tuple[RewardSpec, ...] = Field(min_length=1, max_length=MAX_REWARDS)
    num_examples: int = Field(default=10, ge=0, le=1000)


class RegradedStep(Wire):
    """Old and new mean reward of a step (None: no reward at all), how many rollouts have no reward,
    how many get another reward, and which advantages change their sign, by position in `[P*G]`. A
    missing advantage has the sign 0."""

    step: int
    num_rollouts: int
    old_reward: float | None
    new_reward: float | None
    old_missing: int
    new_missing: int
    num_changed: int
    flipped: tuple[int, ...]


class RegradedRollout(Wire):
    """A rollout's old grading, and its new one."""

    step: int
    position: int
    old: GradedRollout
    new: GradedRollout


class RegradeReport(Wire):
    """The differences of a regrade. `examples` are the rollouts whose reward differs most, largest
    first."""

    steps: tuple[RegradedStep, ...]
    examples: tuple[RegradedRollout, ...]


class Estimate(Wire):
    """The mean over `num_problems` problems, and its 95 % confidence interval: None for one problem
    or equal values.

    `p_value` is for a difference on few problems, by an exact permutation test: None if more than
    16 problems differ, or if the estimate is not of a difference."""

    mean: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    num_problems: int


class ModelScores(Wire):
    """A model's scores on a held-out set, by metric: reward, pass@k, completions/mean_length
    (tokens), completions/clipped_ratio (the share that `max_tokens` cut off). `missing_rewards` and
    `errored_rollouts` are shares of its completions, which are left out of the other metrics.

    `differences` are its metrics minus the first model's, over the same problems; empty for the
    first model."""

    name: str
    metrics: dict[str, Estimate]
    differences: dict[str, Estimate] = {}
    missing_rewards: float
    errored_rollouts: float


class SetReport(Wire):
    """The models on one held-out set. `data.eval` is called ""; messages call the set `source`."""

    name: str
    source: str
    num_problems: int
    num_samples: int
    models: tuple[ModelScores, ...]


class EvaluationReport(Wire):
    """The result of the job `id`, which evaluated models: the `evaluation` in its summary. `dtype`
    is the samplers' dtype; "": it is not known."""

    id: JobId
    temperature: float
    seed: int
    dtype: str = ""
    sets: tuple[SetReport, ...]
