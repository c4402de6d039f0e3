"""What the files of an adapter must hold, and how they get to the sampler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.rollout.weights.copies import Copies, Fetcher
from services.rollout.weights.loading import VerifiedAdapter, verify
from services.rollout.weights.proofs import AdapterConfig, ExpectedVersion, adapter_shapes
from services.trainer.publishing import Publisher, published_file
from shared.errors import BadRequest
from shared.settings import Settings
from shared.weights.folders import CONFIG, FILES, WEIGHTS, adapter_digests
from shared.wire import AdapterWeights, PublishRequest, WeightFile
from tests.support.cut_server import CutServer

MODEL = {
    "model.embed_tokens.weight": (64, 8),
    "model.layers.0.self_attn.q_proj.weight": (12, 8),
    "model.layers.0.self_attn.q_proj.bias": (12,),
    "model.layers.0.mlp.up_proj.weight": (20, 8),
    "model.layers.0.norm.weight": (8,),
}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "target", ["q_proj", "0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"]
)
def test_an_adapter_has_a_and_b_of_each_layer_that_it_names(target: str) -> None:
    config = AdapterConfig(r=2, target_modules=(target, "proj", "1.self_attn.q_proj"))
    assert adapter_shapes(config, MODEL) == {
        f"{LAYER}.lora_A.weight": (2, 8),
        f"{LAYER}.lora_B.weight": (12, 2),
    }


def save(folder: Path) -> None:
    (folder / CONFIG).write_text('{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}')
    tensors = {
        f"{LAYER}.lora_A.weight": np.ones((2, 8), np.float32),
        f"{LAYER}.lora_B.weight": np.ones((12, 2), np.float32),
    }
    save_file(tensors, folder / WEIGHTS)


def published(settings: Settings, server: CutServer) -> AdapterWeights:
    request = PublishRequest(job_id="job", version=1, method="lora")
    ref = Publisher(settings, "job").publish(request, 5, save)
    assert isinstance(ref, AdapterWeights)
    for file in ref.files:
        path = published_file(settings, *file.path.split("/")[2:])
        server.files[file.path] = path.read_bytes()
    return ref


async def test_a_sampler_on_another_machine_fetches_both_files_and_resumes(
    tmp_path: Path,
) -> None:
    settings = Settings(shm_dir=tmp_path / "shm", runs_dir=tmp_path / "runs")
    expected = ExpectedVersion(MODEL, tied=True, roots=(tmp_path,), max_lora_rank=2)
    with CutServer(cuts=[10, 100]).running() as server:
        ref = published(settings, server)
        here = ref.model_copy(update={"path": str(tmp_path / "elsewhere" / "a1")})
        copies = Copies(tmp_path / "copies", Fetcher(server.url, patience_s=5))
        verified = await verify(here, expected, copies)
    assert isinstance(verified, VerifiedAdapter)
    assert (verified.digest, verified.received_bytes) == (ref.digest, ref.size_bytes)
    assert adapter_digests(verified.copy.folder) == ref.tensors
    assert server.ranges.count(None) == 2, "each begun once"
    assert verified.copy.folder.parent == tmp_path / "copies" / "adapters"


async def test_a_sampler_that_sees_the_folder_makes_a_copy_of_its_own(tmp_path: Path) -> None:
    settings = Settings(shm_dir=tmp_path / "shm", runs_dir=tmp_path / "runs")
    expected = ExpectedVersion(MODEL, tied=True, roots=(tmp_path,), max_lora_rank=2)
    with CutServer().running() as server:
        ref = published(settings, server)
    copies = Copies(tmp_path / "copies", Fetcher("http://127.0.0.1:9", patience_s=0))
    first, second = [await verify(ref, expected, copies) for _ in range(2)]
    assert isinstance(first, VerifiedAdapter) and isinstance(second, VerifiedAdapter)
    assert (first.received_bytes, first.copy.folder != second.copy.folder) == (0, True)
    assert sorted(file.name for file in first.copy.folder.iterdir()) == sorted(FILES)


async def test_files_that_are_no_adapters_are_not_fetched(tmp_path: Path) -> None:
    ref = AdapterWeights(
        job_id="job",
        version=1,
        method="lora",
        path="/nowhere/a1",
        adapter="job/v1",
        digest="",
        size_bytes=0,
        files=(WeightFile(path="/weights/job/a1/model.safetensors", size_bytes=1),),
    )
    copies = Copies(tmp_path / "copies", Fetcher("http://127.0.0.1:9"))
    expected = ExpectedVersion(MODEL, tied=True, roots=(tmp_path,), max_lora_rank=2)
    with pytest.raises(BadRequest, match=r"'files': got \['model.safetensors'\], expected"):
        await verify(ref, expected, copies)
