"""How large a model is: by its configuration, as published, and by its files."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.errors import BadRequest
from shared.job import LoraSpec
from shared.plan.model import UnknownModelSize, find_model, of_config
from tests.support.plan_models import LLAMA_8B, PUBLISHED, QWEN_05B, model

SHAPES = {
    "model.embed_tokens.weight": (1000, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.mlp.up_proj.weight": (256, 64),
    "model.norm.weight": (64,),
}
CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty Hugging Face cache, and a Hub that may not be asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_model(folder: Path, config: dict[str, object] = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_configuration_are_as_many_as_published(name: str) -> None:
    assert model(name).num_parameters == PUBLISHED[name][1]


def test_qwen3_has_norms_of_queries_and_keys_and_no_biases() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    assert of_config(config, "Qwen3-0.6B").num_parameters == 596_049_920


def test_a_folder_is_counted_by_its_files(tmp_path: Path) -> None:
    found = find_model(str(write_model(tmp_path)))
    assert found.num_parameters == 64_000 + 4_096 + 16_384 + 64
    assert (found.heads, found.kv_heads, found.head_size, found.max_len) == (8, 2, 8, 128)


def test_a_tied_head_that_is_stored_all_the_same_is_counted_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG | {"tie_word_embeddings": True})
    head = {"lm_head.weight": np.zeros((1000, 64), np.float16)}
    tensors = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}
    save_file(tensors | head, folder / "model.safetensors")
    assert find_model(str(folder)).num_parameters == 84_544
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert find_model(str(folder)).num_parameters == 84_544 + 64_000


def test_only_the_files_of_the_index_are_counted_and_all_of_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    other = {"layers.0.attention.wq.weight": np.zeros((64, 64), np.float16)}
    save_file(other, folder / "consolidated.safetensors")
    assert find_model(str(folder)).num_parameters == 84_544
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = dict.fromkeys(SHAPES, "model-00001-of-00002.safetensors")
    shards["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UnknownModelSize, match=r"lacks model-00002-of-00002\.safetensors of its"):
        find_model(str(folder))
    del shards["lm_head.weight"]
    index.write_text(json.dumps({"weight_map": shards}))
    assert find_model(str(folder)).num_parameters == 84_544


def test_a_single_file_is_loaded_before_the_index_beside_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_model(str(folder)).num_parameters == 84_544


def test_a_cached_model_with_half_of_its_files_is_not_cached(offline: Path) -> None:
    folder = write_model(offline / "models--owner--model" / "snapshots" / "main")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UnknownModelSize, match="nor in the Hugging Face cache"):
        find_model("owner/model")


def test_adapters_are_rank_by_inputs_and_outputs(tmp_path: Path) -> None:
    found = find_model(str(write_model(tmp_path)))
    assert found.num_trainable(LoraSpec(rank=4)) == 4 * (64 + 64) + 4 * (256 + 64)
    only = LoraSpec(rank=4, target_modules=("q_proj",))
    assert found.num_trainable(only) == 4 * (64 + 64)
    # q, k, v, o: 896 + 896, 896 + 128, 896 + 128, 896 + 896; three of 896 + 4864; 24 layers
    small = of_config(QWEN_05B, "small")
    assert small.num_trainable(LoraSpec(rank=16)) == 16 * 24 * (1792 * 2 + 1024 * 2 + 5760 * 3)


def test_a_cached_model_is_counted_without_asking_the_hub(offline: Path) -> None:
    root = offline / "models--owner--model"
    write_model(root / "snapshots" / "abc")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    assert find_model("owner/model").num_parameters == 84_544
    assert find_model("owner/model", "abc").num_parameters == 84_544
    with pytest.raises(UnknownModelSize, match="nor in the Hugging Face cache"):
        find_model("owner/model", "other")


@pytest.mark.usefixtures("offline")
def test_a_hub_model_that_may_not_be_asked_for_is_named() -> None:
    with pytest.raises(UnknownModelSize) as raised:
        find_model("owner/model")
    assert str(raised.value) == (
        "the model 'owner/model' is neither a folder here nor in the Hugging Face cache, and the "
        "Hub was not asked"
    )


def answered(monkeypatch: pytest.MonkeyPatch, response: httpx2.Response | Exception) -> Mock:
    """Has the Hub give this to whoever asks it once."""
    get = Mock(side_effect=[response])
    monkeypatch.setattr("shared.plan.model.httpx2.get", get)
    return get


@pytest.mark.usefixtures("offline")
def test_the_hub_is_asked_for_the_configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.test/")
    get = answered(monkeypatch, httpx2.Response(200, json=LLAMA_8B))
    assert find_model("owner/model", "v2").num_parameters == 8_030_261_248
    assert get.call_args.args == ("http://hub.test/owner/model/resolve/v2/config.json",)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            httpx2.ConnectError("no route"),
            r"https://huggingface.co gives no config.json of it \(ConnectError\); "
            "a gated model needs HF_TOKEN, and a mirror is named by HF_ENDPOINT",
        ),
        (httpx2.Response(404), "answers 404 for its config.json, .* a gated model needs HF_TOKEN"),
        (httpx2.Response(200, text="<html>"), r"gives no config.json of it \(JSONDecodeError\)"),
        (httpx2.Response(200, json=[1]), "with no JSON object"),
        (httpx2.Response(200, json={"model_type": "gemma4", **CONFIG}), "is of type 'gemma4', who"),
        (httpx2.Response(200, json={"num_experts": 8}), "has no 'num_experts_per_tok'"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_what_the_hub_does_not_say_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, response: httpx2.Response | Exception, message: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    answered(monkeypatch, response)
    with pytest.raises(UnknownModelSize, match=message):
        find_model("owner/model")


def test_a_folder_without_a_configuration_or_a_size_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        UnknownModelSize, match=r"config\.json of the model '.*' has no 'hidden_size'"
    ):
        find_model(str(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": "x"}))
    with pytest.raises(UnknownModelSize, match="has a size that is none: invalid literal"):
        find_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UnknownModelSize, match="cannot be read"):
        find_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(BadRequest, match=r"has no config\.json; expected a folder with"):
        find_model(str(folder))
    with pytest.raises(BadRequest, match=r"there is no folder '\./nothing' here"):
        find_model("./nothing")


QWEN_30B = CONFIG | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
MIXTRAL_8X7B = CONFIG | {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "all_of_them", "experts", "share"),
    [
        # 48 layers of 128 experts of 3 x 2048 x 768; published as 30.5B, of which 3.3B are active
        (QWEN_30B, 30_532_122_624, 28_991_029_248, 8 / 128),
        # 32 layers of 8 experts of 3 x 4096 x 14336; published as 46.7B, of which 12.9B are active
        (MIXTRAL_8X7B, 46_702_792_704, 45_097_156_608, 2 / 8),
    ],
    ids=["Qwen3-30B-A3B", "Mixtral-8x7B"],
)
def test_memory_counts_all_experts_and_time_those_of_a_token(
    config: dict[str, object], all_of_them: int, experts: int, share: float
) -> None:
    found = of_config(config, "m")
    assert found.num_parameters == all_of_them
    assert found.num_active == all_of_them - experts * (1 - share)
    dense = of_config(CONFIG | {"model_type": "llama"}, "m")
    assert dense.num_active == dense.num_parameters
