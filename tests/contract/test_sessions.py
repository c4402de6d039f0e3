"""Recorded conversations over HTTP: OpenAI's own client against the real app, with a partner at the
`Chat` seam whose tokens can be read."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from services.orchestrator.loop.examples import to_examples
from services.trainer.learning.examples import check, versions
from shared.http import ownership
from shared.http.client import Client
from shared.settings import Settings
from shared.wire import Conversation, Example, ModelRequest, RolloutGroup, SessionRecord, Span
from tests.support.fake_chat import PAIR, FakeChat, sampled_tokens, text_of, tokens
from tests.support.rollout_bench import SPEC, RolloutBench

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "2 + 3?"}
CALL = 'Well.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


class Agent:
    """An agent that knows OpenAI's client and nothing of us but a header."""

    def __init__(self, bench: RolloutBench, session: str = "s", **headers: str) -> None:
        self.messages: list[Any] = [QUESTION]
        self.client = openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=bench.transport),
            default_headers={"X-Hone-Session": session, **headers},
        )

    async def say(self, content: str | None = None, **options: Any) -> Any:
        """Says `content`, if given, and returns the answer, which becomes part of the messages."""
        if content is not None:
            self.messages.append({"role": "user", "content": content})
        done = await self.client.chat.completions.create(
            model="policy", messages=self.messages, **options
        )
        self.messages.append(done.choices[0].message)
        return done.choices[0].message


async def serve(bench: RolloutBench, *replies: str) -> FakeChat:
    await bench.put()
    bench.engine.max_model_len = 2000
    bench.engine.chat.replies = list(replies)
    return bench.engine.chat


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    bench = RolloutBench(tmp_path)
    async with bench.client:
        yield bench


async def record(bench: RolloutBench, session: str = "s") -> SessionRecord:
    return await bench.client.get(f"/sessions/{session}", SessionRecord)


async def only(bench: RolloutBench, session: str = "s") -> Conversation:
    (conversation,) = (await record(bench, session)).conversations
    return conversation


def example_of(conversation: Conversation) -> Example:
    """The orchestrator's, as the trainer takes it."""
    group = RolloutGroup(
        prompt_token_ids=conversation.prompt_token_ids, rollouts=(conversation.rollout,)
    )
    (example,) = to_examples([group], [[0.5]])
    return example


async def test_an_agents_tool_call_becomes_an_example_with_a_mask(bench: RolloutBench) -> None:
    chat = await serve(bench, CALL, "It is 5.")
    agent = Agent(bench)
    called = await agent.say(tools=TOOLS, temperature=0.7, max_tokens=100)
    (call,) = called.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    agent.messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    assert (await agent.say(tools=TOOLS)).content == "It is 5."

    recorded = await only(bench)
    assert text_of(recorded.prompt_token_ids) == (
        f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>\n"
        "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    first, last = sampled_tokens(CALL), sampled_tokens("It is 5.")
    between = tokens("\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    rollout = recorded.rollout
    assert rollout.token_ids == [*first, *between, *last]
    assert rollout.sampled == [1] * len(first) + [0] * len(between) + [1] * len(last)
    assert rollout.logprobs == [
        *(-0.25 * (index % 4) for index in range(len(first))),
        *[0.0] * len(between),
        *(-0.25 * (index % 4) for index in range(len(last))),
    ]
    assert chat.asked[1] == [*recorded.prompt_token_ids, *first, *between]
    assert (rollout.text, rollout.finish_reason) == ("It is 5.", "stop")
    assert [message["role"] for message in rollout.messages] == ["assistant", "tool", "assistant"]
    assert [(turn.start, turn.num_tokens) for turn in recorded.turns] == [
        (0, len(first)),
        (len(first) + len(between), len(last)),
    ]
    assert [turn.sampling.temperature for turn in recorded.turns] == [0.7, 1.0]
    assert recorded.turns[0].sampling.max_tokens == 100
    example = example_of(recorded)
    assert (example.token_ids, example.sampled) == (rollout.token_ids, rollout.sampled)
    assert example.old_logprobs == rollout.logprobs


async def test_what_each_token_was_drawn_from_is_recorded_for_the_answers_alone(
    bench: RolloutBench,
) -> None:
    chat = await serve(bench, "yes.", "no", "ok")
    agent = Agent(bench)
    chat.kept = 2
    await agent.say(top_p=0.9)
    chat.kept = 0
    await agent.say("and?")
    chat.kept = 3
    await agent.say("so?", top_p=0.9)
    recorded = await only(bench)
    drawn = [(turn.start, turn.start + turn.num_tokens) for turn in recorded.turns]
    (_, end), _, (start, whole) = drawn
    ids = recorded.rollout.token_ids
    assert recorded.rollout.kept_counts == [2] * end + [0] * (start - end) + [3] * (whole - start)
    assert recorded.rollout.kept_ids == [
        *(id + more for id in ids[:end] for more in range(2)),
        *(id + more for id in ids[start:] for more in range(3)),
    ]
    example = example_of(recorded)
    check((example,), PAIR * 2, 2000)


async def test_messages_are_the_same_however_a_client_writes_them(bench: RolloutBench) -> None:
    await serve(bench, CALL, "ok")
    agent = Agent(bench)
    await agent.say(tools=TOOLS)
    answer = agent.messages[1]
    (call,) = answer.tool_calls
    arguments = '{ "b":3,\n"a":2 }'
    agent.messages[1] = {
        "role": "assistant",
        "content": [{"type": "text", "text": answer.content}],
        "tool_calls": [
            {"id": call.id, "function": {"name": "add", "arguments": arguments}, "type": "function"}
        ],
        "refusal": None,
    }
    agent.messages[0] = {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}
    agent.messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    await agent.say(tools=TOOLS)
    assert len((await only(bench)).turns) == 2


async def test_an_agent_that_streams_gets_whole_answers_in_chunks(bench: RolloutBench) -> None:
    await serve(bench, CALL, "It is 5.")
    agent = Agent(bench)
    chunks = agent.client.chat.completions
    async with chunks.stream(model="policy", messages=agent.messages, tools=TOOLS) as stream:
        called = (await stream.get_final_completion()).choices[0].message
    (call,) = called.tool_calls or ()
    assert (called.content, call.id, call.function.name) == ("Well.", "call-1", "add")
    agent.messages += [
        {"role": "assistant", "content": called.content, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "5"},
    ]
    found = [
        chunk
        async for chunk in await chunks.create(
            model="policy",
            messages=agent.messages,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert [[choice.finish_reason for choice in chunk.choices] for chunk in found] == [
        [None],
        ["stop"],
        [],
    ]
    assert found[0].choices[0].delta.content == "It is 5."
    assert found[2].usage.total_tokens == 10
    assert len((await only(bench)).turns) == 2


async def test_a_template_that_rewrites_answers_leaves_those_sampled_alone(
    bench: RolloutBench,
) -> None:
    chat = await serve(bench, "one ", "two")
    chat.forgets = "before"
    agent = Agent(bench)
    await agent.say()
    await agent.say("more")
    recorded = await only(bench)
    assert text_of(recorded.rollout.token_ids) == (
        "one <|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    chat.forgets = "after"
    await agent.say("and more")
    again = (await record(bench)).conversations[1]
    assert again.because == "the chat template renders an answer differently once messages follow"
    assert "one..." in text_of(again.prompt_token_ids) and len(again.turns) == 1


async def test_an_answer_that_was_cut_off_is_ended_as_the_template_does(
    bench: RolloutBench,
) -> None:
    chat = await serve(bench, "one", "two")
    chat.finish_reason = "length"
    agent = Agent(bench)
    await agent.say()
    await agent.say("more")
    rollout = (await only(bench)).rollout
    between = tokens("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.sampled == [1, 1] + [0] * len(between) + [1, 1]
    assert text_of(rollout.token_ids) == f"one{text_of(between)}two"
    assert rollout.finish_reason == "length"


# --- history that does not go on -----------------------------------------------------------------


async def test_an_edited_history_begins_a_new_conversation_and_says_so(bench: RolloutBench) -> None:
    chat = await serve(bench, "one", "two", "three")
    agent = Agent(bench)
    await agent.say()
    agent.messages = [QUESTION, {"role": "assistant", "content": "won"}]
    await agent.say("more")
    first, second = (await record(bench)).conversations
    assert (first.because, len(first.turns)) == ("", 1)
    assert second.because == "message 1 has another content than the one recorded"
    whole = (
        "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\nwon<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.asked[1] == second.prompt_token_ids == tokens(whole)
    assert second.rollout.sampled == [1] * len(sampled_tokens("two"))
    await agent.say("and more")
    assert [len(each.turns) for each in (await record(bench)).conversations] == [1, 2]


async def test_other_tools_begin_a_new_conversation(bench: RolloutBench) -> None:
    await serve(bench, "one")
    agent = Agent(bench)
    await agent.say(tools=TOOLS)
    await agent.say("more")
    assert (await record(bench)).conversations[1].because == (
        "the tools are not those of the conversation before"
    )


async def test_an_answer_requested_again_keeps_the_tokens_before_it(bench: RolloutBench) -> None:
    chat = await serve(bench, "one", "two", "other")
    agent = Agent(bench)
    await agent.say()
    await agent.say("more")
    agent.messages.pop()
    await agent.say()
    first, second = (await record(bench)).conversations
    assert second.because == "message 2, the request's last, was answered before"
    assert chat.asked[1] == chat.asked[2] == second.prompt_token_ids
    assert sampled_tokens("one") == chat.asked[2][len(first.prompt_token_ids) :][:3]
    assert (len(second.turns), second.rollout.text) == (1, "other")


# --- once ----------------------------------------------------------------------------------------


async def test_the_same_key_or_a_clients_own_retry_is_answered_once(bench: RolloutBench) -> None:
    chat = await serve(bench, "one", "two")
    keyed = Agent(bench, "a", **{"Idempotency-Key": "k"})
    await keyed.say()
    keyed.messages.pop()
    assert (await keyed.say()).content == "one"
    retried = Agent(bench, "b")
    await retried.say()
    retried.messages.pop()
    again = {"x-stainless-retry-count": "1"}
    assert (await retried.say(extra_headers=again)).content == "two"
    assert len(chat.asked) == 2
    assert [len((await only(bench, id)).turns) for id in "ab"] == [1, 1]


async def test_turns_of_one_session_are_sampled_one_after_another(bench: RolloutBench) -> None:
    chat = await serve(bench, "one", "two")
    agents = [Agent(bench), Agent(bench)]
    agents[1].messages = [{"role": "user", "content": "else"}]
    bench.engine.frozen.clear()
    asking = [asyncio.create_task(agent.say()) for agent in agents]
    while not bench.engine.under_way:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)  # in which the other would begin too
    with pytest.raises(Exception, match="a turn of session 's' is under way"):
        await delete(bench)
    assert (len(chat.asked), bench.engine.under_way) == (1, 1)
    bench.engine.frozen.set()
    await asyncio.gather(*asking)
    assert [each.rollout.text for each in (await record(bench)).conversations] == ["one", "two"]


async def test_a_client_that_leaves_ends_its_turn_and_nothing_is_recorded(
    bench: RolloutBench,
) -> None:
    await serve(bench, "one")
    bench.engine.frozen.clear()
    agent = Agent(bench)
    messages = [{"type": "http.request", "body": json.dumps({"messages": agent.messages}).encode()}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while not bench.engine.under_way:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    headers = [(b"host", b"localhost"), (b"x-hone-session", b"s")]
    headers.append((b"content-type", b"application/json"))
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    await bench.service.app({**scope, "headers": headers}, receive, send)
    assert bench.engine.under_way == 0
    assert (await bench.raw("GET", "/sessions/s")).status_code == 404


# --- weights -------------------------------------------------------------------------------------


async def test_weights_reloaded_between_turns_give_spans_of_both_versions(
    bench: RolloutBench,
) -> None:
    await serve(bench, "one", "two")
    await bench.reload(bench.publish(1, fence=(1, 1)))
    agent = Agent(bench)
    await agent.say()
    await bench.reload(bench.publish(2, fence=(1, 1)))
    await agent.say("more")
    found = await record(bench)
    (recorded,) = found.conversations
    second = recorded.turns[1].start
    assert recorded.rollout.spans == (Span(version=1, start=0), Span(version=2, start=second))
    assert (found.job_id, found.fence, found.replica) == ("job", (1, 1), "here:1")
    example = example_of(recorded)
    check([example], vocab_size=2 * PAIR, sampled_by=range(1, 3))
    num_tokens = len(recorded.rollout.token_ids)
    assert versions(example).tolist() == [1] * second + [2] * (num_tokens - second)


async def test_a_session_stays_with_the_weights_of_one_epoch_and_engine(
    bench: RolloutBench,
) -> None:
    await serve(bench, "one")
    await bench.reload(bench.publish(1, fence=(1, 1)))
    agent = Agent(bench)
    await agent.say()
    await bench.reload(bench.publish(1, fence=(1, 2)))
    with pytest.raises(openai.ConflictError) as stale:
        await agent.say("more")
    assert stale.value.body == {
        "message": "session 's' began with weights of attempt 1, epoch 1 of job 'job', and now "
        "weights of attempt 1, epoch 2 of job 'job' serve; begin another session",
        "type": "conflict",
        "code": "stale",
        "param": None,
    }
    other = Agent(bench, "other")
    await other.say()
    assert len((await only(bench)).turns) == len((await only(bench, "other")).turns) == 1
    await bench.put(ModelRequest(model="other", attempt=2, job_id="job"))
    with pytest.raises(openai.ConflictError, match="now weights of no job"):
        await other.say()


async def test_a_newer_epoch_ends_a_turn_under_way(bench: RolloutBench) -> None:
    await serve(bench, "one")
    await bench.reload(bench.publish(1, fence=(1, 1)))
    bench.engine.frozen.clear()
    asking = asyncio.create_task(Agent(bench).say())
    while not bench.engine.under_way:
        await asyncio.sleep(0.001)
    await bench.reload(bench.publish(1, fence=(1, 2)))
    with pytest.raises(openai.ConflictError) as ended:
        await asking
    assert ended.value.code == "stale"
    assert (
        "a turn of session 's' was ended: other weights replace those of job 'job' that "
        "it began with; begin another session"
    ) in str(ended.value)


async def test_a_session_goes_on_when_the_job_of_its_weights_has_ended(bench: RolloutBench) -> None:
    await serve(bench, "one", "two", "three")
    await bench.reload(bench.publish(1, fence=(1, 1)))
    agent = Agent(bench)
    await agent.say()
    bench.engine.frozen.clear()
    asking = asyncio.create_task(agent.say("more"))
    while not bench.engine.under_way:
        await asyncio.sleep(0.001)
    assert await bench.abort(attempt=1, epoch=1) == 0
    bench.engine.frozen.set()
    await asking
    assert (await agent.say("and more")).content == "three"
    (recorded,) = (await record(bench)).conversations
    assert [span.version for span in recorded.rollout.spans] == [1]
    assert len(recorded.turns) == 3


async def test_a_session_needs_no_job_though_an_orchestrator_has_the_sampler(
    bench: RolloutBench,
) -> None:
    await serve(bench, "one", "two")
    headers = ownership.headers("a", Settings(), "job")
    async with Client(
        "rollout", "http://localhost", binary=True, transport=bench.transport, headers=headers
    ) as job:
        own, bench.client = bench.client, job
        await bench.put(ModelRequest(model="tiny", job_id="job", attempt=1, epoch=1))
        await bench.reload(bench.publish(1, fence=(1, 1)))
        bench.client = own
    agent = Agent(bench)
    await agent.say()
    await agent.say("more")
    assert len((await only(bench)).turns) == 2


# --- refusals and bounds -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n": 2}, "'n': got 2; expected 1: a conversation has one answer per turn"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"frequency_penalty": 0.5},
            "'frequency_penalty': got 0.5; a recorded session cannot use frequency_penalty: "
            "training could not compute it again; leave it out",
        ),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"max_tokens": 1990}, "'max_tokens' 1990 makes 2015; the model holds 2000"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(
    bench: RolloutBench, options: dict[str, Any], sentence: str
) -> None:
    chat = await serve(bench, "one")
    with pytest.raises(openai.UnprocessableEntityError, match=sentence):
        await Agent(bench).say(**options)
    assert chat.asked == []
    assert (await bench.raw("GET", "/sessions/s")).status_code == 404


async def test_messages_of_other_things_than_text_are_refused(bench: RolloutBench) -> None:
    await serve(bench, "one")
    agent = Agent(bench)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    agent.messages.append({"role": "user", "content": [image]})
    with pytest.raises(openai.UnprocessableEntityError, match="'content' of message 1 is no text"):
        await agent.say()
    agent.messages = [{"content": "a"}]
    with pytest.raises(openai.UnprocessableEntityError, match="message 0 has no 'role'"):
        await agent.say()


async def test_a_session_is_for_chat_and_has_a_name(bench: RolloutBench) -> None:
    await serve(bench, "one")
    with pytest.raises(openai.UnprocessableEntityError, match="expected 1 to 128 letters"):
        await Agent(bench, "no blanks").say()
    with pytest.raises(openai.UnprocessableEntityError, match="sessions record POST /v1/chat"):
        await Agent(bench).client.completions.create(model="policy", prompt="a")


async def test_the_session_idle_longest_is_forgotten_with_the_reason(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path, max_sessions=2)
    await serve(bench, "one")
    agents = {id: Agent(bench, id) for id in "abc"}
    for id in "aba":
        await agents[id].say("go on")
    with pytest.raises(openai.UnprocessableEntityError):
        await agents["c"].say("refused, which forgets nobody", n=2)
    with pytest.raises(openai.UnprocessableEntityError, match="the model holds"):
        await agents["c"].say("nor does this", max_tokens=2000)
    assert len((await only(bench, "b")).turns) == 1
    await agents["c"].say("go on")
    why = (
        "session 'b' was forgotten: it was idle longest when another one began, and 2 are kept "
        "(setting HONE_MAX_SESSIONS); begin another one"
    )
    with pytest.raises(openai.NotFoundError) as gone:
        await agents["b"].say("go on")
    assert isinstance(gone.value.body, dict) and gone.value.body["message"] == why
    assert (await bench.raw("GET", "/sessions/b")).json()["detail"] == why
    assert len((await only(bench, "a")).turns) == 2
    assert "hone_rollout_sessions 2.0" in (await bench.raw("GET", "/metrics")).text
    bench.engine.frozen.clear()
    asking = [asyncio.create_task(agents[id].say("go on")) for id in "ac"]
    while bench.engine.under_way < 2:
        await asyncio.sleep(0.001)
    with pytest.raises(openai.RateLimitError, match="turns of 2 sessions are under way"):
        await Agent(bench, "d").say()
    bench.engine.frozen.set()
    await asyncio.gather(*asking)


async def test_a_session_that_is_idle_too_long_is_forgotten(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path, session_idle_s=1e-6)
    await serve(bench, "one")
    await Agent(bench).say()
    await asyncio.sleep(0.001)
    gone = await bench.raw("GET", "/sessions/s")
    assert gone.json()["detail"] == (
        "session 's' was forgotten: it was idle for 1e-06 s (setting HONE_SESSION_IDLE_S); begin "
        "another one"
    )


async def test_a_session_of_too_many_tokens_is_refused_its_next_turn(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path, max_session_tokens=50)
    await serve(bench, "one")
    agent = Agent(bench)
    await agent.say()
    with pytest.raises(
        openai.UnprocessableEntityError, match=r"at most 50 are kept \(setting HONE_MAX_SESSION_TOK"
    ):
        await agent.say("more")
    assert len((await only(bench)).turns) == 1


async def test_messages_and_masks_count_in_the_memory_of_all_sessions(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path, sessions_mib=1)
    chat = await serve(bench, "one")
    bench.engine.max_model_len = 1_000_000
    agents = {id: Agent(bench, id) for id in "abc"}
    await agents["a"].say("x" * 100_000)
    await agents["b"].say("x" * 100_000)
    why = (
        "session 'a' was forgotten: it was idle longest when all took more than 1 MiB (setting "
        "HONE_SESSIONS_MIB); begin another one"
    )
    assert (await bench.raw("GET", "/sessions/a")).json()["detail"] == why
    assert len((await only(bench, "b")).turns) == 1
    chat.kept = 100_000
    await agents["c"].say("short", top_p=0.9)
    assert (await bench.raw("GET", "/sessions/b")).status_code == 404
    with pytest.raises(
        openai.UnprocessableEntityError, match=r"takes 1\.\d MiB, and at most 1 MiB is kept of all"
    ):
        await agents["c"].say("more")
    assert "hone_rollout_session_bytes 1" in (await bench.raw("GET", "/metrics")).text


async def delete(bench: RolloutBench, session: str = "s") -> None:
    answer = await bench.raw("DELETE", f"/sessions/{session}")
    assert (answer.status_code, answer.json()) == (200, {"id": session}), answer.json()["detail"]


async def test_a_deleted_session_is_gone_and_its_name_free(bench: RolloutBench) -> None:
    await serve(bench, "one")
    agent = Agent(bench)
    await agent.say()
    await delete(bench)
    await delete(bench)
    missing = await bench.raw("GET", "/sessions/s")
    assert (missing.status_code, missing.json()["detail"]) == (404, "there is no session 's' here")
    await agent.say("more")
    assert len((await only(bench)).turns) == 1


async def test_sessions_want_the_token_like_every_route(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path, token="a-secret-token")
    authorized = {"headers": {"authorization": "Bearer a-secret-token"}}
    put = await bench.raw("PUT", "/model", json=SPEC.model_dump(), **authorized)
    assert put.status_code == 200
    with pytest.raises(openai.AuthenticationError):
        await Agent(bench).say()
    for method in ("GET", "DELETE"):
        assert (await bench.raw(method, "/sessions/s")).status_code == 401


async def test_the_agent_of_the_docs_runs_and_is_recorded(
    bench: RolloutBench, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = await serve(bench, CALL, "It is 5.")
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (agent,) = re.findall(r"```python\n(# agent\.py\n.*?)```", page, re.DOTALL)
    server = bench.service.server(0)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    agent = agent.replace("127.0.0.1:8001", f"127.0.0.1:{port}")
    try:
        await asyncio.to_thread(exec, agent, {})
    finally:
        server.should_exit = True
        await serving
    assert len(chat.asked) == 2
    sampled = [[1] * len(sampled_tokens(text)) for text in (CALL, "It is 5.")]
    between = [0] * len(tokens("\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"))
    line = f"tokens of the prompt, then {[*sampled[0], *between, *sampled[1]]}"
    assert line in capsys.readouterr().out
