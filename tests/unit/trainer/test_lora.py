"""Adapters: merging, and what is refused. What training does with them is in test_engine.py."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from services.rollout.weights.proofs import adapter_shapes, read_config, shapes
from services.trainer.zero import lora
from services.trainer.zero.internals import whole_weights
from shared.errors import BadRequest
from shared.job import LoraSpec
from shared.plan.model import find_model
from shared.weights.folders import CONFIG, stored_tensors
from tests.support.tiny_experts import KINDS, make_tiny_experts
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def load(folder, dtype: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def test_lora_merge_precision_small_deltas_survive_and_the_base_never_drifts(folder):
    """Rounded to bfloat16 before it is added, a small delta would be another; and a base to which
    it is added and taken away again would wander."""
    model = load(folder, "bfloat16")
    lora.attach(model, LoraSpec(rank=2, alpha=3.0, target_modules=("q_proj",)))
    name = "model.layers.0.self_attn.q_proj"
    layer = lora.lora_layers(model)[name]
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(0.01)
        layer.lora_B["default"].weight.fill_(0.013)
    base = layer.base_layer.weight.detach().clone()
    a, b = (layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double())
    expected = (base.double() + 1.5 * b @ a).float().bfloat16()
    for _ in range(10):
        merged = lora.merged(model, whole_weights(model))
    torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=0, atol=0)
    assert 0 < (merged[f"{name}.weight"] != base).float().mean() < 1, (
        "the delta is below the grid for some weights only"
    )
    assert torch.equal(layer.base_layer.weight, base)
    assert merged.keys() == load(folder, "bfloat16").state_dict().keys()


def test_all_linear_is_every_linear_layer_but_the_head_and_trains_adapters_only(folder):
    model = load(folder, "float32")
    lora.attach(model, LoraSpec(rank=2))
    kinds = {name.rpartition(".")[2] for name in lora.lora_layers(model)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_what_samplers_expect_of_an_adapter_is_what_peft_writes(folder, tmp_path, targets):
    model = load(folder, "bfloat16")
    wrapped = lora.attach(model, LoraSpec(rank=3, alpha=5.0, target_modules=targets))
    lora.save_adapter(wrapped, whole_weights(model, lora.is_adapters), tmp_path)
    expected = adapter_shapes(read_config(tmp_path), shapes(stored_tensors(folder)))
    stored = stored_tensors(tmp_path)
    assert shapes(stored) == expected
    assert {tensor.dtype for tensor in stored.values()} == {"BF16"}
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 5.0)


def test_dropout_is_off_until_it_is_turned_on(folder):
    model = load(folder, "float32")
    lora.attach(model, LoraSpec(rank=2, dropout=0.9)).eval()
    with torch.no_grad():
        for layer in lora.lora_layers(model).values():
            layer.lora_B["default"].weight.fill_(0.1)
    ids = torch.arange(8)[None]

    def differ() -> bool:
        return not torch.equal(model(ids).logits, model(ids).logits)

    assert not differ()
    lora.set_dropout(model, True)
    assert differ()
    lora.set_dropout(model, False)
    assert not differ()


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (
            ("q_proj", "nope"),
            "lora.target_modules names 'nope', and the model has no such layer; expected names of "
            "its layers",
        ),
        (("no_such_layer",), r"lora.target_modules is \('no_such_layer',\)"),
        (
            ("embed_tokens",),
            "lora.target_modules names 'model.embed_tokens', a Embedding; expected linear layers",
        ),
        (
            ("lm_head", "q_proj"),
            "lora.target_modules names 'lm_head', whose weight is also the model's embedding",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_target_modules_that_cannot_be_merged_are_refused(folder, targets, sentence):
    with pytest.raises(BadRequest, match=sentence):
        lora.attach(load(folder, "float32"), LoraSpec(rank=2, target_modules=targets))


def save_vision_language_model(folder) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = sizes | {"vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16}
    vision = sizes | {"image_size": 16, "patch_size": 4}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "k_proj")])
def test_the_vision_tower_of_a_text_job_has_no_adapters(tmp_path, targets):
    save_vision_language_model(tmp_path)
    model = load(tmp_path, "float32")
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    lora.attach(model, LoraSpec(rank=2, target_modules=targets))
    adapted = set(lora.lora_layers(model))
    prefix, head = "model.language_model.layers.", {"lm_head"}
    wanted = {name for name in linear - head if name.startswith(prefix)}
    if targets != "all-linear":
        wanted = {name for name in wanted if name.endswith(targets)}
    assert len(wanted) == (14 if targets == "all-linear" else 4) and adapted == wanted
    assert any("vision_tower" in name and name.endswith("q_proj") for name in linear)
    plan = find_model(str(tmp_path))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert plan.num_trainable(LoraSpec(rank=2, target_modules=targets)) == trained


def test_adapters_on_a_vision_tower_alone_are_refused(tmp_path):
    save_vision_language_model(tmp_path)
    with pytest.raises(BadRequest, match=r"lora.target_modules is \('fc1',\)"):
        lora.attach(load(tmp_path, "float32"), LoraSpec(rank=2, target_modules=("fc1",)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_experts_has_adapters_on_its_attention(tmp_path, kind):
    make_tiny_experts(kind, tmp_path)
    model, spec = load(tmp_path, "float32"), LoraSpec(rank=2)
    wrapped = lora.attach(model, spec)
    kinds = {name.rpartition("layers.0.")[2] for name in lora.lora_layers(model) if ".0." in name}
    assert kinds == {f"self_attn.{each}_proj" for each in "qkvo"}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Of each of two layers: q and o are 64 x 64, k and v 64 x 32; rank 2.
    assert trained == 2 * 2 * (2 * (64 + 64) + 2 * (64 + 32))
    assert find_model(str(tmp_path)).num_trainable(spec) == trained
    torch.manual_seed(0)  # one adapter of 40 amplifies rounding to more than is allowed below
    with torch.no_grad():
        for layer in lora.lora_layers(model).values():
            layer.lora_B["default"].weight.normal_(std=0.3)
    merged, ids = load(tmp_path, "float32"), torch.arange(12)[None]
    merged.load_state_dict(lora.merged(model, whole_weights(model)))
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)
    (tmp_path / "adapter").mkdir()
    lora.save_adapter(wrapped, whole_weights(model, lora.is_adapters), tmp_path / "adapter")
    expected = adapter_shapes(read_config(tmp_path / "adapter"), shapes(stored_tensors(tmp_path)))
    assert shapes(stored_tensors(tmp_path / "adapter")) == expected
    for targets, sentence in (("gate", "expected linear layers"), ("experts", "is not supported")):
        with pytest.raises(BadRequest, match=sentence):
            lora.attach(load(tmp_path, "float32"), LoraSpec(rank=2, target_modules=(targets,)))
