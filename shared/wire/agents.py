"""Agents: their conversations with the policy, recorded as the tokens that were sampled; and the
episodes of a job with `[environment] kind = "worker"`, which a worker elsewhere takes by lease,
and reports what each one earned."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator

from shared.documented import Plain
from shared.wire.base import JobId, Message, Reported, Wire
from shared.wire.rollouts import RolloutGroup

WorkerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,99}$")]

MetricName = Annotated[str, Field(min_length=1, max_length=100)]

LeaseId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class LeaseEpisodes(Wire):
    """`POST /v1/episodes/lease`: takes up to `num` episodes, of `job_id` or of any job. If none is
    offered, the answer waits up to `wait_s` seconds for one."""

    worker: WorkerName
    job_id: JobId | None = None
    num: int = Field(default=1, ge=1, le=1024)
    wait_s: float = Field(default=0.0, ge=0, le=60)


class LeasedEpisode(Wire):
    """One rollout for an agent. `id` is of this lease alone: an episode whose worker died has
    another one at the next worker. `prompt` is what the job shows of `row` to the model.

    The agent calls the model at the orchestrator's URL with `path` behind it (OpenAI's API), by
    `api_key`, which names the rollout. It has `deadline_s` seconds. The lease ends after `lease_s`
    seconds in which it is not renewed.
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
    """What was taken; empty if nothing was offered in time."""

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


class EpisodeResult(Wire):
    """`POST /v1/episodes/{id}/result`: what the episode earned. `reward` is a number, a list with
    one entry per answer of the model, in order, or a table by the ids of answers, in which missing
    answers earn nothing of their own. The reward of a list or table is the sum of its numbers.
    None: no reward applies.

    `error` says why the agent failed, in place of a reward. `metrics` are numbers of the agent's
    own, of which the job's metrics show the means.
    """

    reward: Reported | tuple[Reported | None, ...] | dict[str, Reported | None] | None = None
    error: str | None = Field(default=None, min_length=1, max_length=4000)
    metrics: dict[MetricName, Reported] = Field(default={}, max_length=64)


class ResultTaken(Wire):
    """`taken`: the result counts. Else the lease had ended, as `unwanted` of `LeasesRenewed` says.
    A repeated result has the first one's answer."""

    id: LeaseId
    taken: bool


class ChatRequest(Wire):
    """What a turn of a conversation answers, in the words of OpenAI's chat completions.
    `chat_template_kwargs` and `stop_token_ids` are vLLM's. `tool_choice` "auto" needs
    HONE_TOOL_PARSER."""

    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[dict[str, Plain], ...] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Plain] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None

    @field_validator("messages")
    @classmethod
    def _text_only(cls, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {index} has no 'role'")
            content = message.get("content")
            parts = cast(list[Any], content if isinstance(content, list) else [])
            if not (content is None or isinstance(content, str | list)) or not all(
                isinstance(part, dict) and isinstance(cast(dict[str, Any], part).get("text"), str)
                for part in parts
            ):
                raise ValueError(
                    f"the 'content' of message {index} is no text; a session records text only"
                )
        return messages


class SessionRecord(Wire):
    """`GET /sessions/{name}`: an open session's rollout so far, as a group of one; None while no
    client has an answer. `waits` turns are under way."""

    name: str
    job_id: JobId
    group: RolloutGroup | None
    waits: int
