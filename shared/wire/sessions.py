"""Conversations of agents that speak OpenAI's API, recorded as the tokens that were sampled."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field, ValidationInfo, field_validator

from shared.documented import Plain
from shared.wire.base import Fencing, JobId, Message, Wire
from shared.wire.packed import TokenIds
from shared.wire.rollouts import FinishReason, Rollout, Sampling


class ChatRequest(Wire):
    """`POST /v1/chat/completions` of a recorded session, in OpenAI's shape. OpenAI's fields that
    are missing here are refused: they would sample from a distribution that training cannot compute
    again.

    `chat_template_kwargs`, `top_k`, `min_p` and `stop_token_ids` are vLLM's. `tool_choice` "auto"
    needs HONE_TOOL_PARSER. With `stream` the answer comes in OpenAI's chunks, after it is complete.
    `user`, `metadata` and `store` are ignored.
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

    @field_validator("frequency_penalty", "presence_penalty", mode="before")
    @classmethod
    def _no_penalty(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int | float) and value != 0:
            raise ValueError(
                f"a recorded session cannot use {info.field_name}: training could not compute it "
                "again; leave it out"
            )
        return value

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
    """An answer of the policy: `num_tokens` tokens of the rollout from index `start` on, sampled
    with `sampling`."""

    start: int
    num_tokens: int
    finish_reason: FinishReason
    sampling: Sampling


class Conversation(Wire):
    """An agent's conversation with the policy, as tokens. `prompt` are the messages before the
    first answer, and `prompt_token_ids` their tokens by the chat template with `tools` and
    `template_args`. All later tokens are in `rollout`; its `sampled` tokens are the answers, listed
    in `turns`.

    `because` is why it does not continue the session's previous conversation; "" for the first.
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
    attempt and epoch; without `job_id`, by weights of no job. The sampler `replica` keeps it.

    A new conversation begins when the agent's messages do not extend the recorded ones; its
    `because` says why. No answer is in two conversations as sampled tokens.
    """

    id: str
    job_id: JobId | None = None
    replica: str = ""
    conversations: tuple[Conversation, ...]


class SessionDeleted(Wire):
    """`DELETE /sessions/{id}`: the session is forgotten, if there was one."""

    id: str
