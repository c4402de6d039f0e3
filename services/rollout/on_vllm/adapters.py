"""Adapters as vLLM takes them, and how its OpenAI routes find the one that a call names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
from vllm.lora.request import LoRARequest

from services.rollout.engine import Adapter, Offers

ALIAS = "policy"
"""What a caller may name the model that serves, whichever it is."""

NUMBER = "#"
"""Between an adapter's name and its number, in the name that vLLM knows it by."""


def lora_request(adapter: Adapter) -> LoRARequest:
    """Returns the adapter as vLLM takes it. It keys cached prefixes by this name."""
    name = f"{adapter.name}{NUMBER}{adapter.number}"
    return LoRARequest(name, adapter.number, str(adapter.folder))


class _Requests(Mapping[str | None, LoRARequest]):
    """vLLM looks here for the adapter that a call names. Without a name, or as `policy`, it is the
    one that serves; if it is the model's own weights that serve, there is none."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def __contains__(self, name: object) -> bool:
        return self._offers.knows(_own(name))

    def __getitem__(self, name: str | None) -> LoRARequest:
        adapter = self._offers.find(_own(name))
        if adapter is None:
            raise KeyError(name)
        return lora_request(adapter)

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._offers.names())

    def __len__(self) -> int:
        return len(self._offers.names())


def _own(name: object) -> str | None:
    return None if name in (None, "", ALIAS) else str(name)


class ServingModels(OpenAIServingModels):
    """The base model, and the adapters that are offered beside it."""

    def __init__(self, engine: EngineClient, model: str, offers: Offers) -> None:
        super().__init__(engine, [BaseModelPath(name, model) for name in (model, ALIAS)])
        self._offers = offers
        self.lora_requests: Any = _Requests(offers)

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        name = super().model_name(lora_request)
        return name.partition(NUMBER)[0] if lora_request else name

    async def show_available_models(self) -> ModelList:
        models = await self.registry.show_available_models()
        models.data += [
            ModelCard(
                id=job_id,
                root=adapter.name,
                parent=self.base_model_paths[0].name,
                permission=[ModelPermission()],
            )
            for job_id, adapter in self._offers.names().items()
        ]
        return models
