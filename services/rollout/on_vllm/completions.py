"""Converts requests to vLLM's, and vLLM's completions to rollouts; and adapts vLLM's chat templates
and parsers to conversations, whose prompts and answers are tokens.

**Masks.** Under top-p, top-k or min-p the trainer needs the tokens that each token was drawn from:
vLLM's sampling masks. On a GPU vLLM returns them if `return_sampling_mask` is set. On a CPU vLLM's
model runner cannot, and `inside_executors.py` adds them. A token that was drawn from the whole
vocabulary has an empty mask.

**Text.** vLLM would make the text of a completion while it samples, and the text of each token that
it returns a log-prob of. That takes a fifth of the front end's time, and is not used here. Only
stop strings need the text so far. Without stop strings vLLM returns only tokens, and the text is
made when the completion is done.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import ValidationError, model_validator
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from services.rollout.engine import Adapter, BadPrompt, Constraint, failed_rollout
from services.rollout.running import spans
from shared.errors import BadRequest, Failed, NotFound
from shared.host.logs import get_logger
from shared.wire import ChatRequest, Logprobs, Message, Rollout, Sampling, Span, TokenIds
from shared.wire.messages import for_openai

NUMBER = "#"
"""The separator between an adapter's name and its number, in vLLM's name of the adapter."""

PARAMS = SamplingParams()

CONSTRAINTS = ("json", "json_object", "structural_tag")
"""Fields of vLLM's StructuredOutputsParams that schemas and forced calls set."""


def lora_request(adapter: Adapter) -> LoRARequest:
    """Returns vLLM's request for the adapter. vLLM keys cached prefixes by this name."""
    name = f"{adapter.name}{NUMBER}{adapter.number}"
    return LoRARequest(name, adapter.number, str(adapter.folder))


def sampling_params(
    sampling: Sampling, num_top: int = 0, constraint: Constraint | None = None
) -> SamplingParams:
    """Returns vLLM's parameters, with the log-prob of each sampled token and of the `num_top`
    likeliest. Flat log-probs are lists, and not one object per token."""
    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=num_top,
        flat_logprobs=True,
        structured_outputs=StructuredOutputsParams(**constraint) if constraint else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def rollout(
    completion: CompletionOutput,
    owner: str,
    adapter: Adapter | None = None,
    ended_s: float | None = None,
    *,
    masked: bool = False,
    num_top: int = 0,
) -> Rollout:
    """Returns the completion as a rollout, or a failed rollout with the error, for example that it
    was ended after `ended_s` seconds. An adapter has one version for all tokens; for other weights
    vLLM's labels say the versions. Raises Failed unless there is one log-prob per token, and with
    `masked` one mask per token."""
    token_ids, logprobs = completion.token_ids, _logprobs(completion)
    if len(logprobs) != len(token_ids):
        raise Failed(
            f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens, expected one each"
        )
    mask = completion.sampling_mask
    kept_ids, kept_counts = TokenIds(), TokenIds()
    top_ids, top_logprobs = top(completion.logprobs, num_top)
    if masked:
        kept_ids, kept_counts = packed(mask.token_ids if mask else [], len(token_ids))
    labels = [(label.version, label.start) for label in completion.weight_versions or ()]
    one = (Span(version=adapter.version, start=0),) if adapter else ()
    sampled_by = one or spans(labels, owner)
    reason = completion.finish_reason
    if reason == "abort" and ended_s is not None:
        reason = "timeout"
    if reason != "stop" and reason != "length" and reason != "timeout":
        return failed_rollout(f"vLLM ended it with {reason!r} after {len(token_ids)} tokens")
    if not math.isfinite(math.fsum(logprobs)):
        return failed_rollout(
            f"vLLM gave a log-prob that is not finite among {len(token_ids)} tokens"
        )
    return Rollout(
        text=completion.text,
        token_ids=TokenIds(token_ids),
        logprobs=Logprobs(logprobs),
        finish_reason=reason,
        error=f"not finished within {ended_s:g} s" if reason == "timeout" else None,
        spans=sampled_by,
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _logprobs(completion: CompletionOutput) -> Sequence[float]:
    """Returns the sampled tokens' log-probs: flat for `sample`, objects for vLLM's OpenAI
    routes."""
    assert completion.logprobs is not None
    if isinstance(completion.logprobs, FlatLogprobs):
        return own_logprobs(completion.logprobs)
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in pairs]


def own_logprobs(flat: FlatLogprobs) -> list[float]:
    """Returns the log-probs of the tokens themselves, each of which vLLM puts before the likeliest
    tokens of the position."""
    if flat.end_indices[:1] == [1] and len(flat.logprobs) == len(flat.start_indices):
        return flat.logprobs
    return [flat.logprobs[at] for at in _places(flat)]


def top(flat: Any, num_top: int) -> tuple[TokenIds, Logprobs]:
    """Returns the `num_top` likeliest tokens of each position, and their log-probs."""
    if not num_top or not isinstance(flat, FlatLogprobs):
        return TokenIds(), Logprobs()
    places = [at for start in _places(flat) for at in range(start + 1, start + 1 + num_top)]
    return (
        TokenIds([flat.token_ids[at] for at in places]),
        Logprobs([flat.logprobs[at] for at in places]),
    )


def _places(flat: FlatLogprobs) -> list[int]:
    """Returns where the entries of each position begin. The first token of a prompt has none."""
    pairs = zip(flat.start_indices, flat.end_indices, strict=True)
    return [start for start, end in pairs if end > start]


def packed(kept_T: Sequence[Sequence[int]], num_tokens: int) -> tuple[TokenIds, TokenIds]:
    """Returns `kept_ids` and `kept_counts` of a rollout (shared/wire/rollouts.py). Raises
    Failed unless there is one mask per token."""
    if len(kept_T) != num_tokens:
        raise Failed(
            f"vLLM gave {len(kept_T)} sampling masks for {num_tokens} tokens, expected one each"
        )
    ids = TokenIds([token for kept in kept_T for token in kept])
    return ids, TokenIds([len(kept) for kept in kept_T])


def text_of(
    tokenizer: Any,
    prompt_token_ids: list[int],
    token_ids: Sequence[int],
    *,
    stopped: bool,
    params: SamplingParams = PARAMS,
) -> str:
    """Returns the text of these tokens after the prompt, by vLLM's own detokenizer which gives the
    same text as vLLM with `params`: without special tokens, without incomplete characters at the
    end, and, if `stopped`, without the last token, which stopped the completion."""
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=prompt_token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(list(token_ids), stopped)
    return detokenizer.output_text


ALIAS = "policy"
"""The name under which callers get the weights that serve, whichever these are."""


class ChatCall(ChatCompletionRequest):
    """A chat completion whose messages are normalized as everywhere in Hone. They are copies: vLLM
    changes the messages that it is given."""

    @model_validator(mode="before")
    @classmethod
    def _normalized(cls, data: Any) -> Any:
        messages = data.get("messages") if isinstance(data, dict) else None
        if not isinstance(messages, list | tuple):
            return data
        if not all(isinstance(message, dict) for message in messages):
            return data
        return {**data, "messages": for_openai(messages)}


class VllmChat:
    """Renders and parses with `serving`, as vLLM's own route does."""

    def __init__(self, serving: OpenAIServingChat, tokenizer: Any) -> None:
        self._serving = serving
        self._tokenizer = tokenizer

    async def render(
        self, request: ChatRequest, messages: Sequence[Message], *, answering: bool
    ) -> str:
        """Returns the text that vLLM itself would tokenize."""
        call = self._vllm_request(request, messages, add_generation_prompt=answering)
        tools = [tool.model_dump() for tool in call.tools] if call.tools else None
        params = call.build_chat_params(None, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        renderer = self._serving.renderer
        try:
            _, prompt = await renderer.render_messages_async(call.messages, params)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise BadPrompt(f"the model's chat template refused the messages: {error}") from error
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise BadPrompt("the model's chat template renders no text, which a conversation needs")
        return text

    async def parsed(
        self, request: ChatRequest, prompt_token_ids: list[int], rollouts: Sequence[Rollout]
    ) -> list[Message]:
        """Returns the messages that vLLM's own route would answer with these completions."""
        call = await self._adjusted(request, prompt_token_ids)
        if not request.is_constrained and call.extract_structured_outputs() is not None:
            raise BadRequest(
                'a tool with "strict": true limits which tokens can be sampled, and training '
                "cannot compute the same limit; expected tools without it"
            )
        return [await self._parsed(call, prompt_token_ids, rollout) for rollout in rollouts]

    async def constraint(self, request: ChatRequest, prompt_token_ids: list[int]) -> Constraint:
        """Returns the fields of vLLM's StructuredOutputsParams: by the tool parser's own syntax of
        a call where vLLM knows it, else by JSON."""
        call = await self._adjusted(request, prompt_token_ids)
        outputs = call.extract_structured_outputs()
        if outputs is None:
            raise BadRequest(
                "the sampler's parser of tools (HONE_TOOL_PARSER) cannot force a call or limit "
                'their number; expected \'tool_choice\' "auto" or "none"'
            )
        fields = {name: getattr(outputs, name) for name in CONSTRAINTS}
        return {name: value for name, value in fields.items() if value is not None}

    async def _adjusted(
        self, request: ChatRequest, prompt_token_ids: list[int]
    ) -> ChatCompletionRequest:
        """Returns vLLM's request after rendering, in which parsers may have changed it."""
        kept = {"prompt_token_ids": prompt_token_ids}
        call = self._vllm_request(request, request.messages, kv_transfer_params=kept)
        try:
            rendered = await self._serving.online_renderer.render_chat(call)
        except (VLLMClientError, ValueError) as error:
            raise BadRequest(f"vLLM refuses the request: {error}") from error
        if isinstance(rendered, ErrorResponse):
            raise _error(rendered)
        return call

    async def _parsed(
        self, call: ChatCompletionRequest, prompt_token_ids: list[int], rollout: Rollout
    ) -> Message:
        serving, tokenizer = self._serving, self._serving.renderer.get_tokenizer()
        completion = CompletionOutput(
            index=0,
            text=self._text(call, prompt_token_ids, rollout),
            token_ids=list(rollout.token_ids),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=rollout.finish_reason,
        )
        id = call.request_id
        output = RequestOutput(id, None, prompt_token_ids, None, [completion], True)
        options = serving._effective_chat_template_kwargs(call)
        try:
            response = await serving.chat_completion_full_generator(
                call,
                _only(output),
                id,
                ALIAS,
                [],
                tokenizer,
                RequestResponseMetadata(request_id=id),
                serving._make_parser(call, tokenizer, options) if serving.parser_cls else None,
            )
            return _message(response.model_dump())
        except Exception as error:  # a parser failed on a model's text
            get_logger().warning("answer not parsed", error=f"{type(error).__name__}: {error}")
            return {"role": "assistant", "content": rollout.text}

    def _text(
        self, call: ChatCompletionRequest, prompt_token_ids: list[int], rollout: Rollout
    ) -> str:
        """Returns the completion's text, with special tokens if the parser needs them, but without
        the token or the string that stopped it."""
        if call.skip_special_tokens:
            return rollout.text
        last = rollout.token_ids[-1]
        is_end = bool(self.special_text(last)) or last in (call.stop_token_ids or ())
        return text_of(
            self._serving.renderer.get_tokenizer(),
            prompt_token_ids,
            rollout.token_ids,
            stopped=rollout.finish_reason == "stop" and (is_end or not call.stop),
            params=SamplingParams(stop=call.stop, skip_special_tokens=False),
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
        fields = request.model_dump(
            mode="json", exclude_none=True, exclude={"messages", "json_schema"}
        )
        if request.json_schema is not None:
            schema = {"name": "answer", "schema": request.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            return ChatCall.model_validate({**fields, "messages": messages, **options})
        except (ValidationError, VLLMClientError) as error:
            raise BadRequest(f"vLLM refuses the request: {' '.join(str(error).split())}") from error


def _message(body: dict[str, Any]) -> Message:
    """Returns the message in OpenAI's answer. It has `content`, which may be empty."""
    answer = body["choices"][0]["message"]
    fields = {name: value for name, value in answer.items() if value is not None}
    return {"content": "", **fields}


async def _only(output: RequestOutput) -> AsyncIterator[RequestOutput]:
    yield output


def _error(response: ErrorResponse) -> BadRequest | Failed:
    error = response.error
    if error.code == 404:
        return NotFound(error.message)
    return BadRequest(error.message) if error.code < 500 else Failed(error.message)
