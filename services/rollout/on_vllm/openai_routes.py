"""OpenAI's `/models`, `/completions`, `/chat/completions` and `/responses`, Anthropic's
`/messages`, and the routes of a vLLM server that trainers call, by vLLM's own handlers. A job's
adapter is called by the job's id.

The app has these routes only. vLLM's own server has some eighty, and some of them put the engine to
sleep, load adapters or reset caches: those are Hone's own (`services/rollout/rl_routes.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from fastapi import Depends, FastAPI, Request
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import show_available_models
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.rl.online.api_router import get_world_size
from vllm.entrypoints.scale_out.token_in_token_out.api_router import generate
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.dev.server_info.api_router import show_server_info
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.lora.request import LoRARequest
from vllm.renderers.online_derenderer import OnlineDerenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager

from services.rollout.on_vllm.completions import ALIAS, NUMBER, ChatCall, lora_request
from services.rollout.weights.adapters import LoadedAdapters
from shared.errors import BadRequest


class _Requests(Mapping[str | None, LoRARequest]):
    """vLLM looks up the adapter that a call names here. A call without a name, or with the name
    `policy`, gets the adapter that serves, and none if the model's own weights serve."""

    def __init__(self, adapters: LoadedAdapters) -> None:
        self._adapters = adapters

    def __contains__(self, name: object) -> bool:
        return self._adapters.knows(_own(name))

    def __getitem__(self, name: str | None) -> LoRARequest:
        adapter = self._adapters.find(_own(name))
        if adapter is None:
            raise KeyError(name)
        return lora_request(adapter)

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._adapters.names())

    def __len__(self) -> int:
        return len(self._adapters.names())


def _own(name: object) -> str | None:
    return None if name in (None, "", ALIAS) else str(name)


class ServingModels(OpenAIServingModels):
    """The base model and the adapters beside it, as vLLM's routes see them."""

    def __init__(
        self, engine: EngineClient, names: list[BaseModelPath], adapters: LoadedAdapters
    ) -> None:
        super().__init__(engine, names)
        self._adapters = adapters
        self.lora_requests: Any = _Requests(adapters)

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        name = super().model_name(lora_request)
        return name.partition(NUMBER)[0] if lora_request else name

    async def show_available_models(self) -> ModelList:
        models = await self.registry.show_available_models()
        models.data += [
            ModelCard(
                id=job_id,
                root=adapter.name,
                max_model_len=self.registry.model_config.max_model_len,
                parent=self.base_model_paths[0].name,
                permission=[ModelPermission()],
            )
            for job_id, adapter in self._adapters.names().items()
        ]
        return models


async def _chat_completion(request: ChatCall, raw_request: Request) -> Any:
    return await create_chat_completion(request, raw_request)


POSTS: dict[str, Any] = {
    "/completions": create_completion,
    "/chat/completions": _chat_completion,
    "/responses": create_responses,
    "/messages": create_messages,
    "/inference/v1/generate": generate,
}
GETS: dict[str, Any] = {
    "/models": show_available_models,
    "/get_world_size": get_world_size,
    "/server_info": show_server_info,
}


def openai_app(
    engine: EngineClient,
    model: str,
    adapters: LoadedAdapters | None = None,
    tool_parser: str | None = None,
) -> FastAPI:
    """Returns the app that answers for `engine`, by the names `model` and `policy`, and for its
    `adapters`. `tool_parser` finds calls of tools in answers. Raises BadRequest if vLLM has no
    parser of that name."""
    known = ToolParserManager.list_registered()
    if tool_parser is not None and tool_parser not in known:
        raise BadRequest(f"HONE_TOOL_PARSER is {tool_parser!r}; expected one of {', '.join(known)}")
    names = [BaseModelPath(name, model) for name in (model, ALIAS)]
    models = (
        ServingModels(engine, names, adapters)
        if adapters is not None
        else OpenAIServingModels(engine, names)
    )
    app = FastAPI(openapi_url=None)
    _set_handlers(app.state, engine, models, tool_parser)
    init_exception_handler(app)
    json_only = [Depends(validate_json_request)]
    for path, route in POSTS.items():
        app.add_api_route(path, route, methods=["POST"], dependencies=json_only)
    for path, route in GETS.items():
        app.add_api_route(path, route, methods=["GET"])
    return app


def _set_handlers(
    state: Any, engine: EngineClient, models: OpenAIServingModels, tool_parser: str | None
) -> None:
    """Sets the handlers of vLLM that its routes find in the app's state."""
    chat: dict[str, Any] = {
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
        "enable_auto_tools": tool_parser is not None,
        "tool_parser": tool_parser,
    }
    renderer = OnlineRenderer(engine.model_config, engine.renderer, **chat)
    state.args = SimpleNamespace(log_error_stack=False)
    state.openai_serving_models = models
    state.openai_serving_completion = OpenAIServingCompletion(
        engine, models, online_renderer=renderer, request_logger=None
    )
    state.openai_serving_chat = OpenAIServingChat(
        engine,
        models,
        "assistant",
        online_renderer=renderer,
        enable_prompt_tokens_details=True,
        **chat,
    )
    state.openai_serving_responses = OpenAIServingResponses(
        engine, models, renderer, enable_prompt_tokens_details=True, **chat
    )
    state.anthropic_serving_messages = AnthropicServingMessages(
        engine,
        models,
        "assistant",
        online_renderer=renderer,
        enable_prompt_tokens_details=True,
        **chat,
    )
    state.engine_client, state.vllm_config = engine, engine.vllm_config
    derenderer: dict[str, Any] = {}
    if "online_derenderer" in inspect.signature(ServingTokens).parameters:  # vLLM 0.32 lacks it
        derenderer["online_derenderer"] = OnlineDerenderer(
            engine.model_config, engine.renderer, **chat
        )
    state.serving_tokens = ServingTokens(
        engine, models, renderer, request_logger=None, **derenderer
    )
