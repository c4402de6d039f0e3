"""Conversations and completions that do not come from Hone's own sampling of prompts.

- Episodes of a job's own environments and tools, which the reward service runs in its sandbox.
- Agents: their conversations with the policy, recorded as the tokens that were sampled; and the
  episodes of a job with `[environment] kind = "worker"`, which a worker on another machine leases,
  and whose rewards it reports.
- Groups that were sampled and scored elsewhere, for a job with `[environment] kind = "pushed"`: in
  Hone's form, and in the form in which Atropos' `atroposlib` 0.4 sends them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import ConfigDict, Field, RootModel, field_validator, model_validator

from shared.documented import Plain
from shared.job.sampling import EnvironmentSpec
from shared.job.section import Text
from shared.wire.base import JobId, Message, Reported, Wire
from shared.wire.messages import check_schema, normalized
from shared.wire.packed import Logprobs, Mask, TokenIds
from shared.wire.rollouts import NamedTool, RolloutGroup, ToolChoice

EpisodeId = str


class EpisodeOf(Wire):
    """An episode of a job. Each `job_id` has its own processes. Ids are chosen by the caller, and a
    repeated request of one id happens once."""

    job_id: JobId
    environment: EnvironmentSpec
    id: EpisodeId = Field(min_length=1, max_length=200)


class OpenEpisode(EpisodeOf):
    """`POST /episodes/open`: makes the environment of a row and resets it. Kind "tools" has nothing
    to reset."""

    row: dict[str, Plain] = {}


class EpisodeOpened(Wire):
    """The result of `reset`, as text; None: it returned nothing. `tools` are the JSON schemas of
    the methods or functions, in OpenAI's shape, made from type hints and docstrings."""

    observation: str | None
    tools: tuple[dict[str, Plain], ...]


class ToolCall(Wire):
    """A call that the model made: the tool's `name`, and `arguments` as the model wrote them."""

    id: str = ""
    name: str
    arguments: str | dict[str, Plain] = {}


class StepEpisode(EpisodeOf):
    """`POST /episodes/step`: calls tools, one after the other, in turn number `turn` of the
    episode, from 0."""

    turn: int = Field(ge=0)
    calls: tuple[ToolCall, ...]


class ToolResult(Wire):
    """The result of a call, as text. `failed`: the tool raised, does not exist, or its arguments do
    not fit; the text says so, for the model to read."""

    id: str = ""
    content: str
    failed: bool = False


class EpisodeStepped(Wire):
    """The results of a turn's calls, in order. `done`: the environment says that the episode is
    over (its attribute `done` is true). `reward` is the turn's reward; None: it has none."""

    results: tuple[ToolResult, ...]
    done: bool = False
    reward: float | None = None


class CloseEpisode(EpisodeOf):
    """`POST /episodes/close`: ends the episode, and returns its reward if the environment has
    `get_reward`. `rewarded` false: its reward is not needed, because it failed. `attributes`:
    reward functions need the environment's attributes."""

    rewarded: bool = True
    attributes: bool = False


class EpisodeClosed(Wire):
    """The environment's own reward; None with `has_reward`: the environment returned that no reward
    applies. `attributes` are its public attributes and properties at the end, as far as they are
    plain data; None: they were not requested, or there is no environment."""

    has_reward: bool = False
    reward: float | None = None
    attributes: dict[str, Plain] | None = None


class ValidateEnvironment(Wire):
    """`POST /episodes/validate`: opens an episode of a row, and closes it. 422 with a sentence if
    it cannot be opened. All classes of a table are checked. Without `job_id` the worker then
    ends."""

    job_id: JobId | None = None
    environment: EnvironmentSpec
    row: dict[str, Plain] = {}


class EnvironmentValidated(EpisodeOpened):
    """An environment that can be opened. `has_reward`: the row's class has `get_reward`."""

    has_reward: bool


WorkerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,99}$")]

MetricName = Annotated[str, Field(min_length=1, max_length=100)]

LeaseId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class LeaseEpisodes(Wire):
    """`POST /v1/episodes/lease`: leases up to `num` episodes of the job `job_id`; None: of any job.
    If no job offers one, the request waits up to `wait_s` seconds."""

    worker: WorkerName
    job_id: JobId | None = None
    num: int = Field(default=1, ge=1, le=1024)
    wait_s: float = Field(default=0.0, ge=0, le=60)


class LeasedEpisode(Wire):
    """One rollout for an agent. `id` is of this lease alone: an episode whose worker died has
    another one at the next worker. `prompt` is the job's prompt of `row`.

    The agent calls the model at the orchestrator's URL followed by `path` (OpenAI's API), with
    `api_key`, which identifies the rollout. It has `deadline_s` seconds. The lease ends after
    `lease_s` seconds in which it is not renewed.
    """

    id: LeaseId
    job_id: JobId
    row: dict[str, Plain]
    prompt: str | tuple[Message, ...]
    path: str = "/v1"
    api_key: str
    deadline_s: float
    lease_s: float


class LeasedEpisodes(Wire):
    """The leased episodes; empty if nothing was offered in time."""

    episodes: tuple[LeasedEpisode, ...] = ()


class RenewLeases(Wire):
    """`POST /v1/episodes/renew`: renews the leases `ids`, and gives back the leases `returned`:
    their episodes are offered again at once."""

    worker: WorkerName
    ids: tuple[LeaseId, ...] = ()
    returned: tuple[LeaseId, ...] = ()


class LeasesRenewed(Wire):
    """`unwanted` leases have ended: the agent was late, the job paused, or another worker has the
    episode. Their agents may be stopped."""

    unwanted: tuple[LeaseId, ...] = ()


MAX_ANSWERS = 10_000
"""Most answers of one episode."""


class EpisodeResult(Wire):
    """`POST /v1/episodes/{id}/result`: the reward of an episode. `reward` is a number, a list with
    one entry per answer of the model, in order, or a table by the ids of answers, in which missing
    answers have no reward of their own. The reward of a list or table is the sum of its numbers.
    None: no reward applies.

    `error` says why the agent failed, in place of a reward. `metrics` are the agent's own numbers,
    whose means are among the job's metrics.
    """

    reward: (
        Reported
        | Annotated[tuple[Reported | None, ...], Field(max_length=MAX_ANSWERS)]
        | Annotated[dict[Text, Reported | None], Field(max_length=MAX_ANSWERS)]
        | None
    ) = None
    error: str | None = Field(default=None, min_length=1, max_length=4000)
    metrics: dict[MetricName, Reported] = Field(default={}, max_length=64)


class ResultTaken(Wire):
    """`taken`: the result counts. False: the lease had ended (see `unwanted` of `LeasesRenewed`). A
    repeated result gets the same answer."""

    id: LeaseId
    taken: bool


MAX_MESSAGES = 10_000

Conversation = Annotated[tuple[Message, ...], Field(max_length=MAX_MESSAGES)]

MAX_TOOLS = 1024

MAX_STOPS = 1024


def _name(tool: dict[str, Plain]) -> str:
    function: Any = tool.get("function")
    return str(cast(dict[str, Any], function).get("name")) if isinstance(function, dict) else ""


class ChatRequest(Wire):
    """The request of a turn of a conversation, with the fields of OpenAI's chat completions.
    `chat_template_kwargs` and `stop_token_ids` are vLLM's. A `tool_choice` other than "none" needs
    HONE_TOOL_PARSER. `json_schema` is a schema that the answer's text must match."""

    messages: tuple[Message, ...] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: tuple[dict[str, Plain], ...] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    json_schema: dict[str, Plain] | None = None
    chat_template_kwargs: dict[str, Plain] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | Annotated[tuple[str, ...], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: tuple[int, ...] | None = Field(default=None, max_length=MAX_STOPS)

    @field_validator("messages")
    @classmethod
    def _text_only(cls, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {index} has no 'role'")
        return normalized(messages)

    @model_validator(mode="after")
    def _bounded_schemas(self) -> Self:
        choice = self.tool_choice
        names = {_name(tool) for tool in self.tools or ()}
        if choice not in (None, "auto", "none") and not names:
            raise ValueError("'tool_choice' forces a call, and there are no tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(
                f"'tool_choice' names the tool {choice.function.name!r:.80}, expected one of "
                f"{', '.join(map(repr, sorted(names)))[:400]}"
            )
        if not self.is_constrained:
            return self
        if self.json_schema is not None:
            check_schema(self.json_schema, "the schema of the answer")
        check_schema(list(self.tools or ()), "the list of tools")
        return self

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must be calls of tools or match a schema."""
        if self.json_schema is not None:
            return True
        may_call = bool(self.tools) and self.tool_choice != "none"
        return may_call and (self.tool_choice not in (None, "auto") or not self.parallel_tool_calls)


class SessionRecord(Wire):
    """`GET /sessions/{name}`: an open session's rollout so far, as a group of one; None while no
    client has an answer. `waits` turns are under way."""

    name: str
    job_id: JobId
    group: RolloutGroup | None
    waits: int


MAX_ROLLOUTS = 1024

MAX_GROUPS = 1024
"""Most groups in a list that an Atropos environment sends."""

MAX_KEY = 1000


class PushedRollout(Wire):
    """One completion that was sampled elsewhere.

    `token_ids` `[T]` follow the group's prompt. `sampled` `[T]` is 1 where the policy sampled the
    token; empty: it sampled all. `logprobs` `[T]` are the sampler's, in nats, and are read where
    `sampled` is 1; empty: unknown, taken to be the trainer's own. `versions` are the job's weights
    that sampled it: one version for all tokens, or `[T]`; empty: unknown.

    `reward` None: no reward applies, and the rollout is not trained on. `advantages` `[T]` replace
    the advantage that Hone computes from the group's rewards. `messages` are shown to people.
    `finish_reason` "length": it was cut off.
    """

    token_ids: TokenIds
    sampled: Mask = Mask()
    logprobs: Logprobs = Logprobs()
    versions: int | TokenIds = TokenIds()
    reward: Reported | None
    advantages: Logprobs = Logprobs()
    messages: Conversation = ()
    finish_reason: Literal["stop", "length"] = "stop"


class PushedGroup(Wire):
    """`POST /v1/jobs/{id}/groups`: completions of one prompt, which are compared with each other.

    The prompt is token ids, or text or chat messages, which become token ids as in the sampler;
    with both, the token ids count and the messages are shown to people. The same `key` with the
    same body gives the same answer, and with another body is refused (409). Without a key, the
    same body is the same group until that is trained.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "key": "episode-17",
                    "prompt_token_ids": [1, 5, 9],
                    "rollouts": [
                        {
                            "token_ids": [7, 2],
                            "logprobs": [-0.41, -0.02],
                            "versions": 4,
                            "reward": 1.0,
                        },
                        {
                            "token_ids": [8, 2],
                            "logprobs": [-1.3, -0.05],
                            "versions": 4,
                            "reward": 0.0,
                        },
                    ],
                }
            ]
        }
    )

    key: str | None = Field(default=None, min_length=1, max_length=MAX_KEY)
    prompt: str | Conversation | None = None
    prompt_token_ids: TokenIds = TokenIds()
    rollouts: tuple[PushedRollout, ...] = Field(min_length=1, max_length=MAX_ROLLOUTS)


class GroupAccepted(Wire):
    """The group is on disk, and will be trained on as the job's group `number`, from 1."""

    job_id: JobId
    number: int


class GroupCounts(Wire):
    """`GET /v1/jobs/{id}/groups`: `accepted` groups are `trained`, `waiting` for their step or in
    the step under way, or `dropped`: too stale when their step began.

    The weights of `version` are the newest that serve. `room` more groups are accepted now, and
    step `next_step` would train the next one.
    """

    job_id: JobId
    accepted: int
    trained: int
    waiting: int
    dropped: int
    version: int
    next_step: int
    room: int


class FromAtropos(Wire):
    """A body of Atropos, with Atropos' names. Other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class RegisterEnv(FromAtropos):
    """`POST /register-env`."""

    max_token_length: int = Field(ge=1, le=1 << 31)
    desired_name: str | None = Field(default=None, max_length=1000)
    weight: float = Field(default=1.0, ge=0, le=1e30)
    group_size: int = Field(ge=1)
    min_batch_allocation: float | None = None


class EnvRegistered(Wire):
    """`status` is "success", or tells the environment to ask again; then the other fields are
    None."""

    status: str
    env_id: int | None = None
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: int | None = None
    checkpoint_interval: int | None = None
    num_steps: int | None = None


class EnvId(FromAtropos):
    """The body of `GET /status-env`."""

    env_id: int


class ScoredData(FromAtropos):
    """`POST /scored_data`: a group `[G]`, each of `tokens` `[T]` with its prompt. `masks` are the
    tokens where the policy sampled them, else -100. `inference_logprobs` and `advantages` are as
    long as `tokens`; log-probs count only where the policy sampled."""

    tokens: tuple[TokenIds, ...] = Field(min_length=1, max_length=MAX_ROLLOUTS)
    masks: tuple[TokenIds, ...] = Field(max_length=MAX_ROLLOUTS)
    scores: tuple[Reported, ...] = Field(max_length=MAX_ROLLOUTS)
    advantages: tuple[Logprobs, ...] | None = Field(default=None, max_length=MAX_ROLLOUTS)
    inference_logprobs: tuple[Logprobs, ...] | None = Field(default=None, max_length=MAX_ROLLOUTS)
    messages: tuple[Conversation, ...] | None = Field(default=None, max_length=MAX_ROLLOUTS)
    overrides: tuple[dict[str, Plain] | None, ...] | None = Field(
        default=None, max_length=MAX_ROLLOUTS
    )
    env_id: int | None = None
    images: Plain = None
    distill_token_ids: Plain = None
    distill_logprobs: Plain = None


class ScoredDataList(RootModel[Annotated[tuple[ScoredData, ...], Field(max_length=MAX_GROUPS)]]):
    """`POST /scored_data_list`."""


class DataReceived(Wire):
    """`status` is "received"; `groups_processed` counts the groups of a list."""

    status: str = "received"
    groups_processed: int = 1


class AtroposInfo(Wire):
    """`GET /info`: completions of a step, and the most tokens of prompt and completion."""

    batch_size: int
    max_token_len: int


class AtroposWandb(Wire):
    """`GET /wandb_info`."""

    group: str | None
    project: str | None


class AtroposStatus(Wire):
    """`GET /status`: the step that was trained last, and the groups that are not trained yet."""

    current_step: int
    queue_size: int


class EnvStatus(AtroposStatus):
    """`GET /status-env`. All environments of a job have one queue."""

    env_weight: float
    unallocated_fraction: float = 1.0
    self_queue_size: int
    max_group_size: int
