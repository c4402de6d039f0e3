"""Sections that do not change what is learned: `[memory]`, `[evaluation]`, `[checkpoints]`,
`[stop]`, `[rollouts]`, `[wandb]`. And the methods by which weights get from trainer to samplers,
with their differences.

Each method is a row here, a publisher in METHODS of services/trainer/publishing.py, a loader in
LOADERS of services/rollout/weights/loading.py, and the `method` of a reference in
shared/wire/rollouts.py. When `weight_sync` is "auto",
services/orchestrator/samplers/syncing.py says which methods are tried, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from shared.job.data import HeldOutSpec
from shared.job.sampling import MAX_TEMPERATURE
from shared.job.section import MAX_ENTRIES, Section, Text

MAX_MODELS = 16


class MemorySpec(Section):
    """How an update fits into memory. Nothing here changes its result, rounding apart."""

    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens in one forward and backward pass of a rank. Padding counts, and a shared prefix
    counts once. The trainer halves it when memory runs out. A longer sequence is a pass of
    its own."""

    chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at a time, for a part of the vocabulary, in float32."""

    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keeps only each layer's input and computes the layer again in the backward pass: about a
    third more time, and a fraction of the activation memory, which at 16,384 tokens and 7B
    parameters would be about 120 GB. "auto": in the steps that would not fit into memory without
    it, and in all steps after memory ran out."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is partitioned over the ranks (arXiv 1910.02054): 0 nothing, 1 optimizer state, 2 also
    gradients, 3 also weights. On one rank in float32, 0 takes about a quarter less memory than the
    others, because it has no second copy of the weights."""

    offload_optimizer: bool = False
    """Keeps master weights and optimizer state in host memory, and updates them there with torch's
    AdamW. Needs `zero_stage` 1, 2 or 3."""

    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """Computes a prefix that several sequences share once: a group's prompt, the few-shot part of
    all prompts, the turns that branches of a conversation share. "auto": if the model can, which is
    tried when it is loaded. "on" refuses a model that cannot. "off": shares nothing."""

    packing: Literal["auto", "on", "off"] = "auto"
    """Puts several sequences into one row instead of padding. "auto": if the model's attention
    keeps the sequences of a row apart at no cost. "on" refuses a model that cannot keep them apart.
    "off": one sequence per row, and nothing is shared unless `shared_prefix` is "on"."""

    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """The attention implementation, by its name in transformers. "auto": transformers' choice for
    the model, and "eager" where that choice would ignore a cap on attention's logits, as for Gemma
    2."""

    deepspeed: dict[Text, Any] = Field(default={}, max_length=MAX_ENTRIES)
    """Merged over the configuration given to DeepSpeed, key by key. Only keys about placement,
    communication and logging are allowed; others are refused."""

    def recomputing(self, is_on: bool) -> MemorySpec:
        """Returns these settings, with `gradient_checkpointing` decided if it is "auto"."""
        if self.gradient_checkpointing != "auto":
            return self
        return self.model_copy(update={"gradient_checkpointing": is_on})


class EvaluatedModel(Section):
    """A model that a job of 0 steps evaluates."""

    model: str = Field(min_length=1, max_length=4096)
    """The model: a folder in Hugging Face format that the samplers see, such as a checkpoint, or a
    Hugging Face id."""

    revision: str | None = Field(default=None, min_length=1, max_length=1000)
    """Commit, tag or branch of a Hugging Face model. None: the newest one."""

    name: str | None = Field(default=None, min_length=1, max_length=1000)
    """The model's name in the report. None: `model` itself."""

    @property
    def label(self) -> str:
        """The model's name in reports and messages."""
        return self.name or self.model


class EvaluationSpec(Section):
    """Held-out accuracy: the policy's scores on `data.eval` and on each of `sets`, before training,
    every `every` steps and after the last."""

    models: tuple[EvaluatedModel, ...] = Field(default=(), max_length=MAX_MODELS)
    """The models that a job of 0 steps compares, up to 16. Each later one is compared with the
    first. Empty: the job's `model` alone. A job that trains has none."""

    every: int = Field(default=50, ge=1)
    """Steps between two evaluations."""

    num_prompts: int | None = Field(default=None, ge=1)
    """How many problems, from the first row on. None: all of them."""

    samples: int = Field(default=1, ge=1, le=1024)
    """Completions per problem, from 1 to 1024. More than 1 needs a `temperature` above 0 to make a
    difference."""

    temperature: float = Field(default=0.0, ge=0, le=MAX_TEMPERATURE)
    """Divides the logits, up to 2. 0: greedy decoding, which gives the same answer each time."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens. None: `sampling.max_tokens`, as in training."""

    pass_reward: float | None = None
    """Least reward, without `shaping` rewards, with which a completion is right for `pass@k`. None:
    the full mark, which is the sum of the weights above 0, because graders give at most 1."""

    sets: dict[
        Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=40)], HeldOutSpec
    ] = Field(default={}, max_length=16)
    """Further held-out sets by name, up to 16, each an `[evaluation.sets.NAME]` table. Their
    metrics are called `eval/NAME/reward` and so on; the metrics of `data.eval`, `eval/reward`."""


class CheckpointSpec(Section):
    """Checkpoints: Hugging Face folders that training can also resume from."""

    every: int = Field(default=50, ge=0)
    """Steps between two checkpoints. The last step always has one; 0: only the last."""

    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept. With the default a job survives damage to the
    newest. An older one is kept, too, while it is the model of another job that has not ended."""

    keep_every: int = Field(default=0, ge=0)
    """Older checkpoints whose step is divisible by this are kept too. 0: none."""

    keep_best: Text | None = "reward"
    """The metric of evaluations by which the best checkpoint is kept, however old: "reward",
    "pass@1" and so on, for a named held-out set "<set>/reward". Only steps with both a checkpoint
    and an evaluation are compared, so `every` and `evaluation.every` are best the same; of equal
    steps the first is the best. None: no checkpoint is kept as the best."""


class StopSpec(Section):
    """Conditions that end training before its last step, whichever comes first. The job has then
    succeeded: it has a checkpoint, an evaluation, and the reason in its record."""

    target: float | None = None
    """Ends the job once an evaluation's `metric` is at least this. None: no evaluation does."""

    metric: Text = "reward"
    """Metric of `target`: "reward", "pass@1" and so on, "rewards/<name>/mean"; for a named held-out
    set, "<set>/reward" and the like."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Ends the job once so many completion tokens were sampled for training, with replaced groups,
    without evaluations: the metric `total/tokens`. The step under way is finished. None: no
    bound."""

    max_hours: float | None = Field(default=None, gt=0)
    """Ends the job once it has had the services for so many hours: the metric `total/hours`, with
    loading, evaluations and checkpoints, and without the queue and pauses. The step under way is
    finished. None: no bound."""

    max_cost: float | None = Field(default=None, gt=0)
    """Pauses the job once it has cost so much: the metric `total/cost`, which is `total/hours`
    times the price of an hour (HONE_PRICE_PER_HOUR), in its currency.
    The step under way is finished and has a checkpoint. The job pauses and does not end, so that a
    person can decide to spend more: `hone resume JOB --set stop.max_cost=...`. None: no bound."""


class RolloutsSpec(Section):
    """Stored rollouts: completions with their verdicts, a file for each step."""

    keep_last: int = Field(default=1000, ge=0)
    """Rollouts and held-out completions of at least this many newest steps are kept, and held-out
    completions of step 0; older ones can no longer be read or regraded. Rollouts that a restart
    from one of the newest `checkpoints.keep_last` checkpoints replays are always kept. 0: all. The
    default bounds a run's disk at a few GB."""


TrackerName = Literal["tensorboard", "mlflow", "trackio"]


class WandbSpec(Section):
    """Logs metrics to Weights & Biases as well. The key is the orchestrator's WANDB_API_KEY."""

    project: Text
    """Project to log to."""

    entity: Text | None = None
    """User or team that owns the project. None: the default of the key."""

    name: str | None = Field(default=None, min_length=1, max_length=128)
    """The run's name there, up to 128 characters. None: the job's id. The run's id is always the
    job's id."""

    mode: Literal["online", "offline"] = "online"
    """"offline" writes to the run folder only, and needs no key."""

    tags: tuple[Text, ...] = Field(default=(), max_length=MAX_ENTRIES)
    """Tags of the run."""


SyncMethod = Literal["shm", "disk", "http", "delta", "lora", "reload", "restart", "nccl", "ipc"]

SyncChoice = Literal["auto", SyncMethod]


@dataclass(frozen=True)
class SyncTraits:
    """The properties of a sync method. `published_again`: the method by which a version is
    published that no sampler loaded; None: the same. `loaded_again`: the method by which a sampler
    that failed loads the files of a version again; None: the same. `is_given_up`: the job does not
    use the method again once it failed.

    `is_live`: samplers that are reachable receive weights from the device where they are trained,
    without files. `is_adapter`: only an adapter is published, and it is loaded beside the model's
    weights. `ends_requests`: loading a version ends the requests of the sampler's engine."""

    published_again: SyncMethod | None = None
    loaded_again: SyncMethod | None = None
    is_given_up: bool = False
    is_live: bool = False
    is_adapter: bool = False
    ends_requests: bool = False


SYNC_METHODS: dict[SyncChoice, SyncTraits] = {
    "auto": SyncTraits(),
    "shm": SyncTraits(),
    "disk": SyncTraits(published_again="restart", loaded_again="restart"),
    "http": SyncTraits(),
    "delta": SyncTraits(),
    # after an adapter the merged weights
    "lora": SyncTraits(published_again="http", is_given_up=True, is_adapter=True),
    "reload": SyncTraits(published_again="restart", loaded_again="restart", ends_requests=True),
    "restart": SyncTraits(ends_requests=True),
    "nccl": SyncTraits(published_again="http", is_given_up=True, is_live=True),
    "ipc": SyncTraits(published_again="http", is_given_up=True, is_live=True),
}
