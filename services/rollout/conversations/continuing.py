"""From the messages of a chat to the tokens that the next answer is sampled after.

What was sampled is never tokenized again. Of a conversation that goes on, only what the chat
template writes after the last answer is tokenized, and put behind the tokens that are there:

    prompt  answer, as sampled  end of the answer, tool's message, head of the next answer
                                ^ tokenized now

The template renders whole conversations, so that part is found as a difference of two renderings:
of the messages up to the answer, and of all. In both a mark stands in for the answer's text, for
templates rewrite it (they strip it, or drop thoughts), and what was sampled is not what they write.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.engine import Chat
from shared.wire import ChatRequest, Message

MARK = "hone-answer-5b1f0c"
"""Stands in for the text of an answer: nothing that a template looks for, and no blanks at its
ends, which templates strip."""


class CannotContinue(Exception):
    """The chat template writes what came before otherwise once more messages follow."""


async def prompt_tokens(chat: Chat, request: ChatRequest) -> list[int]:
    """Returns the token ids `[T]` of all messages, ready for the answer."""
    return chat.tokenize(await chat.render(request, request.messages, answering=True))


async def tokens_after(
    chat: Chat, request: ChatRequest, num_known: int, last_token: int
) -> list[int]:
    """Returns the token ids `[T]` between `last_token`, the last one sampled for the answer that is
    message `num_known - 1`, and the next answer. Raises CannotContinue."""
    earlier, answer = request.messages[: num_known - 1], request.messages[num_known - 1]
    marked = (*earlier, {**_without_thoughts(answer), "content": MARK})
    known = _after_mark(await chat.render(request, marked, answering=False))
    everything = (*marked, *request.messages[num_known:])
    whole = _after_mark(await chat.render(request, everything, answering=True))
    if not whole.startswith(known):
        raise CannotContinue("the chat template renders an answer otherwise once messages follow")
    ending = await _ending(chat, request, earlier, known, chat.special_text(last_token))
    return chat.tokenize(ending + whole[len(known) :])


async def _ending(
    chat: Chat, request: ChatRequest, earlier: Sequence[Message], known: str, sampled_end: str
) -> str:
    """Returns how the template ends the answer, from where sampling ended: after its end token; if
    it was cut off, or ended in a way that the template does not write, from the last of its text
    on. In `known` calls of tools stand between that and the mark, so it is rendered without."""
    if sampled_end and sampled_end in known:
        return known.rpartition(sampled_end)[2]
    plain: Message = {"role": "assistant", "content": MARK}
    text = await chat.render(request, (*earlier, plain), answering=False)
    if MARK not in text:
        raise CannotContinue("the chat template does not render the text of an answer")
    return _after_mark(text)


def _after_mark(text: str) -> str:
    """Returns the text after the mark; all of it where the template leaves out the text of an
    answer that calls tools."""
    return text.rpartition(MARK)[2]


def _without_thoughts(message: Message) -> Message:
    return {
        name: value
        for name, value in message.items()
        if name not in ("reasoning", "reasoning_content")
    }
