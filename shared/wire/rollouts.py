"""Published weights: a version, and where a sampler gets it. Prompts, and the completions that the
sampler makes (`POST /generate`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, RootModel

from shared.documented import Plain
from shared.job import SyncMethod
from shared.job.sampling import MAX_TEMPERATURE
from shared.wire.base import Fenced, Fencing, JobId, Message, Wire
from shared.wire.packed import Logprobs, Mask, TokenIds


class PublishRequest(Fenced):
    """`POST /publish_weights`: make version `version` (the trainer's step; else 409) loadable by
    samplers. `snapshot`, of the method "lora" alone: the number under which the adapter stays in
    the run folder, until it is removed there."""

    version: int = Field(ge=0)
    method: SyncMethod
    snapshot: int | None = Field(default=None, ge=0)


class Canary(Wire):
    """A fixed sequence and its log-probs by the trainer's weights of the version: `logprobs` `[T -
    1]` of all tokens but the first, in nats, at temperature 1, computed in `dtype`. `noise`: by how
    many nats they differ on average if every intermediate result is rounded in another way, which
    the trainer measures once in eight steps; 0: it was not measured."""

    token_ids: TokenIds
    logprobs: Logprobs
    dtype: str = "float32"
    noise: float = 0.0


class Published(Fenced):
    """The fields of every published version, with any sync method.

    `digest` is of all tensors and `tensors` of each, by name: names, dtypes, shapes and bytes,
    however they are spread over files (`shared/weights/folders.py`). The sampler computes the
    digest again when it loads the version. `again`: the sampler's weights were wrong, so it must
    load this version even if it serves the version already.
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
    """A file to fetch from the trainer, in ranges if needed. `path` is a path of the trainer's API:
    the sampler's own settings give the trainer's address."""

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
    """The change from the version with `base_digest` to the version with `digest`: a file with the
    elements whose bits differ (`shared/weights/delta.py`), `num_changed` of `num_elements`."""

    base_digest: str
    digest: str
    file: WeightFile
    num_changed: int
    num_elements: int


class DeltaWeights(Published):
    """`steps` that lead to this version, oldest first: a sampler begins with the step whose base is
    its own copy. `files` are the whole version, for a sampler that has no such copy."""

    method: Literal["delta"]
    files: tuple[WeightFile, ...]
    steps: tuple[DeltaStep, ...] = ()


class AdapterWeights(Published):
    """A LoRA adapter as PEFT writes it, in the folder `path` or, for a sampler that does not see
    the folder, as `files` to fetch. `adapter` is its name, never used again. `tensors` and `digest`
    cover its configuration too (`shared/weights/folders.py`)."""

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
    """A tensor's place in its GPU's memory, as `torch.multiprocessing.reductions` gives it, bytes
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
    """A version sent from device to device, in no file. Each side waits `deadline_s` seconds for
    the other. For a sampler that did not receive it, or joins later, the trainer publishes the same
    version as files, for as long as it is at that step."""

    deadline_s: float = Field(gt=0)


class BroadcastWeights(SentWeights):
    """A version sent to every sampler that connects to `port` of the trainer's host and knows
    `key`: each of `chunks` is one packed tensor of bytes."""

    method: Literal["nccl"]
    port: int
    key: str
    chunks: tuple[tuple[SentTensor, ...], ...]


class SharedWeights(SentWeights):
    """A version that the sampler reads in the trainer's memory, on the GPU with this UUID."""

    method: Literal["ipc"]
    gpu: str
    shared: tuple[SharedTensor, ...]


AnyWeights = (
    FolderWeights | HttpWeights | DeltaWeights | AdapterWeights | BroadcastWeights | SharedWeights
)


class WeightsRef(RootModel[Annotated[AnyWeights, Field(discriminator="method")]]):
    """One published version, told apart by `method`: the answer to `POST /publish_weights` and the
    body of `POST /reload_weights`. A version with a newer fence may be older than the version that
    serves."""

    model_config = ConfigDict(frozen=True)


class Prompt(Wire):
    """One problem: the model's input as `content`, and the dataset row that its graders read.
    `index` is its row in the dataset."""

    index: int
    content: str | tuple[Message, ...]
    row: dict[str, Plain]


FinishReason = Literal["stop", "length", "timeout", "error"]
"""A completion ended by its end token or a stop string, `max_tokens`, its deadline, or an error."""


MAX_TOP = 100
"""The most of the likeliest tokens that may be requested at each position."""


class Sampling(Wire):
    """The sampling options. `n` completions; `temperature` 0 is greedy; `top_k` 0 is the whole
    vocabulary; `min_p` drops tokens less likely than this share of the likeliest token's
    probability; `seed` makes a request repeatable on one engine."""

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
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


class ConversationPrefix(Wire):
    """A conversation so far: the token ids `[T]` of its first `num_messages` messages, of which the
    last is an answer, up to the last sampled token. `version`: the weights whose cached prefixes
    the next answer may continue from, also if newer ones serve; None: the weights that serve."""

    num_messages: int = Field(ge=2)
    token_ids: TokenIds
    version: int | None = None


class NamedFunction(Wire):
    """The name of a tool's function."""

    name: str


class NamedTool(Wire):
    """The tool that an answer must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool
"""Whether an answer may call tools, must not, or must; or the tool that it must call."""


class GenerateRequest(Fencing):
    """`POST /generate`: one prompt's group. Text, chat messages (rendered by the model's template,
    with `template_args` and `tools`) or token ids.

    `known` are the tokens that the first messages have: they are not rendered again, and only the
    messages after them are. With `tools` or `known`, each rollout's `messages` are its answer, with
    the calls of tools that the sampler's parser found in it.

    A job names itself and its fence. Only its own weights of that epoch, of version `min_version`
    or later, answer it. Without `job_id`, any weights that serve answer.

    With `answers` nothing is sampled: the completions are these texts, or messages after messages,
    in the tokens that the model would have sampled, with an end-of-sequence token and without
    log-probs. Weights need not serve.

    A job may name a `snapshot`, an adapter of its base model, or `own_weights`, the base model
    without one: these sample then, whatever serves.

    With `prompt_logprobs` the group has the prompt's log-probs too; `top_prompt_logprobs` and
    `top_logprobs` are how many of the likeliest tokens it has, with their log-probs, at each place
    of the prompt and of the completions.

    With `tool_choice` "none" the calls in an answer stay text. Three fields limit which tokens can
    be sampled: a `tool_choice` that forces a call, `parallel_tool_calls` false (at most one call),
    and `json_schema` (of the answer's text). Then at most the `MAX_KEPT` likeliest of the allowed
    tokens are sampled, and `Rollout.kept_ids` lists them.

    A prompt that is too long is refused, or loses its first tokens with `truncate_prompt`. With
    `fit` a completion may have fewer than `sampling.max_tokens` tokens: as many as the model's
    length leaves. A completion that is not done after `deadline_s` seconds ends there, with
    `finish_reason` "timeout"; None: no limit.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "12 47 -> 59:", "sampling": {"n": 8, "max_tokens": 6}}]
        }
    )

    job_id: JobId | None = None
    min_version: int | None = None
    snapshot: AdapterWeights | None = None
    own_weights: bool = False
    prompt: str | tuple[Message, ...] | None = None
    prompt_token_ids: TokenIds | None = None
    template_args: dict[str, Plain] = {}
    tools: tuple[dict[str, Plain], ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    json_schema: dict[str, Plain] | None = None
    known: ConversationPrefix | None = None
    answers: tuple[str | Message, ...] = ()
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    fit: bool = False
    truncate_prompt: bool = False
    deadline_s: float | None = Field(default=None, gt=0)
    sampling: Sampling = Sampling()


class AbortRequest(Fenced):
    """`POST /abort`: ends all requests of the job up to this fence, and refuses its later ones;
    another orchestrator may then use the sampler. With `keys` it ends only the requests with these
    keys, and refuses none."""

    keys: tuple[str, ...] = ()


class Aborted(Wire):
    """How many requests were ended."""

    num_requests: int


class Span(Wire):
    """Tokens from index `start` on, up to the next span, were sampled by weights `version`."""

    version: int
    start: int = Field(ge=0)


class Branch(Wire):
    """Another row of the same rollout: what was sampled after other tokens than the rollout's own
    row has, because its history was rewritten. `because` says how. Its columns are as in `Rollout`.
    No token is sampled in two rows: what another row has sampled stands in `prompt_token_ids`."""

    prompt_token_ids: TokenIds
    token_ids: TokenIds
    logprobs: Logprobs = Logprobs()
    spans: tuple[Span, ...] = ()
    sampled: Mask = Mask()
    kept_ids: TokenIds = TokenIds()
    kept_counts: TokenIds = TokenIds()
    turns: TokenIds = TokenIds()
    because: str = ""

    @property
    def num_sampled(self) -> int:
        """How many of its tokens the policy sampled."""
        return _num_sampled(self.sampled, self.token_ids)


def _num_sampled(sampled: Mask, token_ids: TokenIds) -> int:
    return sampled.data.count(1) if len(sampled) else len(token_ids)


class Rollout(Wire):
    """One completion: everything after the prompt, of one turn or of several.

    `token_ids` `[T]` include end-of-sequence tokens, and in a conversation the tokens of tools and
    environment. `sampled` `[T]` is 1 where the policy sampled the token; empty if it sampled all.
    `logprobs` `[T]` are of the distribution really sampled from (after temperature), in nats, and 0
    where nothing was sampled; empty if they were not measured. `spans` say which weights sampled
    it, oldest first; more than one only if a sync happened under way.

    `kept_counts` `[T]` is how many tokens could be sampled at each position under `top_p`, `top_k`,
    `min_p` or a constraint of the answer, and `kept_ids` lists these tokens, position by position.
    A count of 0, or none at all: the whole vocabulary, as far as is known
    (`EngineSpec.sampling_masks`).

    `top_ids` and `top_logprobs` `[T k]` are the k likeliest tokens at each position, likeliest
    first, if they were asked for.

    `advantages` `[T]` came with a rollout that was sampled elsewhere, and replace the advantage
    that Hone computes from its group's rewards; empty: none came.

    `prompt_end` is the end of the text that `text` follows, special tokens included, which says
    whether the chat template has opened a thought; None: not known.

    `messages` are the turns after the prompt of a conversation, whose last answer is `text`, and
    `turns` the index of the first token of each answer; empty: one answer, from the first token on.
    `branches` are its other rows, if its history was rewritten on the way. `info` is the
    environment's: `reward` is its reward of the episode, and `turn_rewards` has what each answer
    earned of it, row by row, its own row last, None where that is nothing
    (services/orchestrator/grpo/advantages.py). A rollout that went wrong has `finish_reason`
    "error" or "timeout" and says why.
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
    top_ids: TokenIds = TokenIds()
    top_logprobs: Logprobs = Logprobs()
    advantages: Logprobs = Logprobs()
    prompt_end: str | None = None
    messages: tuple[Message, ...] = ()
    turns: TokenIds = TokenIds()
    branches: tuple[Branch, ...] = ()
    info: dict[str, Plain] = {}

    @property
    def went_wrong(self) -> bool:
        """Whether the rollout failed, so that it is neither graded nor trained on."""
        return self.finish_reason in ("error", "timeout")

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that sampled the rollout and its branches, in order and each once."""
        rows = (*self.branches, self)
        return tuple(dict.fromkeys(span.version for row in rows for span in row.spans))

    @property
    def num_sampled(self) -> int:
        """The number of sampled tokens, in the rollout's own row and in its branches."""
        branched = sum(branch.num_sampled for branch in self.branches)
        return _num_sampled(self.sampled, self.token_ids) + branched


class RolloutGroup(Wire):
    """All completions of one prompt: `[G]` rollouts over the same `prompt_token_ids` `[P]`, by the
    sampler `replica` ("": not sampled by Hone). `overlong`: the prompt was too long, so its first
    tokens were cut off, or it was refused. `prompt_logprobs` `[P - 1]` are of the prompt's tokens
    but the first, in nats, if they were asked for; `prompt_top_ids` and `prompt_top_logprobs` `[(P
    - 1) k]` are the k likeliest tokens in their places, likeliest first. `forked`: why the prompt
    does not begin with the request's `known` tokens; "": it does, or there were none."""

    prompt_token_ids: TokenIds
    rollouts: tuple[Rollout, ...]
    replica: str = ""
    overlong: bool = False
    prompt_logprobs: Logprobs = Logprobs()
    prompt_top_ids: TokenIds = TokenIds()
    prompt_top_logprobs: Logprobs = Logprobs()
    forked: str = ""
