"""A partner for conversations at the `Chat` seam: a template like Qwen's, a token per character,
and answers that were sampled in other tokens than their text would be tokenized to."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.rollout.engine import Adapter, Constraint
from shared.wire import ChatRequest, FinishReason, Message, Rollout, Span

BEGIN, END = "<|im_start|>", "<|im_end|>"
SPECIAL = {BEGIN: 1, END: 2}
PAIR = 1 << 16
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def tokens(text: str) -> list[int]:
    parts = re.split(f"({re.escape(BEGIN)}|{re.escape(END)})", text)
    return [id for part in parts for id in ([SPECIAL[part]] if part in SPECIAL else map(ord, part))]


def sampled_tokens(text: str) -> list[int]:
    """The text's tokens, the first two characters as one, and the end."""
    pair = [PAIR + ord(text[0]) * 256 + ord(text[1])]
    return [*pair, *tokens(text[2:]), SPECIAL[END]]


def text_of(ids: Sequence[int]) -> str:
    names = {id: text for text, id in SPECIAL.items()}
    return "".join(
        names.get(id) or (chr(id) if id < PAIR else chr((id - PAIR) // 256) + chr(id % 256))
        for id in ids
    )


def message_of(text: str) -> Message:
    """The answer with its calls, which are `call-1` and so on in each answer."""
    found = [json.loads(call) for call in CALL.findall(text)]
    if not found:
        return {"role": "assistant", "content": text}
    calls = [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for number, call in enumerate(found, 1)
    ]
    said = text.partition("<tool_call>")[0]
    return {"role": "assistant", "content": said or None, "tool_calls": calls}


@dataclass
class FakeChat:
    """Answers with `replies` in turn. `asked` are the prompts it answered, as tokens; `sample`
    samples them, and says by which weights. If it `forgets`, its template renders an answer
    otherwise once messages follow, before the answer's text and, if `forgets` "after", behind. Each
    token was drawn from `kept` tokens, itself and those after it; 0: from all."""

    sample: Callable[[list[int], str, Adapter | None], Awaitable[tuple[Span, ...]]]
    replies: list[str] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    forgets: Literal["", "before", "after"] = ""
    kept: int = 0

    async def render(
        self, request: ChatRequest, messages: Sequence[Message], *, answering: bool
    ) -> str:
        text = f"{BEGIN}tools\n{json.dumps(request.tools)}{END}\n" if request.tools else ""
        for message in messages:
            said = str(message.get("content") or "").strip()
            if message["role"] == "assistant" and message is not messages[-1]:
                said = {"": said, "before": f"...{said}", "after": f"{said}..."}[self.forgets]
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments = json.loads(function["arguments"])
                call_text = json.dumps({"name": function["name"], "arguments": arguments})
                said += f"\n<tool_call>\n{call_text}\n</tool_call>"
            text += f"{BEGIN}{message['role']}\n{said}{END}\n"
        return text + (f"{BEGIN}assistant\n" if answering else "")

    def tokenize(self, text: str) -> list[int]:
        return tokens(text)

    def text(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def special_text(self, token_id: int) -> str:
        return next((text for text, id in SPECIAL.items() if id == token_id), "")

    async def constraint(self, request: ChatRequest, prompt_token_ids: list[int]) -> Constraint:
        return {"json": request.json_schema}

    async def parsed(
        self, request: ChatRequest, prompt_token_ids: list[int], rollouts: Sequence[Rollout]
    ) -> list[Message]:
        self.asked.append(prompt_token_ids)
        return [message_of(rollout.text) for rollout in rollouts]
