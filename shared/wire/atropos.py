"""Bodies of Atropos' trajectory API, as `atroposlib` 0.4 sends and reads them. Field names are
Atropos'; what it sends besides is ignored."""

from __future__ import annotations

from pydantic import ConfigDict, Field, RootModel

from shared.documented import Plain
from shared.wire.base import Message, Reported, Wire
from shared.wire.packed import Logprobs, TokenIds


class FromAtropos(Wire):
    """A body with fields that change nothing here."""

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
