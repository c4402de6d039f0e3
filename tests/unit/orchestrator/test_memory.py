"""What a dry run says of memory, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.orchestrator.data.memory import GIB, CannotEstimate, estimate
from shared.config import Settings
from shared.job import Job

SHAPES = {
    "model.embed_tokens.weight": (1000, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.mlp.up_proj.weight": (256, 64),
    "model.norm.weight": (64,),
}
COUNT = 64_000 + 4_096 + 16_384 + 64
CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def job(model: Path | str, **sections: Any) -> Job:
    return Job.model_validate(
        {
            "name": "t",
            "model": str(model),
            "steps": 1,
            "data": {"train": "x"},
            "rewards": [{"grader": "length"}],
            **sections,
        }
    )


def gib(size_bytes: float) -> float:
    return round(size_bytes / GIB, 3)


def test_whole_weights_are_shared_out_by_zeros_stages(model: Path) -> None:
    found = estimate(job(model), Settings(trainer_ranks=4))
    assert found.num_parameters == found.num_trainable == COUNT
    tokens, layer = 16384, 4 * 256 + 12 * 64
    assert (found.weights_gib, found.optimizer_gib) == (gib(2 * COUNT), gib(12 * COUNT / 4))
    assert found.gradients_gib == gib(4 * COUNT / 4)
    assert found.activations_gib == gib(2 * tokens * (64 * 3 + layer)) == 0.061
    assert found.cache_bytes_per_token == 2 * 2 * 3 * 2 * 8
    whole = {"memory": {"zero_stage": 3, "gradient_checkpointing": False}}
    found = estimate(job(model, **whole, training={"dtype": "float32"}), Settings(trainer_ranks=2))
    assert found.weights_gib == gib(4 * COUNT / 2)
    assert found.activations_gib == gib(4 * tokens * 3 * layer) == 0.328


def test_only_adapters_have_gradients_under_lora(model: Path) -> None:
    found = estimate(job(model, lora={"rank": 4}), Settings())
    assert found.num_trainable == 4 * (64 + 64) + 4 * (256 + 64)
    found = estimate(job(model, lora={"rank": 4, "target_modules": ["q_proj"]}), Settings())
    assert found.num_trainable == 4 * (64 + 64)


def test_a_model_that_is_not_here_is_not_estimated(model: Path) -> None:
    with pytest.raises(CannotEstimate, match="'owner/model' is not a folder here"):
        estimate(job("owner/model"), Settings())
    (model / "config.json").write_text("{}")
    with pytest.raises(CannotEstimate, match=r"config\.json has no 'hidden_size'"):
        estimate(job(model), Settings())
