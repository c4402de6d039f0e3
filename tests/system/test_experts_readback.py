"""Mixtures of experts, served by the real vLLM: each expert's matrices are read back from what it
packed of them, and a tensor that is not as published is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rollout.on_vllm.processes import VllmStarter
from services.rollout.sampler import Sampler
from services.rollout.weights.copies import Copies, Fetcher
from services.rollout.weights.proofs import differing, given_tensors
from shared.settings import Settings
from shared.wire import ModelRequest, WeightsRef
from tests.support.rollout_bench import folder_weights
from tests.support.tiny_experts import KINDS, make_tiny_experts
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.system, pytest.mark.timeout(600)]

CHANGED = {
    "qwen3_moe": "model.layers.1.mlp.experts.5.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
}


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def in_dtype(folder: Path, dtype: str) -> Path:
    """Rounds the weights of the model to `dtype`, and gives it a tokenizer."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = {name: t.to(getattr(torch, dtype)) for name, t in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    for tokens in make_tiny_model(folder.parent / "tokens").glob("token*"):
        shutil.copy(tokens, folder)
    return folder


@pytest.mark.parametrize(("kind", "dtype"), zip(KINDS, ("bfloat16", "float32"), strict=True))
async def test_an_expert_that_is_not_as_published_is_named(
    tmp_path: Path, environment: None, kind: str, dtype: str
) -> None:
    from safetensors.torch import load_file, save_file

    model = in_dtype(make_tiny_experts(kind, tmp_path / "model"), dtype)
    settings = Settings(runs_dir=tmp_path / "runs", kv_cache_gib=1)
    copies = Copies(tmp_path / "copies", Fetcher("http://127.0.0.1:9"))
    sampler = Sampler(VllmStarter(settings), (settings.runs_dir,), copies)
    sampler.open(None)
    try:
        await sampler.put_model(ModelRequest.model_validate({"model": str(model), "dtype": dtype}))
        given = await sampler.check_weights()
        assert (given.num_tensors, given.differing, given.unread) == (
            len(load_file(model / "model.safetensors")),
            (),
            (),
        )
        other = settings.runs_dir / "v1"
        shutil.copytree(model, other)
        tensors = load_file(other / "model.safetensors")
        tensors[CHANGED[kind]][2, 3] *= -2
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
        ref = folder_weights(other, 1, "job", (0, 0)).model_copy(update={"method": "restart"})
        await sampler.reload_weights(WeightsRef(ref))
        found = await (await sampler.ready_engine()).digests()
        assert differing(found, given_tensors(model, dtype)) == (CHANGED[kind],)
        assert differing(found, given_tensors(other, dtype)) == ()
    finally:
        await sampler.close()
