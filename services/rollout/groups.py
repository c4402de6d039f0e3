"""The group of one request: its prompt as tokens, the completions, and in a conversation each
completion as a message.

A request is a turn of a conversation if it has `tools` or `known`. The caller keeps the
conversation: it sends all messages, and the tokens that it already has (`known`). This process
stores nothing of it, so any sampler can answer any turn.

Sampled tokens are never tokenized again. When a conversation continues, only the text that the chat
template writes after the last answer is tokenized, and appended to the tokens:

    prompt  answer, as sampled  end of the answer, tool's message, head of the next answer
                                ^ tokenized now

The template renders whole conversations. So that text is the difference of two renderings: of the
messages up to the answer, and of all messages. In both, a mark replaces the answer's text, because
templates rewrite that text (they strip it), and so it is not what was sampled.

For supervised steps an answer is given. `answer_ids` returns its tokens as the model would have
sampled them after the prompt, up to the end-of-sequence token. `Engine.encode` gives the prompt's
tokens, so training and sampling see the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError

from services.rollout.engine import Adapter, BadPrompt, Chat, Engine, Overlong, failed_rollout
from services.rollout.running import Running, owner_of
from shared.errors import BadRequest
from shared.explain import sentences
from shared.wire import (
    ChatRequest,
    GenerateRequest,
    Logprobs,
    Message,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenIds,
)
from shared.wire.messages import for_template, normalized_one

MARK = "hone-answer-5b1f0c"
"""Replaces the text of an answer. No template looks for it, and it has no spaces at its ends, which
templates strip."""

THOUGHT = "hone-thought-5b1f0c"
"""Replaces the reasoning of an answer, to find out whether the template keeps it."""

END_OF_THOUGHTS = "</think>"


class PrefixChanged(Exception):
    """The chat template renders earlier messages differently after further messages."""


async def prompt_tokens(chat: Chat, request: ChatRequest) -> list[int]:
    """Returns the token ids `[T]` of all messages, ready for the answer."""
    return chat.tokenize(await chat.render(request, request.messages, answering=True))


async def next_prompt(
    chat: Chat, request: ChatRequest, num_known: int, known_ids: list[int]
) -> tuple[list[int], str]:
    """Returns the token ids `[T]` of all messages, ready for the answer. They begin with
    `known_ids`, the tokens of the first `num_known` messages, and the text is ""; otherwise the
    text is the reason why not."""
    try:
        between = await tokens_after(chat, request, num_known, known_ids[-1])
    except PrefixChanged as error:
        return await prompt_tokens(chat, request), str(error)
    return [*known_ids, *between], ""


async def tokens_after(
    chat: Chat, request: ChatRequest, num_known: int, last_token: int
) -> list[int]:
    """Returns the token ids `[T]` between the answer that is message `num_known - 1`, whose last
    sampled token is `last_token`, and the next answer. Raises PrefixChanged."""
    earlier, answer = request.messages[: num_known - 1], request.messages[num_known - 1]
    thoughts = ("reasoning", "reasoning_content")
    shown_answer = {name: value for name, value in answer.items() if name not in thoughts}
    marked = (*earlier, {**shown_answer, "content": _marked(answer)})
    shown = await chat.render(request, marked, answering=False)
    everything = (*marked, *request.messages[num_known:])
    shown_whole = await chat.render(request, everything, answering=True)
    if THOUGHT in shown and THOUGHT not in shown_whole:
        raise PrefixChanged("the chat template drops an answer's reasoning once messages follow")
    known, whole = _after_mark(shown), _after_mark(shown_whole)
    if not whole.startswith(known):
        raise PrefixChanged("the chat template renders an answer differently once messages follow")
    ending = await _ending(chat, request, earlier, known, chat.special_text(last_token))
    return chat.tokenize(ending + whole[len(known) :])


async def _ending(
    chat: Chat, request: ChatRequest, earlier: Sequence[Message], known: str, sampled_end: str
) -> str:
    """Returns the end of the answer as the template writes it, from where sampling ended. That is
    after the answer's end token. If the answer was cut off, or ended with a token that the template
    does not write, it is after the answer's text. In `known`, calls of tools may follow the mark,
    so then the answer is rendered without these."""
    if sampled_end and sampled_end in known:
        return known.rpartition(sampled_end)[2]
    plain: Message = {"role": "assistant", "content": MARK}
    text = await chat.render(request, (*earlier, plain), answering=False)
    if MARK not in text:
        raise PrefixChanged("the chat template does not render the text of an answer")
    return _after_mark(text)


def _marked(answer: Message) -> str:
    """Returns the text that replaces an answer's: the mark, after the reasoning if any."""
    has_thoughts = END_OF_THOUGHTS in str(answer.get("content") or "")
    return f"<think>\n{THOUGHT}\n{END_OF_THOUGHTS}\n\n{MARK}" if has_thoughts else MARK


def _after_mark(text: str) -> str:
    """Returns the text after the mark; all text if the template leaves out the text of an answer
    that calls tools."""
    return text.rpartition(MARK)[2]


NUM_END_TOKENS = 16
"""Tokens at a prompt's end whose text is returned with its rollouts: more than a template writes to
open an answer or its reasoning."""

NO_ROOM = "its first {} tokens were cut off, and known tokens with them"


async def sampled_group(
    request: GenerateRequest, running: Running, adapter: Adapter | None
) -> RolloutGroup:
    """Returns the group `[G]`. If nothing can be sampled after the prompt, a job gets failed
    rollouts as data, and a request without a job gets BadPrompt."""
    engine = running.engine
    try:
        turn = conversation(request)
        group, sampling = await _prompted(request, turn, engine)
    except BadPrompt as error:
        if request.job_id is None:
            raise
        return _failed_group(request, error)
    ids = list(group.prompt_token_ids)
    if (request.prompt_logprobs or request.top_prompt_logprobs) and len(ids) > 1:
        own, *top = await engine.top_logprobs(ids, adapter, request.top_prompt_logprobs)
        top_fields = dict(zip(("prompt_top_ids", "prompt_top_logprobs"), top, strict=True))
        group = group.model_copy(update={"prompt_logprobs": Logprobs(own), **top_fields})
    constraint = await engine.chat.constraint(turn, ids) if turn and turn.is_constrained else None
    rollouts = await engine.sample(
        ids,
        sampling,
        owner="" if request.own_weights else owner_of(request),
        salt=_salt(request, running),
        deadline_s=request.deadline_s,
        adapter=adapter,
        num_top=request.top_logprobs,
        constraint=constraint,
    )
    end = engine.chat.text(ids[-NUM_END_TOKENS:])
    rollouts = tuple(rollout.model_copy(update={"prompt_end": end}) for rollout in rollouts)
    if turn:
        rollouts = await _with_messages(turn, ids, rollouts, engine)
    return group.model_copy(update={"rollouts": rollouts})


def _salt(request: GenerateRequest, running: Running) -> str:
    """Returns the key of the prefixes that are cached for these weights."""
    if request.snapshot is not None:
        return request.snapshot.adapter
    if request.own_weights:
        return "own weights"
    return running.salt(request.job_id, request.known.version if request.known else None)


async def given_group(request: GenerateRequest, engine: Engine) -> RolloutGroup:
    """Returns the group `[G]` whose completions are `request.answers`, which no weights sampled.
    For answers that the model cannot give, a job gets failed rollouts as data, and a request
    without a job gets BadPrompt."""
    if request.prompt is None:
        raise BadRequest("'answers' need a 'prompt' of text or messages, and there is none")
    try:
        ids = engine.encode(request.prompt, request.template_args)
        answers_to = _normalized_answers(request.answers)
        answers = [
            engine.encode_answer(request.prompt, answer, request.template_args)
            for answer in answers_to
        ]
        if not all(answers):
            raise BadPrompt("the answer has no tokens; expected at least one")
        _check_prompt(ids, max(map(len, answers)), engine, "an answer of")
    except BadPrompt as error:
        if request.job_id is None:
            raise
        return _failed_group(request, error)
    rollouts = tuple(
        Rollout(text=_text(answer), token_ids=TokenIds(of_answer), finish_reason="stop")
        for answer, of_answer in zip(answers_to, answers, strict=True)
    )
    return RolloutGroup(prompt_token_ids=TokenIds(ids), rollouts=rollouts)


def _normalized_answers(answers: Sequence[str | Message]) -> list[str | Message]:
    try:
        return [
            each if isinstance(each, str) else normalized_one(each, f"answer {index}")
            for index, each in enumerate(answers)
        ]
    except ValueError as error:
        raise BadPrompt(str(error)) from error


def _text(answer: str | Message) -> str:
    text: Any = answer if isinstance(answer, str) else answer.get("content")
    return text if isinstance(text, str) else ""


def conversation(request: GenerateRequest) -> ChatRequest | None:
    """Returns the conversation that the request is a turn of, or None. Raises BadRequest if it has
    no messages or `known` does not fit them, and BadPrompt for messages that are not text."""
    known = request.known
    if not request.tools and known is None and request.json_schema is None:
        return None
    messages = request.prompt
    if messages is None or isinstance(messages, str):
        raise BadRequest(
            "'tools', 'known' and 'json_schema' need a conversation; expected messages as 'prompt'"
        )
    if known and not known.token_ids:
        raise BadRequest("'known.token_ids' is empty; expected the tokens up to an answer's last")
    if known and known.num_messages >= len(messages):
        raise BadRequest(
            f"'known.num_messages': got {known.num_messages} of {len(messages)} messages, expected "
            "fewer: an answer is sampled after new messages"
        )
    if known and (role := messages[known.num_messages - 1].get("role")) != "assistant":
        raise BadRequest(
            f"'known' ends with message {known.num_messages - 1}, whose role is {role!r}; expected "
            "'assistant'"
        )
    try:
        return ChatRequest(
            messages=messages,
            tools=request.tools or None,
            tool_choice=request.tool_choice if request.tools else None,
            parallel_tool_calls=request.parallel_tool_calls or not request.tools,
            json_schema=request.json_schema,
            chat_template_kwargs=request.template_args or None,
            stop=request.sampling.stop or None,
            stop_token_ids=request.sampling.stop_token_ids or None,
        )
    except ValidationError as error:
        faults = sentences(error, ChatRequest)
        raise BadPrompt("; ".join(fault["detail"] for fault in faults)) from error


async def _prompted(
    request: GenerateRequest, turn: ChatRequest | None, engine: Engine
) -> tuple[RolloutGroup, Sampling]:
    """Returns the group without rollouts, and how they are sampled. Raises BadPrompt if nothing can
    be sampled after the prompt."""
    ids, forked = await _prompt_ids(request, turn, engine)
    max_tokens = request.sampling.max_tokens
    if request.fit:
        max_tokens = max(min(max_tokens, engine.max_model_len - len(ids)), 1)
    num_over = len(ids) + max_tokens - engine.max_model_len
    is_cut = request.truncate_prompt and 0 < num_over < len(ids)
    if is_cut:
        ids = ids[num_over:]
        forked = forked or (NO_ROOM.format(num_over) if request.known else "")
    _check_prompt(ids, max_tokens, engine)
    prompted = RolloutGroup(
        prompt_token_ids=TokenIds(ids), rollouts=(), overlong=is_cut, forked=forked
    )
    return prompted, request.sampling.model_copy(update={"max_tokens": max_tokens})


async def _prompt_ids(
    request: GenerateRequest, turn: ChatRequest | None, engine: Engine
) -> tuple[list[int], str]:
    """Returns the prompt's token ids `[T]`, and why they do not begin with the known ones ("": they
    do). Raises BadRequest for a request without a prompt or with two."""
    if (request.prompt is None) == (request.prompt_token_ids is None):
        raise BadRequest("give one of 'prompt' and 'prompt_token_ids', not both or neither")
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids), ""
    if turn is None:
        assert request.prompt is not None
        return engine.encode(request.prompt, request.template_args), ""
    if request.known is None:
        return await prompt_tokens(engine.chat, turn), ""
    known = request.known
    return await next_prompt(engine.chat, turn, known.num_messages, list(known.token_ids))


async def _with_messages(
    turn: ChatRequest, ids: list[int], rollouts: tuple[Rollout, ...], engine: Engine
) -> tuple[Rollout, ...]:
    """Returns the rollouts with their answers. A rollout that went wrong has none."""
    answered = [rollout for rollout in rollouts if not rollout.went_wrong]
    messages = iter(await engine.chat.parsed(turn, ids, answered))
    earlier = frozenset(call.get("id", "") for message in turn.messages for call in _calls(message))
    return tuple(
        rollout
        if rollout.went_wrong
        else rollout.model_copy(update={"messages": (_with_own_ids(next(messages), earlier),)})
        for rollout in rollouts
    )


def _with_own_ids(message: Message, earlier: frozenset[str]) -> Message:
    """Returns the message with another id for each call whose id the conversation has already:
    models that write the ids themselves may repeat one."""
    taken, calls = set(earlier), []
    for call in _calls(message):
        id = call["id"]
        while id in taken:
            id = f"{call['id']}-{len(taken)}"
        taken.add(id)
        calls.append({**call, "id": id})
    return {**message, "tool_calls": calls} if calls else message


def _calls(message: Message) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], message.get("tool_calls") or [])


def _check_prompt(
    ids: list[int], max_tokens: int, engine: Engine, what: str = "'max_tokens'"
) -> None:
    if not ids:
        raise BadPrompt("the prompt has no tokens")
    outside = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= outside < engine.vocab_size:
        raise BadPrompt(f"'prompt_token_ids': got {outside}, expected 0 to {engine.vocab_size - 1}")
    total = len(ids) + max_tokens
    if total > engine.max_model_len:
        raise Overlong(
            f"a prompt of {len(ids)} tokens with {what} {max_tokens} makes {total}; expected at "
            f"most {engine.max_model_len} (the job's max_model_len, or the model's own limit)"
        )


def _failed_group(request: GenerateRequest, error: BadPrompt) -> RolloutGroup:
    """Returns the group of a prompt after which nothing can be sampled. Each rollout says why."""
    num = len(request.answers) or request.sampling.n
    rollouts = (failed_rollout(error.detail),) * num
    overlong = isinstance(error, Overlong)
    return RolloutGroup(prompt_token_ids=TokenIds(), rollouts=rollouts, overlong=overlong)


TEXT_KEYS = frozenset({"role", "content", "weight"})
"""Keys of a message that has only text; OpenAI's `weight` says whether it is learned."""


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
    head = rendered(tokenizer, prompt, template_args, answering=True)
    whole = rendered(tokenizer, [*prompt, message], template_args, answering=False)
    if whole.startswith(head):
        text = whole.removeprefix(head)
    elif set(message) <= TEXT_KEYS and isinstance(message.get("content"), str):
        text = message["content"]  # a template that writes an earlier answer in another way
    else:
        raise BadPrompt(
            "the model's chat template does not write the answer after the head of an answer, and "
            f"the answer has {', '.join(sorted(set(message) - TEXT_KEYS)) or 'no text'}; expected "
            "an answer that is only text"
        )
    return _ended(_after(tokenizer, head, text, special=False), tokenizer, ends)


def rendered(
    tokenizer: Any,
    messages: Sequence[Message],
    template_args: Mapping[str, Any],
    *,
    answering: bool,
) -> str:
    """Returns the messages as the chat template renders them; if `answering`, with the head of the
    next answer, unless `template_args` leave it out."""
    options = {"add_generation_prompt": True, **template_args, "tokenize": False}
    if not answering:
        options["add_generation_prompt"] = False
    try:
        return tokenizer.apply_chat_template(for_template(messages), **options)
    except Exception as error:  # the template is code of the model, and runs on a job's data
        raise BadPrompt(
            f"the model's chat template refused the messages: {type(error).__name__}: {error}"
        ) from error


def _after(tokenizer: Any, head: str, text: str, *, special: bool) -> list[int]:
    """Returns the tokens of `text` after `head`: the tokens of both without the head's. If they do
    not begin with the head's, which are fixed, the tokens of the text alone."""
    head_ids = tokenizer.encode(head, add_special_tokens=special)
    both = tokenizer.encode(head + text, add_special_tokens=special)
    if both[: len(head_ids)] == head_ids:
        return both[len(head_ids) :]
    return tokenizer.encode(text, add_special_tokens=False)


def _ended(ids: list[int], tokenizer: Any, ends: Collection[int]) -> list[int]:
    """Returns the ids up to the last end-of-sequence token: nothing is sampled after it. Without
    one the tokenizer's end-of-sequence token is added."""
    last = max((position for position, id in enumerate(ids) if id in ends), default=None)
    if last is not None:
        return ids[: last + 1]
    end = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]
