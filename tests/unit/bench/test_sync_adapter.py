"""The adapters that bench.sync moves have the bytes that rank and layers say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench.sync_adapter import ATTENTION, EVERY, saving, share_by_shapes
from services.rollout.weights.proofs import adapter_shapes, read_config, shapes
from shared.weights.folders import stored_tensors


def test_an_adapter_has_32_bytes_for_each_row_and_column_of_its_layers(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    folder.mkdir()
    layers = {"layer.q_proj.weight": (4, 8), "layer.up_proj.weight": (12, 8), "norm.weight": (8,)}
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in layers.items()},
        model / "m.safetensors",
    )
    for targets, num_bytes in ((ATTENTION, 32 * (4 + 8)), (EVERY, 32 * (4 + 8 + 12 + 8))):
        saving(model, targets, seed=0)(folder)
        stored = stored_tensors(folder)
        assert sum(tensor.size_bytes for tensor in stored.values()) == num_bytes
        assert shapes(stored) == adapter_shapes(read_config(folder), layers)
    # of 4 x 8 + 12 x 8 + 8 elements
    assert share_by_shapes(model, ATTENTION) == pytest.approx(16 * (4 + 8) / 136)
    assert share_by_shapes(model, EVERY) == pytest.approx(16 * (4 + 8 + 12 + 8) / 136)
