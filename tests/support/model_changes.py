"""Weights of a folder, changed a little."""

from __future__ import annotations

import shutil
from pathlib import Path


def changed(model: Path, folder: Path, change: float) -> Path:
    """Writes the model with each weight w changed at random to w (1 + change * x), x from a normal
    distribution, into `folder` and returns it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.mul_(1 + change * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
