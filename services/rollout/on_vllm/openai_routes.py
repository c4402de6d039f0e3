"""OpenAI's `/models`, `/completions` and `/chat/completions`: vLLM's own handlers, on an app of
ours without the rest of vLLM. A job's adapter is called by the job's id.

vLLM's server has some eighty routes, among them ones that sleep the engine, load adapters or reset
caches. Here are three.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fastapi import Depends, FastAPI
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import show_available_models
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager

from services.rollout.engine import Offers
from services.rollout.on_vllm.adapters import ALIAS, ServingModels
from services.rollout.on_vllm.chat import WatchedChat
from shared.errors import BadRequest


def openai_app(
    engine: EngineClient, model: str, offers: Offers | None = None, tool_parser: str | None = None
) -> FastAPI:
    """Returns the app that answers for `engine`, which is called `model` or `policy`, and for the
    adapters that it offers. `tool_parser` finds calls of tools in answers. Raises BadRequest if
    vLLM has none of that name."""
    _check_parser(tool_parser)
    names = [BaseModelPath(name, model) for name in (model, ALIAS)]
    models = (
        ServingModels(engine, model, offers)
        if offers is not None
        else OpenAIServingModels(engine, names)
    )
    chat: dict[str, Any] = {
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
        "enable_auto_tools": tool_parser is not None,
        "tool_parser": tool_parser,
    }
    renderer = OnlineRenderer(engine.model_config, engine.renderer, **chat)
    app = FastAPI(openapi_url=None)
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.openai_serving_models = models
    app.state.openai_serving_completion = OpenAIServingCompletion(
        engine, models, online_renderer=renderer, request_logger=None
    )
    app.state.openai_serving_chat = WatchedChat(
        engine, models, "assistant", online_renderer=renderer, **chat
    )
    init_exception_handler(app)
    json_only = [Depends(validate_json_request)]
    app.add_api_route("/models", show_available_models, methods=["GET"])
    app.add_api_route("/completions", create_completion, methods=["POST"], dependencies=json_only)
    app.add_api_route(
        "/chat/completions", create_chat_completion, methods=["POST"], dependencies=json_only
    )
    return app


def _check_parser(name: str | None) -> None:
    known = ToolParserManager.list_registered()
    if name is not None and name not in known:
        raise BadRequest(f"HONE_TOOL_PARSER is {name!r}; expected one of {', '.join(known)}")
