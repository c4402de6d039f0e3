"""What the files of an adapter must hold: for each layer of the model that its configuration names,
A `[rank, in]` and B `[out, rank]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from shared.errors import Failed
from shared.weights.checkpoints import CONFIG, PREFIX

SUFFIX = ".weight"


class AdapterConfig(BaseModel):
    """Of PEFT's configuration, what says which tensors there are."""

    r: int = Field(ge=1)
    target_modules: tuple[str, ...] = Field(min_length=1)


def read_config(folder: Path) -> AdapterConfig:
    """Raises Failed for a configuration that lacks rank or layers."""
    try:
        return AdapterConfig.model_validate_json((folder / CONFIG).read_bytes())
    except (OSError, ValidationError) as error:
        raise Failed(
            f"the adapter's {CONFIG} cannot be used: {' '.join(str(error).split())}",
            code="tensors_differ",
        ) from error


def adapter_shapes(
    config: AdapterConfig, model: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the adapter's tensors, given those of the model's. As with PEFT, a
    layer is named by the whole of its name or by the end of it."""
    wanted: dict[str, tuple[int, ...]] = {}
    targets = set(config.target_modules)
    for name, shape in model.items():
        layer = name.removesuffix(SUFFIX)
        if name.endswith(SUFFIX) and len(shape) == 2 and targets & _endings(layer):
            wanted[f"{PREFIX}{layer}.lora_A{SUFFIX}"] = (config.r, shape[1])
            wanted[f"{PREFIX}{layer}.lora_B{SUFFIX}"] = (shape[0], config.r)
    return wanted


def _endings(layer: str) -> set[str]:
    """Returns "c", "b.c" and "a.b.c" for "a.b.c"."""
    parts = layer.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}
