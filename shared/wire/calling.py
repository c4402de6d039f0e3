"""`/v1/models` and OpenAI's completions, as far as the orchestrator must know them to pass them on
to samplers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel


class ServedModel(BaseModel):
    """A model that can be called by its `id`, with the sampler's other fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    object: str = "model"


class ServedModelList(BaseModel):
    """`GET /v1/models`: the models that can be called now."""

    object: str = "list"
    data: tuple[ServedModel, ...]


class CallRequest(BaseModel):
    """`POST /v1/completions` and `/v1/chat/completions`: the model, and OpenAI's other fields,
    which the sampler reads."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str


class CallAnswer(RootModel[dict[str, Any]]):
    """OpenAI's completion or chat completion."""
