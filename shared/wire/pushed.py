"""Groups that were sampled and scored elsewhere, for a job with `[environment] kind = "pushed"`: as
Hone takes them, and as Atropos' `atroposlib` 0.4 sends them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, RootModel

from shared.documented import Plain
from shared.wire.base import JobId, Message, Reported, Wire
from shared.wire.packed import Logprobs, Mask, TokenIds

MAX_ROLLOUTS = 1024

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
    messages: tuple[Message, ...] = ()
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
    prompt: str | tuple[Message, ...] | None = None
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
    """A body of Atropos, by Atropos' names. Its other fields change nothing here."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class RegisterEnv(FromAtropos):
    """`POST /register-env`."""

    max_token_length: int = Field(ge=1, le=1 << 31)
    desired_name: str | None = None
    weight: float = Field(default=1.0, ge=0, le=1e30)
    group_size: int = Field(ge=1)
    min_batch_allocation: float | None = None


class EnvRegistered(Wire):
    """`status` is "success", or says that the environment is to ask again; then the other fields
    are None."""

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

    tokens: tuple[TokenIds, ...] = Field(min_length=1)
    masks: tuple[TokenIds, ...]
    scores: tuple[Reported, ...]
    advantages: tuple[Logprobs, ...] | None = None
    inference_logprobs: tuple[Logprobs, ...] | None = None
    messages: tuple[tuple[Message, ...], ...] | None = None
    overrides: tuple[dict[str, Plain] | None, ...] | None = None
    env_id: int | None = None
    images: Plain = None
    distill_token_ids: Plain = None
    distill_logprobs: Plain = None


class ScoredDataList(RootModel[tuple[ScoredData, ...]]):
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
