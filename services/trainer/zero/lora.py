"""Low-rank adapters (arXiv 2106.09685), by PEFT: W x becomes W x + (alpha / rank) B A x, where A
and B are trained.

The adapters are put into the model's own layers, so the rest of the trainer runs the same model as
without them. Published and exported weights are merged, W + (alpha / rank) B A, computed in float32
and then rounded to the model's dtype. W itself is never changed: adding and subtracting B A would
round W a little more each time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear, LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.errors import BadRequest
from shared.job import LoraSpec
from shared.plan.model import ATTENTION
from shared.weights.architectures import has_experts
from shared.weights.folders import PREFIX, WEIGHTS

ADAPTER = "default"
BASE = ".base_layer."
OWN = ".lora_"


def attach(model: Any, spec: LoraSpec) -> Any:
    """Puts adapters into `model`, freezes the rest and returns PEFT's wrapper around it. Raises
    BadRequest for target modules that the model does not have, or that cannot be merged."""
    targets = _targets(model, spec)
    settings = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  (PEFT takes fractions too)
        lora_dropout=spec.dropout,
        target_modules=targets,
        exclude_modules=_beside_text(model),
        task_type="CAUSAL_LM",
    )
    try:
        wrapped: Any = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise BadRequest(f"lora.target_modules is {spec.target_modules!r}: {error}") from error
    if unknown := _unknown(targets, lora_layers(model)):
        raise BadRequest(
            f"lora.target_modules names {', '.join(map(repr, unknown))}, and the model has no such "
            "layer; expected names of its layers"
        )
    tied = (
        model.get_output_embeddings()
        if model.config.get_text_config().tie_word_embeddings
        else None
    )
    for name, layer in lora_layers(model).items():
        if not isinstance(layer, Linear):
            raise BadRequest(
                f"lora.target_modules names {name!r}, a {type(layer.get_base_layer()).__name__}; "
                "expected linear layers"
            )
        if layer is tied:
            raise BadRequest(
                f"lora.target_modules names {name!r}, whose weight is also the model's embedding; "
                "expected other layers"
            )
    return wrapped


@torch.no_grad()
def begin(model: nn.Module, seed: int) -> None:
    """Gives the adapters their initial values, which depend only on the seed: A as PEFT draws it, B
    zero. So a job that shares a base model begins with the same values as alone."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        matrix_A, matrix_B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        drawn = torch.empty(matrix_A.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        matrix_A.copy_(drawn)
        matrix_B.zero_()


def _unknown(targets: str | list[str], names: Iterable[str]) -> list[str]:
    """Returns the targets that no adapter was put at, by the `names` of layers with one."""
    if isinstance(targets, str):
        return []
    there = [*names]
    return [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in there)]


def _targets(model: Any, spec: LoraSpec) -> str | list[str]:
    """Returns the layers for adapters, in PEFT's format. In a mixture of experts "all-linear" means
    attention's layers, because samplers support no other layers."""
    if not isinstance(spec.target_modules, str):
        return list(spec.target_modules)
    if not has_experts(model.config.get_text_config().to_dict()):
        return spec.target_modules
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and ATTENTION in name
    ]


def _beside_text(model: Any) -> list[str]:
    """Returns the linear layers that text does not pass through: layers of inner models such as a
    vision tower, and of the parts that connect them."""
    decoder = model.get_decoder()
    for_text = [model.get_output_embeddings(), *decoder.modules()]
    others = [each for each in for_text[2:] if isinstance(each, PreTrainedModel)]
    excluded = {id(layer) for layer in for_text}
    excluded -= {id(layer) for other in others for layer in other.modules()}
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and id(layer) not in excluded
    ]


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_adapters(name: str) -> bool:
    """Returns whether the tensor of this name belongs to an adapter."""
    return OWN in name


def set_dropout(model: nn.Module, on: bool) -> None:
    """Turns the adapters' dropout on, for passes that train, or off."""
    for layer in lora_layers(model).values():
        layer.lora_dropout.train(on)


def merged(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a plain model's weights from a model with adapters. Merged tensors are in CPU
    memory."""
    result = {
        name.replace(BASE, "."): value for name, value in weights.items() if not is_adapters(name)
    }
    for name, layer in lora_layers(model).items():
        base = weights[f"{name}{BASE}weight"]
        update = (
            weights[f"{name}.lora_B.{ADAPTER}.weight"].float()
            @ weights[f"{name}.lora_A.{ADAPTER}.weight"].float()
        )
        update = update.T if layer.fan_in_fan_out else update
        result[f"{name}.weight"] = (
            (base.float() + layer.scaling[ADAPTER] * update).to(base.dtype).cpu()
        )
    return result


def save_adapter(wrapped: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes the adapter as PEFT does, for `PeftModel.from_pretrained(base, folder)`."""
    named = {f"{PREFIX}{name}": value for name, value in weights.items()}
    adapter = get_peft_model_state_dict(wrapped, state_dict=named, save_embedding_layers=False)
    save_file(
        {name: value.contiguous() for name, value in adapter.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    settings = copy.deepcopy(wrapped.peft_config[ADAPTER])
    settings.inference_mode = True
    # By full names: which layers "all-linear" means, and samplers expect, is then in the file.
    settings.target_modules = sorted(name.removeprefix(PREFIX) for name in lora_layers(wrapped))
    settings.save_pretrained(str(folder))
