"""Groups that were sampled and scored elsewhere, for a job with `[environment] kind = "pushed"`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
