"""A model's fingerprint: the same for the same model wherever it lies, another for another one."""

import hashlib
import shutil

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM

from services.trainer.disk.checkpoints import fingerprint
from services.trainer.zero.models import model_files
from shared.errors import BadRequest
from tests.support.trainer_fakes import job_request


def of(folder) -> str:
    return fingerprint(model_files(job_request(model=str(folder)).job))


def test_a_copy_has_the_same_fingerprint_and_files_that_are_no_weights_do_not_count(
    model, tmp_path
):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("a copy")
    assert of(copy) == of(model)
    assert len(of(copy)) == 16


def test_other_weights_and_another_configuration_have_other_fingerprints(model, tmp_path):
    retrained = shutil.copytree(model, tmp_path / "retrained")
    weights = retrained / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    configured = shutil.copytree(model, tmp_path / "configured")
    config = configured / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert len({of(model), of(retrained), of(configured)}) == 3


def test_a_model_of_the_hub_has_the_fingerprint_of_all_its_weights(model, tmp_path, monkeypatch):
    """In a cache as the Hugging Face client keeps it, without any network. Weights in two files,
    named by an index. A cache that holds the configuration only, as before the first load, has no
    fingerprint."""
    cache = hub_cache(model, tmp_path / "hf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (shard,) = cache.glob("hub/models--hone--tiny/snapshots/*/model-00002-of-00002.safetensors")
    before = of("hone/tiny")
    assert len(before) == 16
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert of("hone/tiny") != before
    for file in shard.parent.glob("model*"):
        file.unlink()
    with pytest.raises(BadRequest, match="the model 'hone/tiny' has no weights"):
        of("hone/tiny")


def hub_cache(model, folder):
    """Returns a cache that holds `model`, in two shards, under an id of the hub."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = folder / "hub/models--hone--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    blobs = repository / "blobs"
    blobs.mkdir()
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(
        tmp := folder / "saved", max_shard_size="300KB"
    )
    for file in tmp.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blobs / digest)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    return folder
