"""Adapters: merging, and what is refused. What training does with them is in test_engine.py."""

from __future__ import annotations

import json

import pytest
import torch

from services.rollout.weights.adapter_files import adapter_shapes, read_config
from services.rollout.weights.proofs import shapes
from services.trainer.zero import lora
from services.trainer.zero.internals import whole_weights
from shared.adapters import CONFIG
from shared.digest import stored_tensors
from shared.errors import BadRequest
from shared.job import LoraSpec
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
