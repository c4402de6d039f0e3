"""A model's fingerprint: the same for the same model wherever it lies, another for another one."""

import shutil

import pytest

from services.trainer.disk.fingerprint import model_fingerprint
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_fakes import job_request


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def of(folder) -> str:
    return model_fingerprint(job_request(model=str(folder)).job)


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
