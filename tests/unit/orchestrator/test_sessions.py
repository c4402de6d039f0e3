"""Sessions of agents: the tokens and masks that they become, beside transformers' rendering."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.orchestrator.extensions.agents.sessions import Session
from services.orchestrator.extensions.environments.recording import TurnRequest
from shared.errors import BadRequest, Conflict, Gone, Unavailable
from shared.job import EnvironmentSpec
from shared.wire import ChatRequest, Message, RolloutGroup
from tests.support.rendering_sampler import (
    THINKING_TEMPLATE,
    RenderingSampler,
    Reply,
    call,
    open_session,
)

TOOLS = ({"type": "function", "function": {"name": "guess", "parameters": {"properties": {}}}},)
ASKED: Message = {"role": "user", "content": "Find it."}


def asked(*messages: Message, **more: Any) -> TurnRequest:
    return Session.asked(ChatRequest(messages=messages, **more))


class Agent:
    """Keeps its messages, as agents do."""

    def __init__(self, session: Session, *messages: Message, tools: Any = None) -> None:
        self.session, self.tools = session, tools
        self.messages: list[Message] = [*(messages or (ASKED,))]

    def request(self, **more: Any) -> TurnRequest:
        return asked(*self.messages, tools=self.tools, **more)

    async def say(self, *said: Message, key: str | None = None, again: bool = False) -> Message:
        self.messages += said
        answer = await self.session.turn(self.request(), key=key, again=again)
        self.messages.append(answer.message)
        return answer.message


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def results(message: Message, *texts: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": one["id"], "name": "guess", "content": text}
        for one, text in zip(message["tool_calls"], texts, strict=True)
    ]


def rendered(
    sampler: RenderingSampler, messages: Sequence[Message], tools: Any = None
) -> tuple[list[int], list[int]]:
    """Returns the conversation's tokens as transformers renders them, and which of them are
    answers: from the head of an answer to its end token."""
    tokenizer: Any = sampler.tokenizer
    ids = list(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=tools and list(tools), return_dict=False
        )
    )
    begin, end = tokenizer.convert_tokens_to_ids(["assistant\n", "<|im_end|>"])
    mask, answering = [], False
    for id in ids:
        mask.append(int(answering))
        answering = (answering or id == begin) and id != end
    end_of_answers = len(mask) - mask[::-1].index(1)
    return ids[:end_of_answers], mask[:end_of_answers]


def row(group: RolloutGroup) -> tuple[list[int], list[int]]:
    (rollout,) = group.rollouts
    prompt = list(group.prompt_token_ids)
    return [*prompt, *rollout.token_ids], [0] * len(prompt) + list(rollout.sampled)


def _starts(sampled: Sequence[int]) -> list[int]:
    return [at for at in range(1, len(sampled)) if sampled[at] > sampled[at - 1]]


async def test_a_conversation_with_parallel_calls_is_as_transformers_renders_it() -> None:
    replies = [Reply(call(3) + call(12)), Reply(call(7), version=4), Reply("correct", version=4)]
    sampler = RenderingSampler(replies)
    agent = Agent(open_session(sampler), tools=TOOLS)
    first = await agent.say()
    second = await agent.say(*results(first, "higher", "lower"))
    await agent.say(*results(second, "correct"))
    group = agent.session.rollout()
    assert row(group) == rendered(sampler, agent.messages, TOOLS)
    (rollout,) = group.rollouts
    assert [span.version for span in rollout.spans] == [3, 4]
    assert list(rollout.logprobs) == [-0.5 * one for one in rollout.sampled]
    assert list(rollout.messages) == agent.messages[1:]
    info = dict(rollout.info)
    assert info.pop("environment_s") >= 0
    ids, times = info.pop("completion_ids"), info.pop("turn_times")
    assert times == sorted(set(times))
    assert len(ids) == len(set(ids)) == 3 and list(rollout.turns) == [0, *_starts(rollout.sampled)]
    assert info == {"ended": "stop", "turns": 3, "tool_calls": 3, "forks": 0}
    seeds = [request.sampling.seed for request in sampler.asked]
    assert len(set(seeds)) == 3 and sampler.asked[0].sampling.max_tokens == 120


async def test_what_was_sampled_is_not_tokenized_again() -> None:
    sampler = RenderingSampler([Reply("higher", spelled=True), Reply("lower")])
    agent = Agent(open_session(sampler))
    await agent.say()
    await agent.say(user("Again."))
    ids, mask = row(agent.session.rollout())
    whole, _ = rendered(sampler, agent.messages)
    text = sampler.tokenizer.decode
    assert text(ids) == text(whole) and len(ids) == len(whole) + len("higher") - 1
    sampled = [id for id, own in zip(ids, mask, strict=True) if own]
    spelled = [id for letter in "higher" for id in sampler.tokenize(letter)]
    assert sampled == [*spelled, *sampler.tokenize("<|im_end|>lower<|im_end|>")]


async def test_a_retry_gets_the_same_answer_and_leaves_no_turn() -> None:
    sampler = RenderingSampler([Reply("higher"), Reply("lower"), Reply("correct")])
    agent = Agent(open_session(sampler))
    await agent.say()
    agent.messages.append(user("Again."))
    sampler.may_answer.clear()
    first = asyncio.create_task(agent.session.turn(agent.request()))
    await asyncio.sleep(0.01)
    first.cancel()  # the client has waited long enough
    await asyncio.sleep(0.01)
    second = asyncio.create_task(agent.session.turn(agent.request()))
    await asyncio.sleep(0.01)
    sampler.may_answer.set()
    answer = await second
    assert answer.message["content"] == "lower"
    same = await agent.session.turn(agent.request(), again=True)
    assert same is answer and len(sampler.asked) == 2
    agent.messages.append(answer.message)
    await agent.say(user("And now?"), key="a")
    by_key = await agent.session.turn(asked(*agent.messages[:-1]), key="a")
    assert by_key.message == agent.messages[-1]
    with pytest.raises(Conflict, match="'a' was used before with another body"):
        await agent.session.turn(agent.request(), key="a")
    assert row(agent.session.rollout()) == rendered(sampler, agent.messages)


async def test_an_answer_that_was_asked_for_again_is_left_out_unless_it_was_used() -> None:
    sampler = RenderingSampler([Reply(text) for text in ("higher", "lower", "correct", "7", "8")])
    agent = Agent(open_session(sampler))
    used = await agent.say()
    other = await agent.session.turn(asked(ASKED))
    assert other.message["content"] == "lower"
    orphan = agent.session.rollout().rollouts[0]
    assert (orphan.text, orphan.branches) == ("lower", ())  # no one continued from "higher" yet
    await agent.say(user("Again."))
    (rollout,) = agent.session.rollout().rollouts
    assert (used["content"], rollout.text, rollout.info["turns"]) == ("higher", "correct", 3)
    assert len(rollout.info["completion_ids"]) == 3
    assert row(agent.session.rollout()) == rendered(sampler, agent.messages)
    (branch,) = rollout.branches
    assert branch.token_ids == sampler.tokenize("lower<|im_end|>")


async def test_an_edited_history_forks_and_no_answer_is_sampled_twice() -> None:
    sampler = RenderingSampler([Reply("higher"), Reply("lower"), Reply("correct")])
    agent = Agent(open_session(sampler))
    await agent.say()
    await agent.say(user("Again."))
    before = list(agent.messages)
    agent.messages[2:] = [user("Or else?")]
    await agent.say()
    group = agent.session.rollout()
    (rollout,) = group.rollouts
    assert row(group) == rendered(sampler, agent.messages)
    (branch,) = rollout.branches
    ids, _ = rendered(sampler, before)
    assert [*branch.prompt_token_ids, *branch.token_ids] == ids
    assert branch.num_sampled == len(sampler.tokenize("lower<|im_end|>")) == 2
    assert rollout.num_sampled == sum(rollout.sampled) + 2 == 6
    assert branch.because == "message 2 has another content than the one recorded"
    assert rollout.info["forks"] == 1
    of_branch, first, last = rollout.info["turn_times"]  # row by row
    assert first < of_branch < last


async def test_a_template_that_drops_thoughts_forks() -> None:
    sampler = RenderingSampler(
        [Reply("<think>\nhm\n</think>\n\nhigher"), Reply("lower"), Reply("correct")],
        template=THINKING_TEMPLATE,
    )
    agent = Agent(open_session(sampler))
    await agent.say()
    await agent.say(user("Again."))
    await agent.say(user("And now?"))
    group = agent.session.rollout()
    (rollout,) = group.rollouts
    (branch,) = rollout.branches
    assert "drops" in branch.because
    assert (rollout.prompt_end or "").endswith("And now?<|im_end|>\n<|im_start|>assistant\n")
    text: Any = sampler.tokenizer.decode
    assert text([*branch.prompt_token_ids, *branch.token_ids]) == (
        "<|im_start|>user\nFind it.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nhigher<|im_end|>"
    )
    ids, mask = rendered(sampler, agent.messages)
    first = sampler.tokenize("higher<|im_end|>")
    assert row(group)[0] == ids and sum(row(group)[1]) == sum(mask) - len(first)
    assert "<think>" not in text(group.prompt_token_ids)


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_an_answer_cut_off_in_a_call_continues_with_the_templates_end(reason: Any) -> None:
    """No end token was sampled: a limit ended the answer, or the agent's own stop string."""
    cut = call(12)[:40]
    sampler = RenderingSampler([Reply(cut, cut=True, finish_reason=reason), Reply("correct")])
    agent = Agent(open_session(sampler), tools=TOOLS)
    answer = await agent.session.turn(agent.request(stop="}}"))
    assert answer.message == {"role": "assistant", "content": cut}
    agent.messages.append(answer.message)
    await agent.say(user("Continue."))
    group = agent.session.rollout()
    ids, mask = row(group)
    whole, own = rendered(sampler, agent.messages, TOOLS)
    assert ids == whole
    (end, _) = [at for at, id in enumerate(whole) if id == 2 and own[at]]
    assert mask == [*own[:end], 0, *own[end + 1 :]], "the end is the template's, not sampled"
    assert sampler.asked[0].sampling.stop == ("}}",)
    assert group.rollouts[0].finish_reason == "stop"


async def test_turns_by_token_ids_continue_from_the_tokens() -> None:
    sampler = RenderingSampler([Reply("higher", spelled=True), Reply("lower"), Reply("correct")])
    session = open_session(sampler)
    ids = sampler.tokenize("<|im_start|>user\nFind it.<|im_end|>\n<|im_start|>assistant\n")
    first = await session.turn(TurnRequest("1", token_ids=tuple(ids), max_tokens=50))
    between = sampler.tokenize("\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n")
    more = [*ids, *first.rollout.token_ids, *between]
    second = await session.turn(TurnRequest("2", token_ids=tuple(more)))
    assert list(second.prompt_token_ids) == more
    group = session.rollout()
    (rollout,) = group.rollouts
    length = len(first.rollout.token_ids)
    assert list(group.prompt_token_ids) == ids
    assert rollout.sampled == [1] * length + [0] * len(between) + [1, 1]
    assert [message["content"] for message in rollout.messages] == ["higher", "lower"]
    assert sampler.asked[0].sampling.max_tokens == 50
    assert sampler.asked[1].sampling.max_tokens == 120 - length
    await session.turn(TurnRequest("3", token_ids=(1, 2, 3)))
    (rollout,) = session.rollout().rollouts
    assert rollout.branches[0].because == "its tokens do not begin with the recorded ones"


async def test_a_session_without_room_refuses_turns_and_says_that_it_was_cut_off() -> None:
    sampler = RenderingSampler([Reply("abcdef", cut=True), Reply("x")])
    agent = Agent(open_session(sampler, max_tokens=6))
    await agent.say()
    with pytest.raises(BadRequest, match="has all of its 6 tokens") as refused:
        await agent.say(user("Continue."))
    assert refused.value.code == "context_length_exceeded" and agent.session.is_full
    assert "This model's maximum context length is 6 tokens" in refused.value.detail
    (rollout,) = agent.session.rollout().rollouts
    assert (rollout.finish_reason, rollout.info["ended"]) == ("length", "max_tokens")

    sampler = RenderingSampler([Reply("higher")], max_model_len=60)
    agent = Agent(open_session(sampler))
    await agent.say()
    assert sampler.asked[0].fit
    with pytest.raises(BadRequest, match="expected at most 60"):
        await agent.say(user("Continue." * 20))
    assert agent.session.rollout().rollouts[0].info["ended"] == "window"


async def test_errors_of_services_are_the_jobs_until_a_turn_succeeds() -> None:
    sampler = RenderingSampler([Reply("", error=Unavailable("no sampler")), Reply("higher")])
    agent = Agent(open_session(sampler))
    with pytest.raises(Unavailable, match="no sampler"):
        await agent.say()
    with pytest.raises(Unavailable, match="no sampler"):
        agent.session.rollout()
    await agent.say()
    assert agent.session.rollout().rollouts[0].text == "higher"


async def test_a_session_is_found_by_key_or_name_until_it_is_closed() -> None:
    sampler = RenderingSampler([Reply("higher")])
    session = open_session(sampler, id="task-1")
    found = sampler.sessions.find
    assert found(api_key=session.api_key) is found(name="task-1") is session
    assert found(api_key="sk-other", name="other") is None
    none = session.rollout().rollouts[0]
    assert none.went_wrong and none.error == "the agent received no answer of the model"
    sampler.may_answer.clear()
    under_way = asyncio.create_task(Agent(session).say())
    await asyncio.sleep(0.01)
    session.close()
    for refused in (under_way, Agent(session).say()):
        with pytest.raises(Gone, match="session 'task-1' is closed"):
            await refused
    for how in ({"name": "task-1"}, {"api_key": session.api_key}):
        with pytest.raises(Gone, match="is closed"):
            found(**how)
    assert len(sampler.sessions) == 0
    again = open_session(sampler, id="task-1")
    assert found(name="task-1") is again and again.api_key != session.api_key


async def test_a_template_that_keeps_thoughts_keeps_the_row() -> None:
    thinking = "<think>\nhm\n</think>\n\n"
    sampler = RenderingSampler([Reply(f"{thinking}{call(3)}"), Reply(f"{thinking}correct")])
    agent = Agent(open_session(sampler), tools=TOOLS)
    first = await agent.say()
    await agent.say(*results(first, "higher"))
    assert row(agent.session.rollout()) == rendered(sampler, agent.messages, TOOLS)
    assert agent.session.rollout().rollouts[0].branches == ()


async def test_agents_at_the_same_time_are_rows_of_their_own() -> None:
    """An agent with tools, and an agent that it asks, in turns of the same session."""
    replies = [Reply(call(3)), Reply("12"), Reply("13"), Reply("correct")]
    sampler = RenderingSampler(replies)
    session = open_session(sampler)
    main, other = Agent(session, tools=TOOLS), Agent(session, user("Help."))
    first = await main.say()
    await other.say()
    await other.say(user("Sure?"))
    await main.say(*results(first, "lower"))
    group = session.rollout()
    assert row(group)[0] == rendered(sampler, main.messages, TOOLS)[0]
    (branch,) = group.rollouts[0].branches
    ids, mask = rendered(sampler, other.messages)
    start = len(branch.prompt_token_ids)
    assert [*branch.prompt_token_ids, *branch.token_ids] == ids
    assert list(branch.sampled) == mask[start:]
    assert group.rollouts[0].info["tool_calls"] == 1


async def test_turns_at_once_are_no_more_than_the_job_allows() -> None:
    sampler = RenderingSampler([Reply("a")] * 4)
    session = open_session(sampler)
    few = EnvironmentSpec(kind="worker", max_turns=2)
    session.job = session.job.model_copy(update={"environment": few})
    sampler.may_answer.clear()
    asked = (Agent(session, user(str(number))).say() for number in range(4))
    asking = asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(0.01)
    sampler.may_answer.set()
    found = await asking
    assert [isinstance(each, BadRequest) for each in found] == [False, False, True, True]
    assert session.num_turns == 2 and session.rollout().rollouts[0].finish_reason == "stop"


async def test_other_tools_begin_another_row_with_a_reason() -> None:
    sampler = RenderingSampler([Reply("higher"), Reply("lower")])
    agent = Agent(open_session(sampler))
    await agent.say()
    agent.tools = TOOLS
    await agent.say(user("Again."))
    group = agent.session.rollout()
    (rollout,) = group.rollouts
    ids, mask = rendered(sampler, agent.messages, TOOLS)
    own = len(sampler.tokenize("lower<|im_end|>"))
    assert row(group) == (ids, [0] * (len(mask) - own) + [1] * own)
    assert [branch.because for branch in rollout.branches] == [
        "the tools differ from the turn before"
    ]
