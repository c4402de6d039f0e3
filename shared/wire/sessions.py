"""Conversations of agents with the policy, recorded as the tokens that were sampled."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field, field_validator

from shared.documented import Plain
from shared.wire.base import JobId, Message, Wire
from shared.wire.rollouts import RolloutGroup


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
                isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
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
