"""The job: its own keys, and its sections. And the names of keys in other trainers, TRL and OpenAI
above all: the error for such a name tells Hone's key."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, cast

from pydantic import Field, model_validator

from shared.documented import Plain
from shared.job import checks
from shared.job.data import DataSpec
from shared.job.learning import (
    LEARNING_RATE,
    LORA_LEARNING_RATE,
    MAX_SERVED_RANK,
    SFT_FACTOR,
    AdvantageSpec,
    CorrectionSpec,
    LoraSpec,
    TeacherSpec,
    TrainingSpec,
    WarmupSpec,
)
from shared.job.running import (
    CheckpointSpec,
    EvaluatedModel,
    EvaluationSpec,
    MemorySpec,
    RolloutsSpec,
    StopSpec,
    SyncChoice,
    TrackerName,
    WandbSpec,
)
from shared.job.sampling import DifficultySpec, EnvironmentSpec, RewardSpec, SamplingSpec
from shared.job.section import JOB_ID, MAX_ENTRIES, MAX_NAME, MAX_TEXT, Section, Text

MAX_REWARDS = 64

OTHER_NAMES = {
    # how much is sampled
    "n": "sampling.group_size",
    "num_generations": "sampling.group_size",
    "num_samples": "sampling.group_size",
    "compute_multiplier": "sampling.group_size",
    "batch_size": "sampling.prompts_per_step",
    "train_batch_size": "sampling.prompts_per_step",
    "generation_batch_size": "sampling.prompts_per_step",
    "per_device_train_batch_size": "sampling.prompts_per_step",
    "gradient_accumulation_steps": "memory.micro_batch_tokens",
    "steps_per_generation": "training.minibatches",
    "max_completion_length": "sampling.max_tokens",
    "max_completion_tokens": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "sampling.overlong_prompts",
    "max_length": "max_model_len",
    "max_seq_length": "max_model_len",
    "chat_template_kwargs": "sampling.template_args",
    # how it is trained
    "lr": "training.learning_rate",
    "learning_rate_multiplier": "training.learning_rate",
    "lr_scheduler_type": "training.schedule",
    "warmup_ratio": "training.warmup_steps",
    "num_warmup_steps": "training.warmup_steps",
    "max_steps": "steps",
    "total_steps": "steps",
    "num_train_epochs": "data.epochs",
    "n_epochs": "data.epochs",
    "num_iterations": "training.epochs",
    "num_mini_batches": "training.minibatches",
    "kl_coef": "training.beta",
    "epsilon": "training.clip_low",
    "epsilon_low": "training.clip_low",
    "epsilon_high": "training.clip_high",
    "delta": "training.dual_clip",
    "loss_type": "training.loss",
    "importance_sampling_level": "training.importance",
    "scale_rewards": "advantages.std",
    "mask_truncated_completions": "advantages.mask_truncated",
    "bf16": "training.dtype",
    "fp16": "training.dtype",
    "torch_dtype": "training.dtype",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "attn_implementation": "memory.attention",
    # what is trained on, and what is kept
    "model_name_or_path": "model",
    "base_model": "model",
    "training_file": "data.train",
    "train_dataset": "data.train",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_config": "data.config",
    "validation_file": "data.eval",
    "eval_dataset": "data.eval",
    "reward_funcs": "rewards",
    "reward_weights": "rewards.0.weight",
    "eval_steps": "evaluation.every",
    "eval_interval": "evaluation.every",
    "eval_samples": "evaluation.samples",
    "save_steps": "checkpoints.every",
    "save_total_limit": "checkpoints.keep_last",
    "logging_steps": "rollouts.keep_last",
    "run_name": "name",
    "suffix": "name",
    "report_to": "wandb.project",
}

NOTES = {
    "compute_multiplier": "how many completions a prompt has",
    "gradient_accumulation_steps": "a step is cut into micro-batches by their tokens",
    "per_device_train_batch_size": "prompts, whatever the number of devices",
    "batch_size": "prompts; each has sampling.group_size completions",
    "max_prompt_length": "the handling of prompts that are too long; max_model_len is for both",
    "learning_rate_multiplier": "the rate itself",
    "warmup_ratio": "a number of steps",
    "logging_steps": "every step is logged; that says how many steps keep their rollouts",
    "reward_weights": "each of the [[rewards]] has its own",
    "epsilon": "and training.clip_high",
}
"""Notes on some of these names."""


OTHER_TRAINERS = {
    **dict.fromkeys(("actor_rollout_ref", "algorithm", "critic", "custom_reward_function"), "verl"),
    **dict.fromkeys(("actor", "ds"), "OpenRLHF"),
    **dict.fromkeys(("orchestrator", "trainer", "inference"), "prime-rl or verl"),
}
"""Sections of other trainers' configurations that a job does not have, and the trainers' names."""


MAY_CHANGE = frozenset(
    {
        "name",
        "steps",
        "priority",
        "weight_sync",
        "memory",
        "evaluation",
        "checkpoints",
        "stop",
        "rollouts",
        "wandb",
        "trackers",
        "metadata",
        "request",
    }
)
"""Keys of a job that do not change what is learned. A job may continue with other values than it
began with."""

RESUMED_WITH = MAY_CHANGE - {"name"}
"""Keys that `hone resume JOB --set` may change."""


class Job(Section):
    """A job: what to train, and how."""

    other_names: ClassVar[dict[str, str]] = OTHER_NAMES
    name_notes: ClassVar[dict[str, str]] = NOTES
    name_owners: ClassVar[dict[str, str]] = OTHER_TRAINERS

    name: str = Field(pattern=JOB_ID, max_length=MAX_NAME)
    """Begins the job's id and its run folder; `runs/<name>` points at the newest run of the name.
    Lower-case letters, digits, "-" and "_", at most 40."""

    model: str = Field(min_length=1, max_length=MAX_TEXT)
    """The model that training begins with: a folder in Hugging Face format that trainer and sampler
    both see, or a Hugging Face id. A job of 0 steps evaluates it, unless `evaluation.models` names
    others."""

    model_revision: Text | None = None
    """Commit, tag or branch of a Hugging Face model. None: the newest one. Name a commit if the run
    must be repeatable."""

    steps: int = Field(default=0, ge=0, le=10**9)
    """Batches to train on, up to 1,000,000,000. Each is one optimizer step unless `training.epochs`
    or `training.minibatches` make more of it. 0: as many as `data.epochs` takes; without
    `data.epochs` the job trains nothing and only evaluates, and `steps = 0` must be written out."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the order of prompts, sampling, the split into minibatches and dropout. Below 2^63."""

    priority: int = Field(default=0, ge=-100, le=100)
    """The queued job with the highest priority is taken first; of equal ones, the one submitted
    first. From -100 to 100. A running job is never stopped for another one."""

    max_model_len: int | None = Field(default=None, gt=0)
    """Most tokens of prompt and completion together. None: what the model was made for. A lower
    bound lets the sampler's cache hold more sequences. A model with RoPE of type "longrope" or
    "dynamic" needs a bound of at most its pretraining length: beyond it the trainer's log-probs
    would depend on which sequences share a micro-batch."""

    max_staleness: int = Field(default=0, ge=0, le=64)
    """Most steps by which the weights that sample a batch may be older than the weights that it
    trains. 0: sampling and training take turns. 1 or more: sampling runs while the trainer
    trains."""

    drain_before_sync: bool = False
    """Whether a sampler finishes its current groups before it takes new weights, and begins no
    others meanwhile. False: it stops between two tokens and continues with the new weights, so
    several versions may sample one completion; `max_staleness` bounds how many. Without staleness
    no group is under way at a sync."""

    weight_sync: SyncChoice = "auto"
    """How weights reach the samplers. "shm": shared memory of one host. "disk": a folder under
    `HONE_RUNS_DIR` that the hosts share. "http": from the trainer over the network, with nothing
    shared. "delta": likewise, and after the first time only the elements that changed. "lora": only
    the adapter of a job with `[lora]`, loaded beside the unchanged base model; from shared memory,
    or over the network if the sampler does not share it. "reload": as "disk", with the engine's
    memory freed while the weights are exchanged (vLLM's sleep mode, which a CPU does not have).
    "restart": as "disk", by a new engine, which takes as long as a start; the other methods are
    tested against it. "nccl": from the trainer's GPU to the samplers' GPUs (between CPUs by gloo).
    "ipc": the sampler reads the trainer's memory, on the GPU that both use. These two exclude LoRA
    and ZeRO-3. They need `HONE_TRAINER_URL` at the sampler as "http" does, because a version that
    did not arrive goes by "http".

    "auto" tries "lora" for a job with `[lora]`, "ipc" or "nccl" where both sides compute on GPUs
    that allow it, else "shm", then "disk" with one sampler, or several that are all on the
    orchestrator's host. If a sampler sees neither folder, it takes "delta" up to a learning rate of
    1e-5 and "http" above: there most elements change at each step. The job does not try a method
    again that failed at one sampler. An event of the job says the choice and its reason."""

    sync_every: int = Field(default=1, ge=1, le=65)
    """Steps between two syncs, from 1 to `max_staleness` + 1. 1: after each step. More steps save
    time where a sync is long, and make samples older. An evaluation and the last step always
    sync."""

    data: DataSpec = DataSpec()
    """The problems."""

    sampling: SamplingSpec = SamplingSpec()
    """How completions are sampled."""

    environment: EnvironmentSpec | None = None
    """The environment of completions. None: a completion is one answer."""

    rewards: tuple[RewardSpec, ...] = Field(max_length=MAX_REWARDS)
    """The rewards of completions: at least one, each a `[[rewards]]` table. A rollout's reward is
    their weighted sum. Left out with `[environment]`: the environment's own reward, the grader
    "environment". Left out, or [], with `[teacher]`: the teacher alone. Left out with
    `training.objective` "sft" or "dpo": there is nothing to reward."""

    teacher: TeacherSpec | None = None
    """A model whose log-probs reward each token. None: no teacher."""

    difficulty: DifficultySpec = DifficultySpec()
    """Which problems are skipped because they teach nothing."""

    advantages: AdvantageSpec = AdvantageSpec()
    """How rewards become advantages."""

    training: TrainingSpec = TrainingSpec()
    """The update."""

    warmup: WarmupSpec = WarmupSpec()
    """Supervised steps before the others."""

    correction: CorrectionSpec = CorrectionSpec()
    """How the loss corrects for different log-probs of sampler and trainer."""

    lora: LoraSpec | None = None
    """Low-rank adapters. None: all weights are trained."""

    memory: MemorySpec = MemorySpec()
    """How an update fits into memory."""

    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out accuracy."""

    checkpoints: CheckpointSpec = CheckpointSpec()
    """When checkpoints are written, and which are kept."""

    stop: StopSpec = StopSpec()
    """What ends training early."""

    rollouts: RolloutsSpec = RolloutsSpec()
    """Which stored rollouts are kept."""

    wandb: WandbSpec | None = None
    """Weights & Biases. None: it gets no metrics."""

    trackers: tuple[TrackerName, ...] = Field(default=(), max_length=3)
    """Trackers that have the metrics as files too: "tensorboard" and "mlflow" in the run folder,
    "trackio" where its dashboard looks (the orchestrator's TRACKIO_DIR). Their packages are the
    extra `trackers`. Empty: none."""

    metadata: dict[
        Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]
    ] = Field(default={}, max_length=16)
    """Notes of your own, shown with the job: up to 16 names of up to 64 characters, each with a
    text of up to 512. They have no effect."""

    request: dict[str, Plain] = Field(default={}, max_length=MAX_ENTRIES)
    """The request of OpenAI's API that made the job; only that API shows it. Empty: the job was
    submitted as a job."""

    @model_validator(mode="before")
    @classmethod
    def _own_rewards(cls, document: Any) -> Any:
        if not isinstance(document, dict) or "rewards" in document:
            return cast(Any, document)
        given = cast(dict[str, Any], document)
        if given.get("environment") is not None:
            return {**given, "rewards": [{"grader": "environment"}]}
        needs_none = given.get("teacher") is not None or _objective(given) not in (None, "rl")
        return {**given, "rewards": []} if needs_none else given

    @model_validator(mode="after")
    def _sections_fit(self) -> Job:
        checks.check(self)
        return self

    @property
    def learning_rate(self) -> float:
        """The peak learning rate; the default if the job gives none."""
        if self.training.learning_rate is not None:
            return self.training.learning_rate
        return self._usual_rate * (SFT_FACTOR if self.training.objective == "sft" else 1)

    @property
    def warmup_learning_rate(self) -> float:
        """The learning rate of `[warmup]`; the default if the job gives none."""
        own = self.warmup.learning_rate
        return self._usual_rate * SFT_FACTOR if own is None else own

    @property
    def _usual_rate(self) -> float:
        return LEARNING_RATE if self.lora is None else LORA_LEARNING_RATE

    def is_supervised(self, step: int) -> bool:
        """Whether the step learns the data's answers, without sampling."""
        return self.trains_without_sampling or step <= self.warmup.steps

    @property
    def trains_without_sampling(self) -> bool:
        """Whether no training step samples: its examples come from the data, or from a program."""
        return self.training.objective != "rl"

    @property
    def temperature(self) -> float:
        """The temperature of the trainer's log-probs: the sampling one, and 1 for given answers."""
        return 1.0 if self.trains_without_sampling else self.sampling.temperature

    @property
    def completions_per_prompt(self) -> int:
        """The number of completions of a prompt that a step trains on."""
        given = {"sft": 1, "dpo": 2}
        return given.get(self.training.objective, self.sampling.group_size)

    @property
    def has_answers(self) -> bool:
        """Whether the job has supervised steps, so that each row needs an answer."""
        return self.trains and self.is_supervised(1) and not self.is_program

    @property
    def has_live_weights(self) -> bool:
        """Whether samplers serve the tensors of the trainer's model as they are in memory."""
        return self.lora is None and self.memory.zero_stage < 3

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out problems."""
        return self.data.eval is not None or bool(self.evaluation.sets)

    @property
    def is_pushed(self) -> bool:
        """Whether the job's groups are sampled and scored elsewhere."""
        return self.environment is not None and self.environment.kind == "pushed"

    @property
    def is_program(self) -> bool:
        """Whether a program requests each operation."""
        return self.training.objective == "program"

    @property
    def trains(self) -> bool:
        """Whether the job trains. A job of 0 steps only evaluates."""
        return self.steps > 0 or self.data.epochs is not None

    @property
    def evaluated_models(self) -> tuple[EvaluatedModel, ...]:
        """The models that a job of 0 steps evaluates, in order."""
        own = EvaluatedModel(model=self.model, revision=self.model_revision)
        return self.evaluation.models or (own,)

    def with_model(self, chosen: EvaluatedModel) -> Job:
        """Returns the job with another model."""
        return self.model_copy(update={"model": chosen.model, "model_revision": chosen.revision})

    @property
    def served_rank(self) -> int | None:
        """The rank of the adapters that samplers may get; None: they get whole weights."""
        if self.lora is None or self.weight_sync not in ("auto", "lora"):
            return None
        return self.lora.rank if self.lora.rank <= MAX_SERVED_RANK else None

    @property
    def shares_as(self) -> str | None:
        """A digest of the properties that jobs must have in common to share a trainer and its
        samplers: the base model, the shape of their adapters, and the engines' settings. None: the
        job needs a trainer of its own. Under ZeRO-3 no adapter is whole on a rank, and an
        offloaded optimizer is not swapped between jobs."""
        memory = self.memory
        if memory.zero_stage == 3 or memory.offload_optimizer:
            return None
        if not (self.trains and self.served_rank):
            return None
        alike = {
            "model": [self.model, self.model_revision, self.training.dtype, self.max_model_len],
            "lora": self.lora.model_dump() if self.lora else None,
            "memory": self.memory.model_dump(exclude={"micro_batch_tokens"}),
            "sampler": [self.needs_masks, self.sampling.keep_prefixes],
        }
        return hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def needs_masks(self) -> bool:
        """Whether the sampler must return the tokens that could have been sampled."""
        sampling = self.sampling
        truncates = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        if self.trains_without_sampling:  # completions of samplers are not trained on
            return False
        return truncates and self.correction.truncated_sampling == "refuse"


def _objective(document: dict[str, Any]) -> Any:
    training = document.get("training")
    return cast(dict[str, Any], training).get("objective") if isinstance(training, dict) else None


SHOWN_CHARACTERS = 60


def learned(job: Job) -> dict[str, Any]:
    """Returns the keys that change what is learned, the learning rate also if it is the default."""
    found = job.model_dump(mode="json", exclude=set(MAY_CHANGE))
    return found | {"training": found["training"] | {"learning_rate": job.learning_rate}}


def same_learning(one: Job, other: Job) -> bool:
    """Whether two jobs differ only in keys of MAY_CHANGE."""
    return learned(one) == learned(other)


def differences(old: Job, new: Job) -> list[str]:
    """Returns the differences in what the two learn, such as `training.epochs was 2 and is 3`."""
    return _differences(learned(old), learned(new), "")


def _differences(old: Any, new: Any, key: str) -> list[str]:
    before, after = _items(old), _items(new)
    if before is None or after is None or (isinstance(old, list) and len(before) != len(after)):
        return [] if old == new else [f"{key} was {_shown(old)} and is {_shown(new)}"]
    names = sorted(before.keys() | after.keys())
    return [
        found
        for name in names
        for found in _differences(
            before.get(name), after.get(name), f"{key}.{name}" if key else name
        )
    ]


def _items(value: Any) -> dict[str, Any] | None:
    """Returns a table's items, or a list's by position; None for a plain value."""
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    if isinstance(value, list):
        return {str(position): item for position, item in enumerate(cast(list[Any], value))}
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
