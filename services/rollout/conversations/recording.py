"""One conversation as it is recorded: its messages as they were sent, and their tokens.

The tokens are one row: the prompt, then the answers as they were sampled, and between the answers
the messages of tools and users as the chat template writes them. After each answer the row is a
state. The next request goes on from a state if its messages begin with the state's messages.

Sampled tokens are never tokenized again. When a conversation goes on, only the text that the chat
template writes after the last answer is tokenized, and appended to the row:

    prompt  answer, as sampled  end of the answer, tool's message, head of the next answer
                                ^ tokenized now

The template renders whole conversations. So that text is the difference of two renderings: of the
messages up to the answer, and of all messages. In both, a mark replaces the answer's text, because
templates rewrite that text (they strip it, or drop thoughts), and so it is not what was sampled.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine import Answer, Chat
from shared.token_row import TokenRow
from shared.wire import ChatRequest, Conversation, Message, Rollout, Sampling, Turn
from shared.wire.packed import TokenIds

COMPARED = ("role", "content", "name", "tool_calls", "tool_call_id")
"""The fields in which two equal messages agree. Clients add and drop other fields."""

MARK = "hone-answer-5b1f0c"
"""Replaces the text of an answer. No template looks for it, and it has no spaces at its ends, which
templates strip."""


@dataclass(frozen=True)
class State:
    """A conversation up to an answer: its number of messages, and its number of tokens after the
    prompt."""

    num_messages: int
    num_tokens: int


class Recorded:
    """One conversation. `because` says why it does not go on from an earlier one."""

    def __init__(self, request: ChatRequest, prompt_token_ids: list[int], because: str) -> None:
        self.messages: list[Message] = list(request.messages)
        self.states: list[State] = []
        self._num_prompt_messages = len(request.messages)
        self._tools = request.tools or ()
        self._template_args = request.chat_template_kwargs or {}
        self._prompt_token_ids = array("i", prompt_token_ids)
        self._row = TokenRow()
        self._turns: list[Turn] = []
        self._last: Rollout | None = None
        self._because = because
        self._messages_bytes = json_bytes(self.messages) + json_bytes(self._tools)

    @property
    def size_bytes(self) -> int:
        """About its memory."""
        prompt_bytes = len(self._prompt_token_ids) * self._prompt_token_ids.itemsize
        return self._messages_bytes + prompt_bytes + self._row.size_bytes

    @property
    def num_tokens(self) -> int:
        return len(self._prompt_token_ids) + len(self._row)

    def token_ids(self, state: State) -> list[int]:
        """Returns all token ids `[T]` up to the end of the state's answer."""
        return [*self._prompt_token_ids, *self._row.token_ids[: state.num_tokens]]

    def extended_by(self, request: ChatRequest) -> State | None:
        """Returns the latest state that the request's messages go on from, with the same tools and
        template arguments."""
        if self._other_template(request):
            return None
        num_same = _num_same(self.messages, request.messages)
        fitting = [
            state
            for state in self.states
            if state.num_messages <= num_same and state.num_messages < len(request.messages)
        ]
        return fitting[-1] if fitting else None

    def difference(self, request: ChatRequest) -> str:
        """Returns why the request does not go on from the last answer."""
        if other := self._other_template(request):
            return f"{other} are not those of the conversation before"
        num_same = _num_same(self.messages, request.messages)
        if num_same == len(request.messages):
            return f"message {num_same - 1}, the request's last, was answered before"
        theirs, ours = _compared(request.messages[num_same]), _compared(self.messages[num_same])
        names = [name for name in COMPARED if theirs[name] != ours[name]]
        return f"message {num_same} has another {' and '.join(names)} than the one recorded"

    def add(
        self, request: ChatRequest, between: Sequence[int], answer: Answer, sampling: Sampling
    ) -> None:
        """Appends the request's messages after the last state, `between` in tokens, and its
        answer."""
        new = [*request.messages[len(self.messages) :], answer.message]
        self.messages = [*self.messages, *new]
        self._messages_bytes += json_bytes(new)
        rollout = answer.rollout
        self._row.add_given(between)
        start = len(self._row)
        self._row.add(rollout)
        self._turns.append(
            Turn(
                start=start,
                num_tokens=len(rollout.token_ids),
                finish_reason=rollout.finish_reason,
                sampling=sampling,
            )
        )
        self._last = rollout
        self.states.append(State(len(self.messages), len(self._row)))

    def conversation(self) -> Conversation:
        assert self._last is not None, "a conversation is recorded with its first answer"
        return Conversation(
            prompt=tuple(self.messages[: self._num_prompt_messages]),
            tools=self._tools,
            template_args=self._template_args,
            prompt_token_ids=TokenIds(self._prompt_token_ids),
            rollout=self._row.rollout(
                self._last.text,
                self._last.finish_reason,
                self.messages[self._num_prompt_messages :],
            ),
            turns=tuple(self._turns),
            because=self._because,
        )

    def _other_template(self, request: ChatRequest) -> str:
        if (request.tools or ()) != self._tools:
            return "the tools"
        other = (request.chat_template_kwargs or {}) != self._template_args
        return "the template arguments" if other else ""


def json_bytes(value: Any) -> int:
    """Returns about the memory of a JSON value."""
    parts: tuple[Any, ...] = ()
    if isinstance(value, dict):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        parts = tuple(value)
    return sys.getsizeof(value) + sum(map(json_bytes, parts))


def _num_same(ours: Sequence[Message], theirs: Sequence[Message]) -> int:
    """Returns with how many of the same messages both begin."""
    pairs = zip(ours, theirs, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if _compared(one) != _compared(other)),
        min(len(ours), len(theirs)),
    )


def _compared(message: Message) -> dict[str, Any]:
    """Returns the fields to compare in one form, however a client writes them: nothing is None, ""
    or left out; text may be in a list of one part; arguments of calls are JSON, spaced and ordered
    at will."""
    fields = {name: message.get(name) or "" for name in COMPARED}
    content = fields["content"]
    if isinstance(content, list) and len(content) == 1:
        fields["content"] = content[0]["text"]
    if isinstance(fields["tool_calls"], list):
        fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
    return fields


def _call(call: Any) -> Any:
    try:
        function = call["function"]
        return (call.get("id"), function["name"], json.loads(function["arguments"]))
    except (TypeError, KeyError, AttributeError, ValueError):
        return call


THOUGHT = "hone-thought-5b1f0c"
"""Replaces the thoughts of an answer, to see whether the template keeps them."""

END_OF_THOUGHTS = "</think>"


class CannotContinue(Exception):
    """The chat template renders earlier messages differently once more messages follow."""


async def prompt_tokens(chat: Chat, request: ChatRequest) -> list[int]:
    """Returns the token ids `[T]` of all messages, ready for the answer."""
    return chat.tokenize(await chat.render(request, request.messages, answering=True))


async def next_prompt(
    chat: Chat, request: ChatRequest, num_known: int, known_ids: list[int]
) -> tuple[list[int], str]:
    """Returns the token ids `[T]` of all messages, ready for the answer. They begin with
    `known_ids`, the tokens of the first `num_known` messages; else a reason comes with them."""
    try:
        between = await tokens_after(chat, request, num_known, known_ids[-1])
    except CannotContinue as error:
        return await prompt_tokens(chat, request), str(error)
    return [*known_ids, *between], ""


async def tokens_after(
    chat: Chat, request: ChatRequest, num_known: int, last_token: int
) -> list[int]:
    """Returns the token ids `[T]` between the answer that is message `num_known - 1`, whose last
    sampled token is `last_token`, and the next answer. Raises CannotContinue."""
    earlier, answer = request.messages[: num_known - 1], request.messages[num_known - 1]
    marked = (*earlier, {**_without_thoughts(answer), "content": _marked(answer)})
    shown = await chat.render(request, marked, answering=False)
    everything = (*marked, *request.messages[num_known:])
    shown_whole = await chat.render(request, everything, answering=True)
    if THOUGHT in shown and THOUGHT not in shown_whole:
        raise CannotContinue("the chat template drops an answer's thoughts once messages follow")
    known, whole = _after_mark(shown), _after_mark(shown_whole)
    if not whole.startswith(known):
        raise CannotContinue("the chat template renders an answer differently once messages follow")
    ending = await _ending(chat, request, earlier, known, chat.special_text(last_token))
    return chat.tokenize(ending + whole[len(known) :])


async def _ending(
    chat: Chat, request: ChatRequest, earlier: Sequence[Message], known: str, sampled_end: str
) -> str:
    """Returns the end of the answer as the template writes it, from where sampling ended. That is
    after the answer's end token. If the answer was cut off, or ended with a token that the template
    does not write, it is after the answer's text. In `known`, calls of tools may stand after the
    mark, so then the answer is rendered without them."""
    if sampled_end and sampled_end in known:
        return known.rpartition(sampled_end)[2]
    plain: Message = {"role": "assistant", "content": MARK}
    text = await chat.render(request, (*earlier, plain), answering=False)
    if MARK not in text:
        raise CannotContinue("the chat template does not render the text of an answer")
    return _after_mark(text)


def _marked(answer: Message) -> str:
    """Returns the text in place of an answer's: the mark, after thoughts if the answer has some."""
    has_thoughts = END_OF_THOUGHTS in str(answer.get("content") or "")
    return f"<think>\n{THOUGHT}\n{END_OF_THOUGHTS}\n\n{MARK}" if has_thoughts else MARK


def _after_mark(text: str) -> str:
    """Returns the text after the mark; all text if the template leaves out the text of an answer
    that calls tools."""
    return text.rpartition(MARK)[2]


def _without_thoughts(message: Message) -> Message:
    return {
        name: value
        for name, value in message.items()
        if name not in ("reasoning", "reasoning_content")
    }
