"""Every body that crosses between processes, in the order in which data flows. READ with
services/orchestrator/loop/pipeline.py.

    Job -> Prompt -> RolloutGroup -> Score -> (advantages) -> Example -> StepResult -> WeightsRef

All are frozen and refuse unknown keys. Token ids, log-probs and masks stay bytes from end to end
(`packed.py`): in JSON a list of numbers, in msgpack 4, 4 and 1 bytes per token. The job's own
sections are in `job.py`. What is stored is read tolerantly, see `codec.decode_stored`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    RootModel,
    field_validator,
)

from shared.job import JOB_ID, MAX_SERVED_RANK, Job, RewardSpec, SyncMethod
from shared.packed import Logprobs, Mask, TokenIds
from shared.plain import Plain
from shared.urls import check_service_url


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Message = dict[str, Plain]
"""A chat message: at least `role` and `content`."""

JobId = Annotated[str, Field(pattern=JOB_ID)]
FinishReason = Literal["stop", "length", "timeout", "error"]
"""Why a completion ended: of itself, by `max_tokens`, by its deadline, or because it went wrong."""

Fence = tuple[int, int]
"""`(attempt, epoch)`; the greater one is the newer one."""


class Fencing(Wire):
    """How new the caller is. A caller that has been superseded is refused: Conflict, code "stale".

    `attempt` is the number of the worker's lease, from one counter for all jobs, so it only grows.
    `epoch` counts, within the attempt, how often the job was loaded into trainer and sampler: each
    time is another life of its weights, in which versions may go back to that of a checkpoint.
    """

    attempt: int = Field(default=0, ge=0)
    epoch: int = Field(default=0, ge=0)

    @property
    def fence(self) -> Fence:
        return self.attempt, self.epoch


class Fenced(Fencing):
    """A body that only the job's newest worker may send."""

    job_id: JobId


# --- prompts -------------------------------------------------------------------------------------


class Prompt(Wire):
    """One problem: what the model sees, and the dataset row its graders see. `index` is its row in
    the dataset."""

    index: int
    content: str | tuple[Message, ...]
    row: dict[str, Plain]


# --- rollouts ------------------------------------------------------------------------------------


class EngineSpec(Wire):
    """What the sampler must serve.

    `max_model_len` bounds prompt plus completion, in tokens; None takes the model's own. `dtype`
    "auto" takes bfloat16 where the hardware has it and float32 elsewhere. `max_lora_rank` is the
    largest rank of adapters to serve beside the model, if its architecture takes any; None: none.
    With `sampling_masks` a request that samples from parts of the vocabulary is told which
    (`Rollout.kept_ids`).
    """

    model: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, gt=0)
    max_lora_rank: int | None = Field(default=None, ge=1, le=MAX_SERVED_RANK)
    seed: int = 0
    sampling_masks: bool = False


class ModelRequest(EngineSpec, Fencing):
    """`PUT /model`: serve this. Putting the same one twice starts nothing twice. A job names itself
    and its fence, and older ones are refused from then on; a request by hand names no job."""

    job_id: JobId | None = None

    @property
    def spec(self) -> EngineSpec:
        return EngineSpec.model_validate(self.model_dump(include=set(EngineSpec.model_fields)))


class Sampling(Wire):
    """How to sample. `n` completions; `temperature` 0 is greedy; `top_k` 0 is the whole vocabulary;
    `min_p` drops tokens less likely than that share of the likeliest; `seed` makes a request
    repeatable on one engine."""

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


class GenerateRequest(Fencing):
    """`POST /generate`: one prompt's group. Text, chat messages (rendered by the model's template,
    with `template_args`) or token ids.

    A job names itself and its fence, and is answered only by its own weights of that epoch, of
    version `min_version` or later. Without `job_id`, whatever serves answers.

    A prompt that is too long is refused, or loses its first tokens with `truncate_prompt`. What is
    not sampled `deadline_s` seconds after it was asked for ends there, with `finish_reason`
    "timeout"; None: it takes as long as it takes.
    """

    job_id: JobId | None = None
    min_version: int | None = None
    prompt: str | tuple[Message, ...] | None = None
    prompt_token_ids: TokenIds | None = None
    template_args: dict[str, Plain] = {}
    truncate_prompt: bool = False
    deadline_s: float | None = Field(default=None, gt=0)
    sampling: Sampling = Sampling()


class AbortRequest(Fenced):
    """`POST /abort`: ends whatever the job has under way up to this fence, and refuses what comes
    of it later. With `keys` it ends only the requests that were asked for with these keys, and
    refuses nothing."""

    keys: tuple[str, ...] = ()


class Aborted(Wire):
    """How many requests were ended."""

    num_requests: int


class Span(Wire):
    """Tokens from index `start` on, up to the next span, were sampled by weights `version`."""

    version: int
    start: int = Field(ge=0)


class Rollout(Wire):
    """One completion: everything after the prompt, of one turn or of several.

    `token_ids` `[T]` include end-of-sequence tokens, and in a conversation what tools and
    environment said. `sampled` `[T]` is 1 where the policy sampled the token; empty if it sampled
    all. `logprobs` `[T]` are of the distribution really sampled from (after temperature), in nats,
    and 0 where nothing was sampled; empty if they were not measured. `spans` say which weights
    sampled it, oldest first; more than one only if a sync happened under way.

    `kept_counts` `[T]` is how many tokens could be sampled at each position under `top_p`, `top_k`
    or `min_p`, and `kept_ids` are those, position by position. A count of 0, or none at all: the
    whole vocabulary, as far as is known (`EngineSpec.sampling_masks`).

    `messages` are the turns after the prompt of a conversation, whose last answer is `text`. `info`
    is the environment's. A rollout that went wrong has `finish_reason` "error" or "timeout" and
    says why.
    """

    text: str
    token_ids: TokenIds
    logprobs: Logprobs = Logprobs()
    finish_reason: FinishReason
    error: str | None = None
    spans: tuple[Span, ...] = ()
    sampled: Mask = Mask()
    kept_ids: TokenIds = TokenIds()
    kept_counts: TokenIds = TokenIds()
    messages: tuple[Message, ...] = ()
    info: dict[str, Plain] = {}

    @property
    def went_wrong(self) -> bool:
        """Whether it is neither graded nor trained on."""
        return self.finish_reason in ("error", "timeout")

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that sampled it, in order and each once."""
        return tuple(dict.fromkeys(span.version for span in self.spans))

    @property
    def num_sampled(self) -> int:
        """How many of its tokens the policy sampled."""
        return self.sampled.data.count(1) if len(self.sampled) else len(self.token_ids)


class RolloutGroup(Wire):
    """All completions of one prompt: `[G]` rollouts over the same `prompt_token_ids`, by the
    sampler `replica` ("": none of ours). `overlong`: the prompt was too long, so its first tokens
    were cut off, or it was refused."""

    prompt_token_ids: TokenIds
    rollouts: tuple[Rollout, ...]
    replica: str = ""
    overlong: bool = False


class ChatRequest(Wire):
    """`POST /v1/chat/completions` of a recorded session, in OpenAI's shape. What is missing here
    would sample from a distribution that training cannot compute again, so it is refused.

    `chat_template_kwargs`, `top_k`, `min_p` and `stop_token_ids` are vLLM's. `tool_choice` "auto"
    needs HONE_TOOL_PARSER. With `stream` the answer comes in OpenAI's chunks, but not before it is
    whole. `user`, `metadata` and `store` mean nothing here.
    """

    messages: tuple[Message, ...] = Field(min_length=1)
    model: str | None = None
    tools: tuple[dict[str, Plain], ...] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: dict[str, Plain] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Plain] | None = None
    user: str | None = None
    metadata: dict[str, Plain] | None = None
    store: bool | None = None

    @field_validator("n")
    @classmethod
    def _one_answer(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError(
                "expected 1: a conversation has one answer per turn; others want sessions of their "
                "own"
            )
        return value

    @field_validator("messages")
    @classmethod
    def _text_only(cls, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {index} has no 'role'")
            content = message.get("content")
            parts = cast(list[Any], content if isinstance(content, list) else [])
            if not (content is None or isinstance(content, str | list)) or not all(
                isinstance(part, dict) and "text" in part for part in parts
            ):
                raise ValueError(
                    f"the 'content' of message {index} is no text; a session records text only"
                )
        return messages


class Turn(Wire):
    """An answer of the policy: `num_tokens` of its rollout's tokens from index `start` on, sampled
    as `sampling` says."""

    start: int
    num_tokens: int
    finish_reason: FinishReason
    sampling: Sampling


class Conversation(Wire):
    """An agent's conversation with the policy, as tokens. `prompt` are the messages before the
    first answer, and `prompt_token_ids` what the chat template made of them with `tools` and
    `template_args`. All that follows is in `rollout`, whose `sampled` tokens are the answers,
    `turns` in all.

    `because` is why it does not go on from the session's one before; "" for the first.
    """

    prompt: tuple[Message, ...]
    tools: tuple[dict[str, Plain], ...] = ()
    template_args: dict[str, Plain] = {}
    prompt_token_ids: TokenIds
    rollout: Rollout
    turns: tuple[Turn, ...]
    because: str = ""


class SessionRecord(Fencing):
    """`GET /sessions/{id}`: the conversations of a session, sampled by the weights of one job,
    attempt and epoch; without `job_id`, by weights of no job. `replica` is the sampler that keeps
    it.

    More than one conversation: the agent's messages did not extend those recorded, as the later
    one's `because` gives. No answer is in two of them as sampled tokens.
    """

    id: str
    job_id: JobId | None = None
    replica: str = ""
    conversations: tuple[Conversation, ...]


class SessionDeleted(Wire):
    """`DELETE /sessions/{id}`: the session is forgotten, if there was one."""

    id: str


# --- rewards -------------------------------------------------------------------------------------


class ScoreItem(Wire):
    """One completion to grade. `row` holds the dataset's columns, which graders take as keyword
    arguments.

    `num_tokens` is the completion's length in tokens, for graders of length.
    """

    prompt: str | tuple[Message, ...]
    completion: str
    finish_reason: FinishReason = "stop"
    num_tokens: int | None = Field(default=None, ge=0)
    row: dict[str, Plain] = {}


MAX_SCORED_ITEMS = 4096
"""Of one request, four groups of the largest size: the service turns to nothing else while it
reads and writes a body."""

MAX_REWARDS = 64
MAX_COLUMNS = 4096

MAX_CHECKED_PROMPTS = 64
"""Of one request to validate; a job's first rows are a handful."""

MAX_PARTS = 65_536
"""Verdicts of one request, its items times its rewards: a group of the largest size by as many
rewards as may be."""


class ScoreRequest(Wire):
    """`POST /score`: every item graded by every reward. `job_id` says in whose run folder verdicts
    may be cached, and whose workers of the job's own functions are asked."""

    items: Annotated[tuple[ScoreItem, ...], FailFast()] = Field(max_length=MAX_SCORED_ITEMS)
    rewards: tuple[RewardSpec, ...] = Field(min_length=1, max_length=MAX_REWARDS)
    job_id: JobId | None = None


Verdict = Literal[
    "ok",
    "wrong",
    "runtime_error",
    "time_limit",
    "memory_limit",
    "output_limit",
    "skipped",
    "sandbox_error",
    "error",
]
"""How a grading went. The last three have no value: not applicable, the sandbox failed, the grader
failed."""


class Part(Wire):
    """What one grader said of one completion. `value` None: not applicable (`verdict` "skipped") or
    missing ("sandbox_error", "error"), which is never an invented 0.

    `detail` is why, in a few words: what the program evaluated to, or died of. `stdout` is the end
    of what it printed. `seconds` is the time it took, and `cached` says that it came from a cache.
    `errors` are OpenAI's names of grader errors ("python_grader_runtime_error",
    "model_grader_refusal_error", ...). `sub` are the values of the graders that it is made of, by
    their names, and `tokens` what judges took for it, by model (0 for what was cached).
    """

    value: float | None
    verdict: Verdict = "ok"
    detail: str = ""
    stdout: str = ""
    seconds: float = 0.0
    cached: bool = False
    errors: tuple[str, ...] = ()
    sub: dict[str, float] = {}
    tokens: dict[str, int] = {}


class Score(Wire):
    """The reward of one completion: the weighted sum of its parts, or None where a part is missing
    (never an invented 0)."""

    value: float | None
    parts: dict[str, Part]


class ScoreResult(Wire):
    """One score per item, in the order asked."""

    scores: tuple[Score, ...]


class ScoredItem(Wire):
    """A line of a streamed `/score`: the item at `index` is graded by every reward. Lines come in
    the order of completion."""

    index: int
    score: Score


class ScoredGroup(Wire):
    """A group that was sampled and scored elsewhere, to be trained on as if it had been sampled
    here. Rollouts without log-probs are taken to be the trainer's own."""

    prompt: Prompt
    group: RolloutGroup
    scores: tuple[Score, ...]


class ExecuteRequest(Wire):
    """`POST /execute`: runs `code` in the sandbox. `expression`, if given, is evaluated after it
    and its value returned.

    `inputs` are bound as globals first. Limits: seconds of CPU time (`cpu_s`), of wall clock
    (`timeout_s`), and of wall clock in which it does nothing (`idle_s`: without, programs that
    sleep would keep others waiting), MiB of memory.
    """

    code: str = ""
    expression: str | None = None
    inputs: dict[str, Plain] = {}
    stdin: str = ""
    cpu_s: float = Field(default=4.0, gt=0, le=600)
    timeout_s: float = Field(default=30.0, gt=0, le=600)
    idle_s: float = Field(default=3.0, gt=0, le=600)
    memory_mib: int = Field(default=512, ge=16, le=8192)


class Execution(Wire):
    """How a program ended. `verdict` "ok" means that it ran to its end; `value` is then what
    `expression` gave, as plain data."""

    verdict: Literal[
        "ok", "runtime_error", "time_limit", "memory_limit", "output_limit", "sandbox_error"
    ]
    value: Any = None
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0


class GraderInfo(Wire):
    """A registered grader and the JSON schema of its `params`."""

    name: str
    description: str
    params: dict[str, Any]


class GraderList(Wire):
    graders: tuple[GraderInfo, ...]


class ValidateRequest(Wire):
    """`POST /graders/validate`: would these rewards work on rows with these `columns`? 422 with
    sentences if not.

    `prompts` are a handful of the job's: a row that no completion could be graded by is refused
    too.
    """

    rewards: tuple[RewardSpec, ...] = Field(max_length=MAX_REWARDS)
    columns: tuple[str, ...] = Field(max_length=MAX_COLUMNS)
    prompts: tuple[Prompt, ...] = Field(default=(), max_length=MAX_CHECKED_PROMPTS)


class Validated(Wire):
    rewards: tuple[str, ...]


class GraderRunRequest(Wire):
    """`POST /graders/run`, in OpenAI's shape: one completion (`model_sample`) of the row `item`,
    graded by one grader.

    `grader` has a `type` (any grader's name), perhaps a `name`, and its params beside them.
    """

    grader: dict[str, Plain]
    model_sample: str
    item: dict[str, Plain] = {}


class GraderErrors(Wire):
    """What went wrong, by OpenAI's names. All false: nothing did."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False


class GraderRunMetadata(Wire):
    """`execution_time` is in seconds. `part` is Hone's own verdict; OpenAI has none."""

    name: str
    type: str
    execution_time: float
    errors: GraderErrors
    part: Part
    scores: dict[str, float] = {}
    token_usage: int | None = None
    sampled_model_name: str | None = None


class GraderRun(Wire):
    """`reward` None: missing or not applicable, as `metadata` says."""

    reward: float | None
    metadata: GraderRunMetadata
    sub_rewards: dict[str, float] = {}
    model_grader_token_usage_per_model: dict[str, Any] = {}


# --- examples, batch, loss -----------------------------------------------------------------------


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
    The same job again changes nothing but the fence; another one replaces it."""

    job: Job


class TrainerState(Fencing):
    """`GET /state`: `step` is the last applied one; the weights' version is the same number. None:
    no job yet.

    `num_trainable` counts the parameters that change (fewer under LoRA). `skipped_steps` counts
    steps that changed no weight, because a loss or gradient was not finite. `resumed_step` is the
    checkpoint that the job went on from, and `damaged` says which newer ones could not be used.
    `restarts` counts how often the ranks came back after a failure, the last of which is
    `last_failure`. `boot_id` names this life of the ranks. `doing` says what takes long just now,
    where that is not what it was asked for. `gpu` is the UUID of the one that rank 0 computes on.
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
    run folder."""

    step: int = Field(ge=0)


class Checkpoint(Wire):
    """A complete checkpoint that plain `transformers` loads from `path`, and from which training
    can go on."""

    step: int
    path: str
    size_bytes: int


class CheckpointList(Wire):
    checkpoints: tuple[Checkpoint, ...]


# --- weights -------------------------------------------------------------------------------------


class PublishRequest(Fenced):
    """`POST /publish_weights`: make version `version` (the trainer's step; else 409) loadable by
    samplers."""

    version: int = Field(ge=0)
    method: SyncMethod


class Canary(Wire):
    """A fixed sequence and what the trainer's weights of the version give it: `logprobs` `[T - 1]`
    of all its tokens but the first, in nats, at temperature 1, computed in `dtype`."""

    token_ids: TokenIds
    logprobs: Logprobs
    dtype: str = "float32"


class Published(Fenced):
    """What every published version has, whichever way it goes.

    `digest` is of all tensors and `tensors` of each, by name: names, dtypes, shapes and bytes,
    however they are spread over files (`shared/digest.py`). The sampler that loads it computes it
    again. `again`: what the sampler holds was found wrong, so it is to load this version even if
    it serves already.
    """

    version: int = Field(ge=0)
    digest: str
    size_bytes: int
    tensors: dict[str, str] = {}
    canary: Canary | None = None
    again: bool = False


class FolderWeights(Published):
    """Safetensors files in a folder that the sampler sees: in shared memory ("shm") or on a shared
    volume, loaded in place, after the engine's memory was freed ("reload"), or by a new engine
    ("restart")."""

    method: Literal["shm", "disk", "reload", "restart"]
    path: str


class WeightFile(Wire):
    """A file to fetch from the trainer, in ranges if need be. `path` is a path of the trainer's
    API: where the trainer is, the sampler's own settings say."""

    path: str = Field(pattern=r"^/weights(/[A-Za-z0-9_-][A-Za-z0-9._-]*){3}$")
    size_bytes: int = Field(ge=0)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class HttpWeights(Published):
    """Safetensors files to fetch."""

    method: Literal["http"]
    files: tuple[WeightFile, ...]


class DeltaStep(Wire):
    """From the version of digest `base_digest` to that of `digest`: a file with the elements whose
    bits differ (`shared/delta.py`), `num_changed` of `num_elements`."""

    base_digest: str
    digest: str
    file: WeightFile
    num_changed: int
    num_elements: int


class DeltaWeights(Published):
    """`steps` that lead to this version, oldest first: a sampler begins with the one that its own
    copy is the base of. `files` are the whole version, for a sampler that has no such copy."""

    method: Literal["delta"]
    files: tuple[WeightFile, ...]
    steps: tuple[DeltaStep, ...] = ()


class AdapterWeights(Published):
    """A LoRA adapter as PEFT writes it, in the folder `path` or, for a sampler that does not see
    that, as `files` to fetch. `adapter` is its name, never used again. `tensors` and `digest` are
    of its configuration too (`shared/adapters.py`)."""

    method: Literal["lora"]
    path: str
    files: tuple[WeightFile, ...] = ()
    adapter: str


class SentTensor(Wire):
    """A tensor that the trainer sends from its device; `dtype` is torch's name, "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SharedTensor(SentTensor):
    """Where one lies in its GPU's memory: what `torch.multiprocessing.reductions` says of it, bytes
    in hex."""

    stride: tuple[int, ...]
    offset: int
    handle: str
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: str
    ref_counter_offset: int
    event_handle: str
    event_sync_required: bool


class SentWeights(Published):
    """What goes from device to device. Each side waits `deadline_s` seconds for the other. `files`
    are the same version, for a sampler that did not get it so, or joins later."""

    deadline_s: float = Field(gt=0)
    files: tuple[WeightFile, ...]

    def as_files(self) -> HttpWeights:
        """Returns the version as files to fetch."""
        common = {name: getattr(self, name) for name in Published.model_fields}
        return HttpWeights(**common, method="http", files=self.files)


class BroadcastWeights(SentWeights):
    """Sent to every sampler that comes to `port` of the trainer's host and knows `key`: each of
    `chunks` is one packed tensor of bytes."""

    method: Literal["nccl"]
    port: int
    key: str
    chunks: tuple[tuple[SentTensor, ...], ...]


class SharedWeights(SentWeights):
    """Read by the sampler in the trainer's memory, on the GPU with this UUID."""

    method: Literal["ipc"]
    gpu: str
    shared: tuple[SharedTensor, ...]


AnyWeights = (
    FolderWeights | HttpWeights | DeltaWeights | AdapterWeights | BroadcastWeights | SharedWeights
)


class WeightsRef(RootModel[Annotated[AnyWeights, Field(discriminator="method")]]):
    """One published version, told apart by `method`: the answer to `POST /publish_weights` and the
    body of `POST /reload_weights`. One of a newer fence may be older than what serves."""

    model_config = ConfigDict(frozen=True)


class ServingWeights(Fencing):
    """`GET /weights`, and the answer to a reload: what now serves. `version` None: no version of a
    job was loaded yet.

    `digest` is of the tensors the sampler read, computed by the sampler; `canary_logprobs` are its
    own of the canary, in its `dtype`. `received_bytes` came over the network for it. `load_s` is
    all that the load took, and `paused_s` the part of it in which no token was sampled. `replica`
    names the sampler, and `boot_id` this life of its engine. It samples `max_num_seqs` completions
    at once, as far as they have room in its cache, which holds `kv_cache_tokens` tokens; 0: it does
    not say. `gpus` are the UUIDs of those that it computes on.
    """

    job_id: JobId | None = None
    version: int | None = None
    digest: str | None = None
    model: str | None = None
    load_s: float = 0.0
    paused_s: float = 0.0
    received_bytes: int = 0
    canary_logprobs: Logprobs = Logprobs()
    dtype: str = ""
    replica: str = ""
    boot_id: str = ""
    max_num_seqs: int = 0
    kv_cache_tokens: int = 0
    gpus: tuple[str, ...] = ()


class SleepRequest(Fenced):
    """`POST /sleep`: free the GPU's memory, weights included, until the next version is loaded."""


class NoBody(Wire):
    """The empty body of a POST that needs none."""


class CheckedWeights(Wire):
    """`POST /weights/check`: `version` serves by its label; None: the model of the engine's start.
    `differing` are the tensors, of `num_tensors`, of which the engine holds other bytes, and
    `unread` those that could not be read back."""

    version: int | None
    replica: str
    num_tensors: int
    differing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class Registration(Wire):
    """`PUT /v1/samplers/{replica}` at the orchestrator: the sampler `replica` is at `url`, until
    its lease ends. Registering again renews the lease. `version` of `job_id` serves; None: no
    version of a job."""

    url: Annotated[str, AfterValidator(check_service_url)]
    job_id: JobId | None = None
    version: int | None = None


class RegisteredSampler(Registration):
    """Registered until `expires_at`, in Unix seconds: `lease_s` seconds after its lease was renewed
    last."""

    replica: str
    lease_s: float
    expires_at: float


class SamplerList(Wire):
    """`GET /v1/samplers`: those that registered themselves, by name."""

    samplers: tuple[RegisteredSampler, ...]


class Unregistered(Wire):
    """`DELETE /v1/samplers/{replica}`: it gets no further groups."""

    replica: str


class PauseState(Wire):
    paused: bool


class VersionInfo(BaseModel):
    """`GET /version`: the service, Hone's version, and whatever else the service says of the engine
    inside."""

    model_config = ConfigDict(frozen=True, extra="allow")

    service: str
    hone: str


# --- jobs ----------------------------------------------------------------------------------------

JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


class SubmitRequest(Wire):
    """`POST /v1/jobs`. `job` is a whole job file's content; files it names must be readable by the
    orchestrator."""

    job: Job


class JobRecord(Wire):
    """A job as the API shows it. Times are Unix seconds. `run_dir` holds everything it wrote.

    `error` is a sentence: why it failed, or why it was paused. `recoveries` counts how often it
    went on after a service had lost its state, and `attempts` how often a worker took it up.
    """

    id: JobId
    name: str
    status: JobStatus
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    step: int = 0
    steps: int
    eta_s: float | None = None
    reward: float | None = None
    cancel_requested: bool = False
    pause_requested: bool = False
    recoveries: int = 0
    error: str | None = None
    run_dir: str
    attempts: int = 0
    summary: dict[str, Any] | None = None
    job: Job


class JobState(Wire):
    """What a job's state is once it was cancelled, paused or resumed: fields of its record, which
    can be told also of a job whose record another version of Hone wrote."""

    id: JobId
    status: JobStatus
    cancel_requested: bool = False
    pause_requested: bool = False
    error: str | None = None


class ResumeRequest(Wire):
    """`POST /v1/jobs/{id}/resume`: `set` are changes to go on with, as `--set` takes them:
    "memory.micro_batch_tokens=4096". Only what does not say what is learned can change."""

    set: tuple[str, ...] = ()


class JobList(Wire):
    """Newest first. `next_after` goes back as `?after=` for the next page; None at the end.
    `unreadable` are the ids of those on the page that another version of Hone wrote and this one
    cannot read."""

    jobs: tuple[JobRecord, ...]
    next_after: str | None = None
    unreadable: tuple[str, ...] = ()


class JobDeleted(Wire):
    """`DELETE /v1/jobs/{id}`: the job is forgotten. `files`: its run folder is removed as well."""

    id: JobId
    files: bool = False


class Event(Wire):
    """Something that happened to a job, in order. `id` is what `Last-Event-ID` and `?after=` take.
    `time` is Unix seconds."""

    id: str
    job_id: JobId
    time: float
    type: Literal["status", "log", "step", "eval", "checkpoint"]
    level: Literal["info", "warning", "error"] = "info"
    message: str
    data: dict[str, Any] = {}


class EventList(Wire):
    events: tuple[Event, ...]


class MetricsRow(Wire):
    step: int
    metrics: dict[str, float]


class MetricsList(Wire):
    rows: tuple[MetricsRow, ...]


class GradedRollout(Wire):
    """A stored rollout as people look at it."""

    prompt_index: int
    prompt: str | tuple[Message, ...]
    completion: str
    finish_reason: FinishReason
    versions: tuple[int, ...]
    reward: float | None
    parts: dict[str, Part]
    advantage: float | None


class RolloutList(Wire):
    step: int
    rollouts: tuple[GradedRollout, ...]


class RegradeRequest(Wire):
    """`POST /v1/jobs/{id}/regrade`: what other `rewards` would say of the stored rollouts of
    `first_step` to `last_step`, both included. Nothing is written to the run. `num_examples` bounds
    the rollouts shown."""

    first_step: int = Field(ge=1)
    last_step: int = Field(ge=1)
    rewards: tuple[RewardSpec, ...] = Field(min_length=1)
    num_examples: int = Field(default=10, ge=0, le=1000)


class RegradedStep(Wire):
    """Old and new mean reward of a step (None: no reward at all), how many rollouts have none, how
    many get another one, and which advantages change their sign, by position in `[P*G]`. The sign
    of no advantage is 0."""

    step: int
    num_rollouts: int
    old_reward: float | None
    new_reward: float | None
    old_missing: int
    new_missing: int
    num_changed: int
    flipped: tuple[int, ...]


class RegradedRollout(Wire):
    """A rollout as it was graded, and as it would be."""

    step: int
    position: int
    old: GradedRollout
    new: GradedRollout


class RegradeReport(Wire):
    """What would flip. `examples` are the rollouts whose reward differs most, in that order."""

    steps: tuple[RegradedStep, ...]
    examples: tuple[RegradedRollout, ...]


class WaitRequest(Wire):
    """`POST /operations/wait`: wait until one of the operations `ids` has ended, or fewer than
    `busy_below` pieces of work are under way, at most `wait_s` seconds."""

    ids: tuple[str, ...] = Field(max_length=65_536)
    wait_s: float = Field(default=0.0, ge=0, le=60)
    busy_below: int | None = Field(default=None, ge=1)


class WaitResult(Wire):
    """Which operations have ended: their results, or that they are unknown, is at each one's own
    Location. `busy` is how much the service has under way, in its own unit (completions, in the
    sampler)."""

    ids: tuple[str, ...]
    busy: int = 0


class Batch(Wire):
    """A sampled and scored step, as stored in the run folder: axes `[P]` prompts, `[P][G]` rollouts
    and scores.

    `version` is the oldest weight version that sampled it. `dropped` `[D][G]` are the scores of
    groups without signal in whose place others were sampled. `graded` False: too many rewards were
    missing, so it was not trained on and will be graded again. With the job this is all a replay of
    the step needs. `schema_version` is of this very class; older ones are read as they are.
    """

    step: int
    version: int
    prompts: tuple[Prompt, ...]
    groups: tuple[RolloutGroup, ...]
    scores: tuple[tuple[Score, ...], ...]
    dropped: tuple[tuple[Score, ...], ...] = ()
    graded: bool = True
    schema_version: int = 2
