"""The tokens of a conversation that continues.

Sampled tokens are never tokenized again. When a conversation continues, only the text that the chat
template writes after the last answer is tokenized, and appended to the tokens:

    prompt  answer, as sampled  end of the answer, tool's message, head of the next answer
                                ^ tokenized now

The template renders whole conversations. So that text is the difference of two renderings: of the
messages up to the answer, and of all messages. In both, a mark replaces the answer's text, because
templates rewrite that text (they strip it), and so it is not what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.engine import Chat
from shared.wire import ChatRequest, Message

MARK = "hone-answer-5b1f0c"
"""Replaces the text of an answer. No template looks for it, and it has no spaces at its ends, which
templates strip."""

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
