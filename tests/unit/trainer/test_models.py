"""What is no model is said quickly and in words."""

import importlib.util
import json

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.trainer.zero import models
from services.trainer.zero.models import check_model, copy_tokenizer
from shared.errors import BadRequest, Unavailable
from tests.support.engine_ranks import a_job
from tests.support.model_folders import CONFIG, make_model_folder
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_fakes import job_request


def test_an_id_that_is_not_cached_on_a_host_without_a_network_is_one_sentence(
    monkeypatch, tmp_path
):
    """A job waits for the hub: it is not to blame that it is unreachable."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        Unavailable,
        match=r"'nobody/nothing' is neither a folder .* http://127.0.0.1:9 cannot be reached",
    ):
        check_model(job_request(model="nobody/nothing").job)


def test_an_id_the_hub_does_not_know_is_one_sentence(monkeypatch):
    def cached_file(_model, _name, *, revision, local_files_only=False):
        raise OSError("nobody/nothing is not a valid model identifier\nmore lines")

    monkeypatch.setattr(models, "cached_file", cached_file)
    monkeypatch.setattr(httpx2, "head", lambda *_args, **_kwargs: None)
    sentence = (
        "has no model 'nobody/nothing' for this token: "
        "nobody/nothing is not a valid model identifier; expected"
    )
    with pytest.raises(BadRequest, match=sentence):
        check_model(job_request(model="nobody/nothing").job)


ROPES = {
    "dynamic": {"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "longrope": {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 8,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.0],
            "long_factor": [2.0, 2.0],
        },
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_depends_on_the_longest_row_only_beyond_the_original_window(kind):
    rope = LlamaRotaryEmbedding(LlamaConfig(hidden_size=16, num_attention_heads=4, **ROPES[kind]))

    def sine_of_position_1(longest: int) -> float:
        _, sine_BTH = rope(torch.zeros(1), torch.arange(longest)[None])
        return sine_BTH[0, 1, 1].item()  # of the second frequency, which is 0.01

    original = sine_of_position_1(8)
    assert sine_of_position_1(2) == original
    assert sine_of_position_1(9) < 0.9 * original


def test_a_model_whose_rope_depends_on_the_longest_row_is_refused(tmp_path):
    folder = make_model_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG | ROPES["dynamic"]))
    check_model(a_job(folder, max_model_len=8))
    with pytest.raises(BadRequest, match="RoPE of type 'dynamic'"):
        check_model(a_job(folder, max_model_len=9))


def test_a_tokenizer_is_copied_byte_for_byte_and_nothing_else_is(tmp_path):
    source, target = tmp_path / "model", tmp_path / "checkpoint"
    source.mkdir(), target.mkdir()
    for name in (
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "model.safetensors",
        "config.json",
    ):
        (source / name).write_bytes(name.encode())
    copy_tokenizer(job_request(model=str(source)).job, target)
    assert {file.name: file.read_bytes().decode() for file in target.iterdir()} == {
        name: name for name in ("tokenizer.json", "merges.txt", "chat_template.jinja")
    }


def test_an_attention_implementation_that_is_not_installed_is_one_sentence(tmp_path):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash attention is installed here")
    job = a_job(make_tiny_model(tmp_path / "model"), memory={"attention": "flash_attention_2"})
    with pytest.raises(
        BadRequest, match=r"memory\.attention is 'flash_attention_2', which is not installed: "
    ):
        models.load_model(job, torch.float32, torch.device("cpu"))


def test_the_attention_implementation_is_the_one_that_is_asked_for(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    for asked in ("eager", "sdpa"):
        model = models.load_model(
            a_job(folder, memory={"attention": asked}), torch.float32, torch.device("cpu")
        )
        assert model.config._attn_implementation == asked


def test_attention_whose_logits_are_capped_is_computed_with_the_cap(tmp_path):
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=0.5,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids, cpu = torch.arange(12)[None], torch.device("cpu")
    eager = models.load_model(a_job(tmp_path, memory={"attention": "eager"}), torch.float32, cpu)
    ours = models.load_model(a_job(tmp_path), torch.float32, cpu)
    assert ours.config._attn_implementation == "eager"
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits)
    with pytest.raises(BadRequest, match=r"memory.attention is 'sdpa', which leaves out the cap"):
        models.load_model(a_job(tmp_path, memory={"attention": "sdpa"}), torch.float32, cpu)
