"""Agents' clients, with nothing changed but address and key: `openai` and `anthropic` at the real
app. The sampler renders with a real template; only what it says is ours."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import SecretStr

from services.orchestrator.app import create_service
from services.orchestrator.extensions.agents.sessions import MAX_BODY_BYTES, Session
from services.orchestrator.store.store import Store
from shared.host import logs
from shared.http.rendering import READ_BYTES, parse_body
from shared.settings import Settings
from tests.support.in_process import in_process
from tests.support.lazily import Package
from tests.support.rendering_sampler import RenderingSampler, Reply, call, open_session

anthropic, openai = Package("anthropic"), Package("openai")

TOOL = {
    "name": "guess",
    "description": "Guesses.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
}
TOKEN = "the-stacks-own-token-of-thirty-two-letters"


class Bench:
    """The orchestrator's app, a session in it, and clients with the session's key."""

    def __init__(self, settings: Settings, *replies: Reply, name: str = "task-1") -> None:
        self.sampler = RenderingSampler(list(replies))
        self.session: Session = open_session(self.sampler, id=name)
        settings = settings.model_copy(update={"token": SecretStr(TOKEN)})
        store = Store("redis://127.0.0.1:1")
        service = create_service(settings, store, works=False, sessions=self.sampler.sessions)
        self.app = service.app

    def http(self) -> httpx.AsyncClient:
        return in_process(self.app)

    def openai(self, path: str = "/v1", key: str | None = None, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://localhost{path}",
            api_key=key or self.session.api_key,
            http_client=self.http(),
            max_retries=0,
            **more,
        )

    def anthropic(self, path: str = "") -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=f"http://localhost{path}",
            api_key=self.session.api_key,
            http_client=self.http(),
            max_retries=0,
        )

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        async with self.http() as http:
            given = {"authorization": f"Bearer {self.session.api_key}"} | headers
            return await http.post(path, json=body, headers=given)

    def texts(self) -> tuple[str, str]:
        """Returns what the session's row is, and what of it was sampled."""
        group = self.session.rollout()
        (rollout,) = group.rollouts
        text: Any = self.sampler.tokenizer.decode
        pairs = zip(rollout.token_ids, rollout.sampled, strict=True)
        whole = [*group.prompt_token_ids, *rollout.token_ids]
        return text(whole), text([id for id, own in pairs if own])


PARALLEL = Reply(f"Hm.{call(3)}{call(12)}")


@pytest.fixture
def bench(settings: Settings) -> Bench:
    return Bench(settings, PARALLEL, Reply("correct"), Reply("lower"))


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench whose sampler is asked for nothing."""
    return Bench(Settings(runs_dir=tmp_path_factory.mktemp("runs")))


EXPECTED = (
    "<|im_start|>system\ntools: guess(number)<|im_end|>\n"
    "<|im_start|>system\nFind it.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n"
    f"<|im_start|>assistant\nHm.{call(3)}{call(12)}<|im_end|>\n"
    "<|im_start|>tool\nhigher<|im_end|>\n<|im_start|>tool\nlower<|im_end|>\n"
    "<|im_start|>assistant\ncorrect<|im_end|>"
)
SAMPLED = f"Hm.{call(3)}{call(12)}<|im_end|>correct<|im_end|>"


@pytest.mark.parametrize("streams", [False, True])
async def test_chat_completions(bench: Bench, streams: bool) -> None:
    chat = bench.openai().chat.completions
    messages: list[Any] = [
        {"role": "developer", "content": "Find it."},
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
    ]

    async def ask() -> Any:
        given: Any = {
            "model": "gpt-x",
            "messages": messages,
            "tools": [{"type": "function", "function": {**TOOL, "strict": True}}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "temperature": 0.3,
            "max_completion_tokens": 90,
            "logprobs": True,
            "top_logprobs": 0,
            "store": False,
            "metadata": {"a": "b"},
            "user": "me",
            "service_tier": "auto",
            "response_format": {"type": "text"},
            "extra_body": {"return_token_ids": True},
        }
        if not streams:
            return await chat.create(**given)
        async with chat.stream(**{**given, "stream_options": {"include_usage": True}}) as stream:
            return await stream.get_final_completion()

    first = await ask()
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
    called = [json.loads(each.function.arguments) for each in choice.message.tool_calls]
    assert called == [{"number": 3}, {"number": 12}]
    assert first.model == "gpt-x" and first.usage.completion_tokens == 10
    if not streams:
        rollout = bench.session.rollout().rollouts[0]
        assert first.prompt_token_ids == list(bench.session.rollout().prompt_token_ids)
        assert choice.token_ids == list(rollout.token_ids)
        assert [each.token for each in choice.logprobs.content][:1] == [
            f"token_id:{rollout.token_ids[0]}"
        ]
        assert {each.logprob for each in choice.logprobs.content} == {-0.5}
    messages.append(choice.message.model_dump())
    messages += [
        {"role": "tool", "tool_call_id": each.id, "content": text}
        for each, text in zip(choice.message.tool_calls, ("higher", "lower"), strict=True)
    ]
    second = await ask()
    assert second.choices[0].message.content == "correct"
    assert second.choices[0].finish_reason == "stop"
    assert bench.texts() == (EXPECTED, SAMPLED)
    assert bench.sampler.asked[0].sampling.max_tokens == 90
    assert bench.sampler.asked[0].sampling.temperature == 1.0


@pytest.mark.parametrize("streams", [False, True])
async def test_responses(bench: Bench, streams: bool) -> None:
    responses = bench.openai().responses
    items: list[Any] = [{"role": "user", "content": "Go."}]

    async def ask(**more: Any) -> Any:
        given: Any = {
            "model": "gpt-x",
            "instructions": "Find it.",
            "input": items,
            "tools": [{"type": "function", "strict": True, **TOOL}],
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "a",
            **more,
        }
        if not streams:
            return await responses.create(**given)
        async with responses.stream(**given) as stream:
            async for event in stream:
                seen.append(event.type)
            return await stream.get_final_response()

    seen: list[str] = []
    first = await ask()
    assert first.status == "completed" and first.output_text == "Hm."
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(each.arguments) for each in calls] == [{"number": 3}, {"number": 12}]
    if streams:
        assert seen[:2] == ["response.created", "response.in_progress"]
        assert "response.function_call_arguments.done" in seen
        assert seen[-1] == "response.completed"
    results = [
        {"type": "function_call_output", "call_id": each.call_id, "output": text}
        for each, text in zip(calls, ("higher", "lower"), strict=True)
    ]
    items += [*(item.model_dump(exclude_none=True) for item in first.output), *results]
    second = await ask()
    assert second.output_text == "correct" and second.usage.output_tokens == 2
    assert bench.texts() == (EXPECTED, SAMPLED)
    items[:] = [{"role": "user", "content": "Again."}]
    third = await ask(previous_response_id=second.id)
    assert third.output_text == "lower"
    whole, sampled = bench.texts()
    assert whole.startswith(EXPECTED) and sampled == f"{SAMPLED}lower<|im_end|>"


@pytest.mark.parametrize("streams", [False, True])
async def test_messages(bench: Bench, streams: bool) -> None:
    client = bench.anthropic()
    messages: list[Any] = [{"role": "user", "content": "Go."}]

    async def ask() -> Any:
        given: Any = {
            "model": "claude-x",
            "max_tokens": 90,
            "system": [
                {"type": "text", "text": "Find it.", "cache_control": {"type": "ephemeral"}}
            ],
            "messages": messages,
            "tools": [
                {
                    "name": "guess",
                    "description": "Guesses.",
                    "input_schema": TOOL["parameters"],
                }
            ],
            "tool_choice": {"type": "auto"},
            "metadata": {"user_id": "me"},
        }
        if not streams:
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as stream:
            return await stream.get_final_message()

    first = await ask()
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in first.content[1:]] == [{"number": 3}, {"number": 12}]
    assert (first.stop_reason, first.usage.output_tokens) == ("tool_use", 10)
    messages.append({"role": "assistant", "content": first.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": text}
        for block, text in zip(first.content[1:], ("higher", "lower"), strict=True)
    ]
    messages.append({"role": "user", "content": results})
    second = await ask()
    assert second.content[0].text == "correct" and second.stop_reason == "end_turn"
    assert bench.texts() == (EXPECTED, SAMPLED)


async def test_completions_and_token_ids(settings: Settings) -> None:
    bench = Bench(settings, Reply("higher"), Reply("lower"), Reply("correct"))
    done = await bench.openai().completions.create(model="m", prompt="Find it.", max_tokens=9)
    assert done.choices[0].text == "higher"
    ids = bench.sampler.tokenize("Continue.")
    body = {
        "model": "m",
        "token_ids": ids,
        "sampling_params": {"max_tokens": 7, "logprobs": 1, "skip_special_tokens": False},
    }
    answer = (await bench.post("/inference/v1/generate", body)).json()
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == ids and choice["finish_reason"] == "stop"
    assert choice["token_ids"] == bench.sampler.tokenize("lower<|im_end|>")
    assert [each["token"] for each in choice["logprobs"]["content"]] == [
        f"token_id:{id}" for id in choice["token_ids"]
    ]
    more = [*ids, *choice["token_ids"], *ids]
    await bench.post("/inference/v1/generate", {**body, "token_ids": more})
    (rollout,) = bench.session.rollout().rollouts
    assert rollout.sampled == [1, 1, *[0] * len(ids), 1, 1]
    assert [one.num_sampled for one in rollout.branches] == [2]


async def test_a_session_is_named_by_key_header_or_path(settings: Settings) -> None:
    bench = Bench(settings, *[Reply("higher")] * 5)
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
    await bench.openai("/sessions/task-1/v1").chat.completions.create(**ask)
    for header in ("X-Hone-Session", "X-Session-ID"):
        client = bench.openai(key=TOKEN, default_headers={header: "task-1"})
        await client.chat.completions.create(**ask)
    await bench.openai("/sessions/task-1/v1", key=TOKEN).chat.completions.create(**ask)
    await bench.anthropic("/sessions/task-1").messages.create(**ask, max_tokens=9)
    assert bench.session.num_turns == 5
    with pytest.raises(openai.NotFoundError, match="no session 'task-2'"):
        await bench.openai("/sessions/task-2/v1", key=TOKEN).chat.completions.create(**ask)
    with pytest.raises(openai.AuthenticationError):
        await bench.openai("/sessions/task-1/v1", key="wrong").chat.completions.create(**ask)
    with pytest.raises(openai.PermissionDeniedError, match="which allows only turns"):
        await bench.openai("/sessions/task-2/v1").chat.completions.create(**ask)
    refused = await bench.post("/v1/jobs", {})
    assert refused.status_code == 403 and "the key of a session" in refused.text
    refused = await bench.post("/v1/messages", {"no": 1}, authorization="Bearer sk-hone-x")
    assert refused.status_code == 410, "before the body is read"
    bench.session.close()
    with pytest.raises(openai.APIStatusError, match="is closed") as gone:
        await bench.openai().chat.completions.create(**ask)
    assert gone.value.status_code == 410


async def test_the_key_of_a_session_is_not_in_the_log(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(settings)
    logs.configure("orchestrator", settings.model_copy(update={"log_level": "info"}))
    await bench.post(f"/v1/files/{bench.session.api_key}", {})
    said = capfd.readouterr().err
    assert bench.session.api_key not in said and "/v1/files/sk-hone-***" in said


async def test_a_clients_timeout_and_retry_leaves_one_turn(settings: Settings) -> None:
    bench = Bench(settings, Reply("higher"), Reply("lower"))
    bench.sampler.may_answer.clear()
    client = bench.openai(timeout=0.2).with_options(max_retries=3)
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
    asking = asyncio.create_task(client.chat.completions.create(**ask))
    await asyncio.sleep(0.5)
    bench.sampler.may_answer.set()
    assert (await asking).choices[0].message.content == "higher"
    assert len(bench.sampler.asked) == 1 and bench.session.num_turns == 1


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ({"n": 2}, "'n' is 2; expected 1, or no such field: a conversation has one answer"),
        ({"logit_bias": {"5": 1}}, "would change the distribution"),
        ({"presence_penalty": 0.5}, "'presence_penalty' is 0.5; expected 0"),
        (
            {"response_format": {"type": "grammar"}},
            "'response_format' is {'type': 'grammar'}; expected a 'type' of 'text', 'json_object'",
        ),
        ({"response_format": {"type": "json_schema"}}, "with a 'schema' that is an object and not"),
        ({"tool_choice": "required"}, "'tool_choice' forces a call, and there are no tools"),
        (
            {"tool_choice": "always", "tools": [{"function": TOOL}]},
            "'tool_choice' is 'always'; expected one of 'auto', 'none', 'required', or one of type",
        ),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "add"}},
                "tools": [{"function": TOOL}],
            },
            "'tool_choice' names the tool 'add', expected one of 'guess'",
        ),
        ({"top_logprobs": 3}, "only the sampled tokens' log-probs are known"),
        ({"repetition_penalty": 1.2}, "would change the distribution"),
        ({"max_tokens": 0}, "'max_tokens': got 0; input should be greater than or equal to 1"),
        ({"tools": [{"function": {}}]}, "the name of a tool is None; expected a text"),
        ({"tools": [{"function": "f"}]}, "'function' is 'f'; expected an object"),
        ({"tempreature": 1}, "sessions have no such field; did you mean 'temperature'?"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "part 0 of the 'content' of message 0 is of type 'image_url'; expected parts of type",
        ),
    ],
)
async def test_what_a_session_cannot_honour_is_refused(
    refusing: Bench, field: dict[str, Any], sentence: str
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], **field}
    answer = await refusing.post("/v1/chat/completions", body)
    assert answer.status_code == 422 and sentence in answer.json()["detail"]
    assert not refusing.sampler.asked


FOUND = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
NAMED = {"type": "function", "function": {"name": "guess"}}


async def test_chat_completions_limit_an_answer_as_they_ask(settings: Settings) -> None:
    bench = Bench(settings, *[Reply('{"number": 3}')] * 6)
    chat: Any = bench.openai().chat.completions
    schema = {"type": "json_schema", "json_schema": {"name": "found", "schema": FOUND}}
    tools = [{"type": "function", "function": TOOL}]
    for number, limit in enumerate(
        (
            {"response_format": schema},
            {"response_format": {"type": "json_object"}},
            {"tools": tools, "tool_choice": "required"},
            {"tools": tools, "tool_choice": NAMED, "parallel_tool_calls": False},
            {"tools": tools, "tool_choice": "auto", "response_format": {"type": "text"}},
            {"tools": tools, "tool_choice": "none", "parallel_tool_calls": False},
        )
    ):
        asked = [{"role": "user", "content": f"Go {number}."}]
        await chat.create(model="m", messages=asked, **limit)
    found = bench.sampler.asked
    assert [each.json_schema for each in found] == [FOUND, {"type": "object"}, *[None] * 4]
    choices = [getattr(each.tool_choice, "function", each.tool_choice) for each in found]
    assert [getattr(each, "name", each) for each in choices] == [
        *("auto", "auto", "required", "guess", "auto", "none")
    ]
    assert [each.parallel_tool_calls for each in found] == [True, True, True, False, True, False]
    assert len(bench.sampler.constraints) == 4, "the last two are free"


async def test_responses_and_messages_limit_an_answer_as_they_ask(settings: Settings) -> None:
    bench = Bench(settings, *[Reply('{"number": 3}')] * 4)
    responses: Any = bench.openai().responses
    tool = {"type": "function", "strict": True, **TOOL}
    text = {"format": {"type": "json_schema", "name": "found", "schema": FOUND}}
    await responses.create(model="m", input="Go.", text=text)
    named = {"type": "function", "name": "guess"}
    answer = await responses.create(
        model="m", input="Now.", tools=[tool], tool_choice=named, parallel_tool_calls=False
    )
    assert answer.parallel_tool_calls is False
    messages: Any = bench.anthropic().messages
    given = {"model": "m", "max_tokens": 20}
    tools = [{"name": "guess", "input_schema": TOOL["parameters"]}]
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "guess"},
    ):
        asked = [{"role": "user", "content": choice["type"]}]
        await messages.create(**given, messages=asked, tools=tools, tool_choice=choice)
    found = bench.sampler.asked
    assert [each.json_schema for each in found] == [FOUND, None, None, None]
    choices = [getattr(each.tool_choice, "function", each.tool_choice) for each in found]
    assert [getattr(each, "name", each) for each in choices] == [
        *("auto", "guess", "required", "guess")
    ]
    assert [each.parallel_tool_calls for each in found] == [True, False, False, True]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"enum": ["x" * 70_000]}, "the schema of the answer has 70014 bytes as JSON, expected at"),
        (nested(40), "the schema of the answer is nested deeper than 32 levels"),
        ({"type": "string", "maxLength": 10**6}, "has maxLength 1000000, expected at most 100"),
        ({"properties": {"a": {"minItems": 1e9}}}, "has minItems 1000000000.0, expected at most"),
        ({"pattern": "a" * 201}, "has a pattern of 201 characters, expected at most 200"),
        ({"pattern": "((a{9}){9}){9}"}, "with the counted repetition '{9}', expected none"),
        ({"patternProperties": {"^a{1,5}$": True}}, "with the counted repetition '{1,5}'"),
        (
            {"properties": {f"k{number}": {"type": "string"} for number in range(300)}},
            "has 300 properties, expected at most 100",
        ),
        (
            {"properties": {f"k{number}": {"maxLength": 100} for number in range(11)}},
            "has lengths and counts (maxLength and the like) of 1100 together, expected at most",
        ),
    ],
    ids=[
        *("bytes", "depth", "length", "items", "pattern", "repetition", "names", "properties"),
        "sum",
    ],
)
async def test_a_schema_that_would_take_long_to_compile_is_refused(
    refusing: Bench, schema: dict[str, Any], sentence: str
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
    limit = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = await refusing.post("/v1/chat/completions", {**body, "response_format": limit})
    assert answer.status_code == 422 and sentence in answer.json()["detail"], answer.text
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    forced = {**body, "tools": tools, "tool_choice": "required"}
    assert (await refusing.post("/v1/chat/completions", forced)).status_code == 422
    assert not refusing.sampler.asked


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "field",
    [
        *({name: 5} for name in ("messages", "input", "tools", "chat_template_kwargs")),
        *({name: [5]} for name in ("messages", "input", "tools")),
        {"messages": [{"role": "user", "content": 5}]},
        {"max_tokens": "many"},
        {"stop": [5]},
        {"tools": [{"function": 5}], "messages": [{"role": "user"}], "input": 5},
        {"tool_choice": {"type": []}, "messages": [], "input": "a"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    ],
    ids=str,
)
async def test_a_body_of_other_types_is_refused_with_a_sentence(
    refusing: Bench, path: str, field: dict[str, Any]
) -> None:
    answer = await refusing.post(path, {"model": "m", **field})
    assert answer.status_code == 422 and answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("/v1/chat/completions", '{"messages": [{"role": "\\ud800"}]}', "surrogate"),
        ("/v1/responses", '{"model": "\\uD800", "input": "Go."}', "surrogate"),
        ("/v1/completions", '{"prompt": [-1]}', "'prompt' is [-1]"),
        ("/v1/completions", '{"prompt": [2147483648]}', "'prompt' is [2147483648]"),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "tool_calls": ' + "[" * 300 + "]" * 300 + "}]}",
            "depth",
        ),
    ],
    ids=["half a character", "the same in another field", "below 0", "above int32", "depth"],
)
async def test_json_that_no_sampler_reads_is_refused(
    refusing: Bench, path: str, text: str, sentence: str
) -> None:
    async with refusing.http() as http:
        headers = {"x-api-key": refusing.session.api_key, "content-type": "application/json"}
        answer = await http.post(path, content=text, headers=headers)
    assert answer.status_code == 422 and sentence in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_body_beyond_16_mib_is_refused_with_a_sentence(refusing: Bench, path: str) -> None:
    async with refusing.http() as http:
        headers = {"x-api-key": refusing.session.api_key, "content-type": "application/json"}
        answer = await http.post(path, content=b" " * (MAX_BODY_BYTES + 1), headers=headers)
    assert answer.status_code == 413
    assert "a body of 16777217 bytes or more; expected at most 16777216" in answer.json()["detail"]


async def test_a_large_body_is_read_in_a_thread() -> None:
    here = threading.get_ident()
    assert await parse_body(READ_BYTES, threading.get_ident) == here
    assert await parse_body(READ_BYTES + 1, threading.get_ident) != here


async def test_a_session_keeps_of_a_message_what_templates_read(settings: Settings) -> None:
    bench = Bench(settings, Reply("a"))
    said = {"role": "user", "content": "Go.", "reasoning": "I may.", "x": "y" * 99}
    answer = await bench.post("/v1/chat/completions", {"messages": [said], "tools": []})
    assert answer.status_code == 200, answer.text
    (turn,) = bench.session.recording.turns
    assert turn.asked.messages == ({"role": "user", "content": "Go.", "reasoning": "I may."},)
    assert len(turn.asked.name) == 64


async def test_deep_arguments_of_a_call_are_compared_as_text(settings: Settings) -> None:
    bench = Bench(settings, Reply("a"), Reply("b"))
    function = {"name": "guess", "arguments": "[" * 9000}
    called = {"id": "1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "a", "tool_calls": [called]}
    go = {"role": "user", "content": "Go."}
    for messages, code in (([go], None), ([go, answer, go], "context_length_exceeded")):
        got = await bench.post("/v1/chat/completions", {"model": "m", "messages": messages})
        assert got.json().get("code") == code


async def test_a_key_reaches_no_other_session_by_two_headers(bench: Bench) -> None:
    other = open_session(bench.sampler, id="other")
    headers = [
        *(("x-api-key", key) for key in ("x", bench.session.api_key)),
        ("x-hone-session", "other"),
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
    async with bench.http() as http:
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400 and "came 2 times" in answer.json()["detail"]
    assert other.num_turns == 0


async def test_a_prompt_that_gives_no_tokens_is_the_agents_fault(bench: Bench) -> None:
    bench.sampler.tokenizer.chat_template = "{{ '' }}"
    body = {"messages": [{"role": "user", "content": "Go."}]}
    refused = await bench.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["code"]) == (422, "bad_request"), refused.text
    assert refused.json()["detail"].startswith(f"session {bench.session.id!r}: ")
