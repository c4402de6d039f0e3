"""vLLM's chat templates and parsers as conversations need them: what is given and sampled are
tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import ValidationError
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput

from services.rollout.engine import BadPrompt
from services.rollout.on_vllm.completions import text_of
from shared.errors import BadRequest, Failed, NotFound
from shared.host.logs import get_logger
from shared.wire import ChatRequest, Message, Rollout

ALIAS = "policy"
"""The name by which callers may ask for the model that serves, whichever it is."""


class VllmChat:
    """Renders and parses by `serving`, as vLLM's own route does."""

    def __init__(self, serving: OpenAIServingChat, tokenizer: Any) -> None:
        self._serving = serving
        self._tokenizer = tokenizer

    async def render(
        self, request: ChatRequest, messages: Sequence[Message], *, answering: bool
    ) -> str:
        """Returns the text that vLLM itself would tokenize."""
        asked = self._vllm_request(request, messages, add_generation_prompt=answering)
        tools = [tool.model_dump() for tool in asked.tools] if asked.tools else None
        params = asked.build_chat_params(None, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        renderer = self._serving.renderer
        try:
            _, prompt = await renderer.render_messages_async(asked.messages, params)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise BadPrompt(f"the model's chat template refused the messages: {error}") from error
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise BadPrompt("the model's chat template gives no text, which a conversation needs")
        return text

    async def parsed(
        self, request: ChatRequest, prompt_token_ids: list[int], rollouts: Sequence[Rollout]
    ) -> list[Message]:
        """Returns what vLLM's own route would answer with these completions."""
        kept = {"prompt_token_ids": prompt_token_ids}
        asked = self._vllm_request(request, request.messages, kv_transfer_params=kept)
        try:
            rendered = await self._serving.online_renderer.render_chat(asked)
        except (VLLMClientError, ValueError) as error:
            raise BadRequest(f"vLLM refuses the request: {error}") from error
        if isinstance(rendered, ErrorResponse):
            raise _error(rendered)
        _refuse_limits(asked)  # rendering has let the parsers change `asked`
        return [await self._parsed(asked, prompt_token_ids, rollout) for rollout in rollouts]

    async def _parsed(
        self, asked: ChatCompletionRequest, prompt_token_ids: list[int], rollout: Rollout
    ) -> Message:
        serving, tokenizer = self._serving, self._serving.renderer.get_tokenizer()
        completion = CompletionOutput(
            index=0,
            text=self._text(asked, prompt_token_ids, rollout),
            token_ids=list(rollout.token_ids),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=rollout.finish_reason,
        )
        id = asked.request_id
        output = RequestOutput(id, None, prompt_token_ids, None, [completion], True)
        options = serving._effective_chat_template_kwargs(asked)
        try:
            response = await serving.chat_completion_full_generator(
                asked,
                _only(output),
                id,
                ALIAS,
                [],
                tokenizer,
                RequestResponseMetadata(request_id=id),
                serving._make_parser(asked, tokenizer, options) if serving.parser_cls else None,
            )
            return _message(response.model_dump())
        except Exception as error:  # a parser, on what a model wrote
            get_logger().warning("answer not parsed", error=f"{type(error).__name__}: {error}")
            return {"role": "assistant", "content": rollout.text}

    def _text(
        self, asked: ChatCompletionRequest, prompt_token_ids: list[int], rollout: Rollout
    ) -> str:
        """Returns the completion's text, with special tokens if the parser needs them, but without
        the token or the string that stopped it."""
        if asked.skip_special_tokens:
            return rollout.text
        last = rollout.token_ids[-1]
        is_end = bool(self.special_text(last)) or last in (asked.stop_token_ids or ())
        return text_of(
            self._serving.renderer.get_tokenizer(),
            prompt_token_ids,
            rollout.token_ids,
            stopped=rollout.finish_reason == "stop" and (is_end or not asked.stop),
            params=SamplingParams(stop=asked.stop, skip_special_tokens=False),
        )

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def special_text(self, token_id: int) -> str:
        token = self._tokenizer.added_tokens_decoder.get(token_id)
        return str(token) if token is not None and token.special else ""

    def _vllm_request(
        self, request: ChatRequest, messages: Sequence[Message], **options: Any
    ) -> ChatCompletionRequest:
        if request.tools and request.tool_choice != "none" and not self._serving.enable_auto_tools:
            raise BadRequest(
                "a parser finds the calls of tools, and this sampler has none: expected "
                'HONE_TOOL_PARSER to name one (such as "hermes"), or '
                "'tool_choice' \"none\", which leaves calls in the text"
            )
        given = request.model_dump(mode="json", exclude_none=True, exclude={"messages"})
        try:
            # Copies: vLLM changes the messages that it is given.
            return ChatCompletionRequest.model_validate(
                {**given, "messages": [dict(message) for message in messages], **options}
            )
        except (ValidationError, VLLMClientError) as error:
            raise BadRequest(f"vLLM refuses the request: {' '.join(str(error).split())}") from error


def _refuse_limits(request: ChatCompletionRequest) -> None:
    if request.extract_structured_outputs() is not None:
        raise BadRequest(
            'a tool with "strict": true limits which tokens can be sampled, and training cannot '
            "compute that again; expected tools without it"
        )


def _message(body: dict[str, Any]) -> Message:
    """Returns the message in OpenAI's answer. It has `content`, which may be empty."""
    said = body["choices"][0]["message"]
    given = {name: value for name, value in said.items() if value is not None}
    return {"content": "", **given}


async def _only(output: RequestOutput) -> AsyncIterator[RequestOutput]:
    yield output


def _error(response: ErrorResponse) -> BadRequest | Failed:
    error = response.error
    if error.code == 404:
        return NotFound(error.message)
    return BadRequest(error.message) if error.code < 500 else Failed(error.message)
