"""The canary of 24 layers in bfloat16: vLLM's differs by no more than the trainer's own noise says,
and weights of another version by more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.pool import canary
from services.rollout.on_vllm.starter import VllmStarter
from services.rollout.sampler import Sampler
from services.rollout.weights.copies import Copies
from services.rollout.weights.fetching import Fetcher
from shared.settings import Settings
from shared.wire import Canary, Example, ModelRequest, WeightsRef
from shared.wire.packed import Logprobs, TokenIds
from tests.support.deep_models import save_deep_model
from tests.support.rollout_bench import folder_weights

pytestmark = [pytest.mark.engine, pytest.mark.system, pytest.mark.timeout(600)]

CHANGE = 0.05
"""Share of each weight's size by which the second version differs."""


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def canary_of(folder: Path) -> Canary:
    """Returns what the trainer publishes of the weights in a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    from services.trainer.learning.batch import collate
    from services.trainer.learning.noise import rounding_noise
    from services.trainer.learning.policy import Policy
    from services.trainer.zero.deepspeed_engine import canary_ids

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = canary_ids(model.config, None)
    whole = Example(prompt_token_ids=TokenIds(ids[:1]), token_ids=TokenIds(ids[1:]), advantage=0.0)
    batch = collate([whole])
    with torch.no_grad():
        logprobs_N = Policy(model, temperature=1.0)(batch)[0]
    return Canary(
        token_ids=ids,
        logprobs=Logprobs(logprobs_N.float().tolist()),
        dtype="bfloat16",
        noise=rounding_noise(model, batch, logprobs_N, 1024),
    )


def changed(model: Path, folder: Path) -> Path:
    """Writes the model with each weight changed at random into `folder` and returns it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.mul_(1 + CHANGE * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


async def test_vllms_canary_is_within_the_trainers_noise_and_old_weights_are_not(
    tmp_path: Path, environment: None
) -> None:
    settings = Settings(runs_dir=tmp_path / "runs", kv_cache_gib=1)
    model = save_deep_model(tmp_path / "model", num_layers=24)
    new = changed(model, settings.runs_dir / "v1")
    ours, old = canary_of(new), canary_of(model)
    copies = Copies(tmp_path / "copies", Fetcher("http://127.0.0.1:9"))
    sampler = Sampler(VllmStarter(settings), (settings.runs_dir,), copies)
    sampler.open(None)
    try:
        await sampler.put_model(ModelRequest(model=str(model), dtype="bfloat16"))
        ref = folder_weights(new, 1, "job", (0, 0)).model_copy(update={"canary": ours})
        serving = await sampler.reload_weights(WeightsRef(ref))
    finally:
        await sampler.close()
    found, allowed = canary.difference(ours, serving), canary.tolerance(ours, serving)
    other = canary.difference(old, serving)
    print(f"right weights {found:.3f}, allowed {allowed:.3f}, other weights {other:.3f}")
    assert canary.fault(ours, serving) is None
    assert found > 0.02 and allowed < 0.2
    assert canary.fault(old, serving) is not None
