"""The group of one request: its prompt as tokens, the completions, and in a conversation each
completion as a message.

A request is a turn of a conversation if it has `tools` or `known`. The caller keeps the
conversation: it sends all messages, and the tokens it already has (`known`). Nothing of it stays in
this process, so any sampler can answer any turn.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import ValidationError

from services.rollout.conversations.continuing import next_prompt, prompt_tokens
from services.rollout.engine import Adapter, BadPrompt, Engine, Overlong, failed_rollout
from services.rollout.fencing import owner_of
from services.rollout.running import Running
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

NUM_END_TOKENS = 16
"""Tokens at a prompt's end whose text goes with its rollouts: more than a template writes to open
an answer or a thought."""

NO_ROOM = "its first {} tokens were cut off, and known tokens with them"


async def sampled_group(
    request: GenerateRequest, running: Running, adapter: Adapter | None
) -> RolloutGroup:
    """Returns the group `[G]`. If nothing can be sampled after the prompt, a job gets failed
    rollouts as data, and a request by hand gets BadPrompt."""
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
        found = dict(zip(("prompt_top_ids", "prompt_top_logprobs"), top, strict=True))
        group = group.model_copy(update={"prompt_logprobs": Logprobs(own), **found})
    rollouts = await engine.sample(
        ids,
        sampling,
        owner="" if request.own_weights else owner_of(request),
        salt=_salt(request, running),
        deadline_s=request.deadline_s,
        adapter=adapter,
        num_top=request.top_logprobs,
    )
    end = engine.chat.text(ids[-NUM_END_TOKENS:])
    rollouts = tuple(rollout.model_copy(update={"prompt_end": end}) for rollout in rollouts)
    if turn:
        rollouts = await _with_messages(turn, ids, rollouts, engine)
    return group.model_copy(update={"rollouts": rollouts})


def _salt(request: GenerateRequest, running: Running) -> str:
    """Returns the key of the prefixes that these weights have cached."""
    if request.snapshot is not None:
        return request.snapshot.adapter
    if request.own_weights:
        return "own weights"
    return running.salt(request.job_id, request.known.version if request.known else None)


async def given_group(request: GenerateRequest, engine: Engine) -> RolloutGroup:
    """Returns the group `[G]` whose completions are `request.answers`, sampled by no weights. Of
    answers that the model cannot give, a job gets failed rollouts as data, and a request by hand
    gets BadPrompt."""
    if request.prompt is None:
        raise BadRequest("'answers' are to a 'prompt' of text or messages, and there is none")
    try:
        ids = engine.encode(request.prompt, request.template_args)
        answers = [
            engine.encode_answer(request.prompt, answer, request.template_args)
            for answer in request.answers
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
        for answer, of_answer in zip(request.answers, answers, strict=True)
    )
    return RolloutGroup(prompt_token_ids=TokenIds(ids), rollouts=rollouts)


def _text(answer: str | Message) -> str:
    text: Any = answer if isinstance(answer, str) else answer.get("content")
    return text if isinstance(text, str) else ""


def conversation(request: GenerateRequest) -> ChatRequest | None:
    """Returns the conversation that the request is a turn of, or None. Raises BadRequest if it has
    no messages or `known` does not fit them, and BadPrompt for messages that are not text."""
    known = request.known
    if not request.tools and known is None:
        return None
    messages = request.prompt
    if messages is None or isinstance(messages, str):
        raise BadRequest("'tools' and 'known' are of a conversation; expected messages as 'prompt'")
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
    """Returns the prompt's token ids `[T]`, and why they do not begin with the known ones. Raises
    BadRequest for a request without a prompt or with two."""
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
            f"a prompt of {len(ids)} tokens with {what} {max_tokens} makes {total}; the model "
            f"holds {engine.max_model_len}"
        )


def _failed_group(request: GenerateRequest, error: BadPrompt) -> RolloutGroup:
    """Returns the group of a prompt after which nothing can be sampled. Each rollout says why."""
    num = len(request.answers) or request.sampling.n
    rollouts = (failed_rollout(error.detail),) * num
    overlong = isinstance(error, Overlong)
    return RolloutGroup(prompt_token_ids=TokenIds(), rollouts=rollouts, overlong=overlong)
