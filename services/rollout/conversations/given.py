"""The tokens of an answer that is given, as the model would have sampled it after the prompt: for
supervised steps.

`Engine.encode` gives the prompt's tokens, so training and sampling see the same. The answer's
tokens follow them, up to the end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from services.rollout.engine import BadPrompt
from shared.wire import Message

TEXT_KEYS = frozenset({"role", "content", "weight"})
"""Keys of a message that is text alone; OpenAI's `weight` says whether it is learned."""


def answer_ids(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    answer: str | Message,
    template_args: Mapping[str, Any],
    ends: Collection[int],
) -> list[int]:
    """Returns the token ids `[T]` of the answer. `ends` are the end-of-sequence tokens. Raises
    BadPrompt for an answer that the model cannot give after the prompt."""
    if isinstance(prompt, str):
        if not isinstance(answer, str):
            raise BadPrompt("the prompt is text and the answer a message; expected text too")
        return _ended(_after(tokenizer, prompt, answer, special=True), tokenizer, ends)
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    head = _rendered(tokenizer, prompt, template_args, answering=True)
    whole = _rendered(tokenizer, [*prompt, message], template_args, answering=False)
    if whole.startswith(head):
        text = whole.removeprefix(head)
    elif set(message) <= TEXT_KEYS and isinstance(message.get("content"), str):
        text = message["content"]  # a template that writes an earlier answer otherwise
    else:
        raise BadPrompt(
            "the model's chat template does not write the answer after the head of an answer, and "
            f"the answer has {', '.join(sorted(set(message) - TEXT_KEYS)) or 'no text'}; expected "
            "an answer that is text alone"
        )
    return _ended(_after(tokenizer, head, text, special=False), tokenizer, ends)


def _rendered(
    tokenizer: Any,
    messages: Sequence[Message],
    template_args: Mapping[str, Any],
    *,
    answering: bool,
) -> str:
    options = {**template_args, "add_generation_prompt": answering, "tokenize": False}
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # the template is the model's code, on a job's data
        raise BadPrompt(
            f"the model's chat template refused the messages: {type(error).__name__}: {error}"
        ) from error


def _after(tokenizer: Any, head: str, text: str, *, special: bool) -> list[int]:
    """Returns the tokens of `text` after `head`: what the tokens of both have after the head's, or
    else the text's own, because the model sampled the head's tokens as they are."""
    head_ids = tokenizer.encode(head, add_special_tokens=special)
    both = tokenizer.encode(head + text, add_special_tokens=special)
    if both[: len(head_ids)] == head_ids:
        return both[len(head_ids) :]
    return tokenizer.encode(text, add_special_tokens=False)


def _ended(ids: list[int], tokenizer: Any, ends: Collection[int]) -> list[int]:
    """Returns the ids up to the last end-of-sequence token: nothing is sampled after it. Without
    one the tokenizer's own is added."""
    last = max((position for position, id in enumerate(ids) if id in ends), default=None)
    if last is not None:
        return ids[: last + 1]
    end = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]
