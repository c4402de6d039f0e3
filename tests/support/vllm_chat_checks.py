"""vLLM's own chat handler, renderer and parser of tool calls under a conversation, with a template
as Qwen2.5's. Only the sampling is ours, for no small model calls tools.

Run by `tests/system/test_vllm_chat.py`, in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from services.rollout.groups import prompt_tokens, tokens_after
from shared.errors import BadRequest
from shared.settings import Settings
from shared.wire import ChatRequest, EngineSpec, Message, Rollout, TokenIds
from shared.wire.messages import for_template

if TYPE_CHECKING:
    from services.rollout.on_vllm.completions import VllmChat

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ADD = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": ADD}
CALL = 'Well.\n<tool_call>\n{"name": "add", "arguments": {"b":3, "a":2}}\n</tool_call>'


def make_folder(folder: Path) -> Path:
    """A configuration, and a tokenizer of bytes with Qwen's special tokens; no weights."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=1024,
    ).save_pretrained(folder)
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


class Scripted:
    """vLLM's engine as its handlers see it, which samples what it is told to: `replies`, of one
    character each a token, after `asked`."""

    errored = False
    input_processor = None

    def __init__(self, folder: Path) -> None:
        from vllm.renderers import renderer_from_config

        from services.rollout.on_vllm.arguments import engine_args

        settings, spec = Settings(), EngineSpec(model=str(folder), dtype="float32")
        self.vllm_config = engine_args(spec, settings).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.tokenizer: Any = self.renderer.get_tokenizer()
        self.replies: list[str] = []
        self.asked: list[list[int]] = []
        self.reason = "stop"
        self.params: Any = None
        self.mask: list[list[int]] | None = None

    def check_admission(self, _: int) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(self, prompt: Any, params: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask

        assert params.logprobs == 0 and prompt["cache_salt"] == "salt"
        self.params = params
        text = self.replies[len(self.asked)]
        self.asked.append(prompt["prompt_token_ids"])
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        completion = CompletionOutput(
            index=0,
            text=text.removesuffix("<|im_end|>"),
            token_ids=ids,
            cumulative_logprob=None,
            logprobs=[{id: Logprob(-id / 8)} for id in ids],
            finish_reason=self.reason,
            sampling_mask=None if self.mask is None else SamplingMask(self.mask),
            weight_versions=[SimpleNamespace(version="job:0:0/4", start=0)],
        )
        yield RequestOutput("1", None, prompt["prompt_token_ids"], None, [completion], True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def engine(folder: Path) -> Scripted:
    return Scripted(folder)


def chat_of(engine: Scripted, tool_parser: str | None = "hermes") -> VllmChat:
    from services.rollout.on_vllm.completions import VllmChat
    from services.rollout.on_vllm.openai_routes import openai_app

    app = openai_app(cast(Any, engine), "tiny", tool_parser=tool_parser)
    serving = app.state.openai_serving_chat
    return VllmChat(serving, engine.tokenizer)


@dataclass(frozen=True)
class Answer:
    """What vLLM's own route answers after these tokens, and what was sampled."""

    message: Message
    finish_reason: str
    rollout: Rollout


async def answer(engine: Scripted, chat: VllmChat, request: ChatRequest, ids: list[int]) -> Answer:
    kept = {"prompt_token_ids": ids}
    asked = chat._vllm_request(
        request, request.messages, logprobs=True, cache_salt="salt", kv_transfer_params=kept
    )
    response: Any = await chat._serving.create_chat_completion(asked)
    (choice,) = response.model_dump()["choices"]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    text = engine.replies[len(engine.asked) - 1]
    rollout = Rollout(
        text=text.removesuffix("<|im_end|>"),
        token_ids=TokenIds(engine.tokenizer.encode(text, add_special_tokens=False)),
        finish_reason=cast(Any, engine.reason),
    )
    return Answer({"content": "", **message}, choice["finish_reason"], rollout)


async def test_calls_of_tools_are_found_and_what_follows_is_the_templates(engine: Scripted) -> None:
    chat = chat_of(engine)
    engine.replies = [CALL + "<|im_end|>", "It is 5.<|im_end|>"]
    first = ChatRequest(messages=({"role": "user", "content": "2 + 3?"},), tools=(TOOL,))
    prompt = await prompt_tokens(chat, first)
    head = f"<|im_start|>system\n# Tools\n{json.dumps(TOOL)}<|im_end|>\n"
    assert engine.tokenizer.decode(prompt) == (
        f"{head}<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    called = await answer(engine, chat, first, prompt)
    (call,) = called.message["tool_calls"]
    assert called.finish_reason == "tool_calls"
    assert call["function"] == {"name": "add", "arguments": '{"b": 3, "a": 2}'}
    assert engine.asked == [prompt]

    tool = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    second = first.model_copy(update={"messages": (*first.messages, called.message, tool)})
    between = await tokens_after(chat, second, 2, called.rollout.token_ids[-1])
    assert engine.tokenizer.decode(between) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    ids = [*prompt, *called.rollout.token_ids, *between]
    said = await answer(engine, chat, second, ids)
    assert (said.message["content"], engine.asked[1]) == ("It is 5.", ids)
    cut = await tokens_after(chat, second, 2, called.rollout.token_ids[3])
    assert engine.tokenizer.decode(cut) == "<|im_end|>" + engine.tokenizer.decode(between)


async def test_a_completion_is_parsed_as_the_route_parses_its_own(engine: Scripted) -> None:
    chat = chat_of(engine)
    other = CALL.removeprefix("Well.\n").replace("2", "7")
    cut = CALL.partition('"a"')[0]
    replies = [f"{CALL}{other}<|im_end|>", "It is 5.<|im_end|>", cut]
    asked = ChatRequest(messages=({"role": "user", "content": "2 + 3?"},), tools=(TOOL,))
    engine.replies, answers = replies, []
    for reply in replies:
        engine.reason = "length" if reply == cut else "stop"
        answers.append(await answer(engine, chat, asked, [5]))
    said = await chat.parsed(asked, [5], [each.rollout for each in answers])
    for one, other in zip(said, answers, strict=True):
        assert without_ids(one) == without_ids(other.message)
    calls = said[0].pop("tool_calls")
    assert [call["function"]["arguments"] for call in calls] == [
        '{"b": 3, "a": 2}',
        '{"b": 3, "a": 7}',
    ]
    assert len({call["id"] for call in calls}) == 2
    assert [message["content"] for message in said] == ["Well.\n", "It is 5.", cut]

    stops = asked.model_copy(update={"stop": ("</tool_call>",)})
    (stopped,) = await chat.parsed(stops, [5], [answers[0].rollout])
    (call,) = stopped["tool_calls"]
    assert call["function"]["arguments"] == '{"b": 3, "a": 2}'
    with pytest.raises(BadRequest, match="HONE_TOOL_PARSER to name one"):
        await chat_of(engine, None).parsed(asked, [5], [])
    bare = asked.model_copy(update={"tools": None})
    (text,) = await chat_of(engine, None).parsed(bare, [5], [answers[1].rollout])
    assert text == {"role": "assistant", "content": "It is 5."}


def without_ids(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


async def test_a_conversation_is_rendered_as_the_route_renders_alone(engine: Scripted) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    chat = chat_of(engine)
    arguments = json.dumps({"b": 3})
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    request = ChatRequest(
        messages=(
            {"role": "user", "content": [{"type": "text", "text": "2"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ),
        tools=(TOOL,),
    )
    body = request.model_dump(mode="json", exclude_none=True)
    _, (own,) = await chat_of(engine)._serving.online_renderer.render_chat(
        ChatCompletionRequest.model_validate(body)
    )
    assert await prompt_tokens(chat, request) == own["prompt_token_ids"]


async def test_a_chat_is_one_prompt_by_the_template_and_by_vllms_route(engine: Scripted) -> None:
    from services.rollout.on_vllm.completions import ChatCall

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"b": 3}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5", "tool_calls": None},
    ]
    _, (own,) = await chat_of(engine)._serving.online_renderer.render_chat(
        ChatCall.model_validate({"messages": messages})
    )
    text = (
        '<|im_start|>user\n2+<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "add", '
        '"arguments": {"b": 3}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n5\n'
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.tokenizer.decode(own["prompt_token_ids"]) == text
    options = {"add_generation_prompt": True, "tokenize": False}
    assert engine.tokenizer.apply_chat_template(for_template(messages), **options) == text
    with pytest.raises(ValueError, match="part 0 of the 'content' of message 0 is of type 'image'"):
        ChatCall.model_validate({"messages": [{"role": "user", "content": [{"type": "image"}]}]})


async def test_what_vllm_refuses_is_refused_with_its_reason(engine: Scripted) -> None:
    chat = chat_of(engine)
    asked = ChatRequest(messages=({"role": "user", "content": "a"},))
    strict = {**TOOL, "function": {**ADD, "strict": True}}
    with pytest.raises(BadRequest, match="limits which tokens can be sampled"):
        await chat.parsed(asked.model_copy(update={"tools": (strict,)}), [5], [])
    with pytest.raises(BadRequest, match="HONE_TOOL_PARSER to name one"):
        await prompt_tokens(chat_of(engine, None), asked.model_copy(update={"tools": (TOOL,)}))
    with pytest.raises(BadRequest, match=r"HONE_TOOL_PARSER is 'hermit'; expected one of .*hermes"):
        chat_of(engine, "hermit")
